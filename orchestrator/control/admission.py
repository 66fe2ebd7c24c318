"""Which requests are taken in, by the state of all replicas."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.control.port import StateView
from orchestrator.control.state import FAILED
from orchestrator.errors import RequestError

_RETRY_AFTER_S = {"starting": 5, "draining": 10, "failed": 60}


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """`max_running` live streams for each replica and `max_waiting` for all; one more is answered 429. `max_restarts`
    of each in ten minutes. `request_timeout_s` bounds every request; 0 is no bound. `least_depth`: nobody's wish bounds
    the depth below it, but for 0."""

    max_running: int
    max_waiting: int
    max_restarts: int
    request_timeout_s: float = 0.0
    least_depth: int = 0


def refuse_or_pass(view: StateView, limits: ControlLimits, retry_after_s: int) -> None:
    """Raise RequestError where a request cannot be taken in now. A replica that is started again keeps its places."""
    phase = view.phase
    if phase in _RETRY_AFTER_S:
        detail = f": {view.detail}" if view.detail and phase != "draining" else ""
        raise RequestError(
            f"the model is {phase}{detail}" if phase != FAILED else f"the model has failed{detail}",
            status=503,
            kind="server_error",
            code=f"model_{phase}",
            retry_after_s=_RETRY_AFTER_S[phase],
        )
    places = sum(replica.phase != FAILED for replica in view.replicas)
    if view.streams >= places * limits.max_running + limits.max_waiting:
        raise RequestError(
            f"the queue is full: {view.streams} requests run or wait",
            status=429,
            kind="rate_limit_error",
            code="queue_full",
            retry_after_s=retry_after_s,
        )
