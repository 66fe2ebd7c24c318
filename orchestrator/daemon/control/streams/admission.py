"""Which requests are taken in: mostly by control's own counts, else by the state of all replicas. No effects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.daemon.control.control_state import State
from orchestrator.daemon.control.port import ReplicaView, StateView
from orchestrator.daemon.control.routing.loads import SMOOTHING, LoadBoard
from orchestrator.daemon.control.routing.surroundings import HYSTERESIS, Surroundings
from orchestrator.daemon.control.state import FAILED, RESTARTING, STARTING, effective_places
from orchestrator.daemon.control.streams.request_history import MAX_RETRY_AFTER_S
from orchestrator.daemon.control.streams.streams import Streams
from orchestrator.errors import RequestError
from policies.serving.failover.standby import NO_RULES, FailoverRules
from policies.serving.routing import EVEN_WEIGHTS, RoutingWeights
from policies.serving.slo import ANY, Objective, retry_s

# By the phase: what a client may ask again after. Not tuned.
_RETRY_AFTER_S = {"starting": 5, "draining": 10, "failed": 60}


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """`max_running` live streams for each replica and `max_waiting` for all; one more is answered 429. `max_restarts`
    of each in ten minutes, before it is tried once a minute only. `quarantine_s`: how long a request is refused that
    ended its workers. `request_timeout_s` bounds every request; 0 is no bound. `least_depth`: no override bounds
    the depth below it, but for 0. `failover`: when standbys take over. `refuse_late`: a request that cannot
    be expected to meet `ttft` is answered 429. `weights`, `hysteresis`: see Surroundings. `smoothing`: the weight of
    the newest sample of a device."""

    max_running: int
    max_waiting: int
    max_restarts: int
    request_timeout_s: float = 0.0
    least_depth: int = 0
    ttft: Objective = ANY
    refuse_late: bool = False
    quarantine_s: float = 3600.0
    failover: FailoverRules = NO_RULES
    weights: RoutingWeights = EVEN_WEIGHTS
    hysteresis: float = HYSTERESIS
    smoothing: float = SMOOTHING

    def surround(self) -> Surroundings:
        """Return what routing looks at by these, with nothing known of devices yet."""
        board, ttft_ms = LoadBoard(self.smoothing), self.ttft.ms or 0.0
        return Surroundings(board, self.weights, self.hysteresis, self.request_timeout_s, ttft_ms)


class Asked(NamedTuple):
    """A request that takes `wanted` places, where `coming` others are about to be taken in."""

    wanted: int = 1
    coming: int = 0


ONE = Asked()


def refuse_or_pass(
    view: StateView, limits: ControlLimits, streams: Streams, now_s: float, request: Asked = ONE
) -> None:
    """Raise RequestError where a request cannot be taken in now. A replica that is started again keeps its places."""
    phase = view.phase
    if phase in _RETRY_AFTER_S and not (phase == STARTING and view.residency is not None):  # else it waits for the load
        detail = f": {view.detail}" if view.detail and phase != "draining" else ""
        raise RequestError(
            f"the model is {phase}{detail}" if phase != FAILED else f"the model has failed{detail}",
            status=503,
            code=f"model_{phase}",
            retry_after_s=_RETRY_AFTER_S[phase],
        )
    tried = [replica for replica in view.replicas if replica.phase != FAILED]
    if phase == RESTARTING and not view.standbys and all(replica.spent for replica in tried):
        raise RequestError(
            f"the model is restarting: {view.detail}",
            status=503,
            code="model_restarting",
            retry_after_s=math.ceil(max(1.0, min(replica.back_in_s for replica in tried))),
        )
    if why := describe_held(view):
        retry_after_s = _RETRY_AFTER_S["draining"]
        raise RequestError(why, status=503, code="model_cordoned", retry_after_s=retry_after_s)
    places = sum(places_of(replica) for replica in view.replicas)
    load_s = view.residency.load_s if view.residency is not None else 0.0
    refuse_crowd(Crowd(view.streams, len(tried), places, load_s), limits, streams, now_s, request)


def check_room(
    state: State, limits: ControlLimits, look: Callable[[], StateView], now_s: float, request: Asked = ONE
) -> None:
    """Raise RequestError where a request cannot be taken in now; `look` returns the view that says why."""
    fleet = state.fleet
    fleet.refresh()
    if state.draining or not fleet.count_ready() or (state.health.holds and _are_held(state, now_s)):
        refuse_or_pass(look(), limits, state.streams, now_s, request)
        return
    crowd = Crowd(len(state.streams), fleet.count_hopeful(), fleet.count_usable_places())
    refuse_crowd(crowd, limits, state.streams, now_s, request)


def _are_held(state: State, now_s: float) -> bool:
    """True where an operator keeps work away from every replica: mostly the first one that is asked for says no."""
    return all(
        state.health.judge(replica.parts, now_s, replica.name).held
        for replica in state.replicas.serving
        if not replica.standing.failed
    )


def describe_held(view: StateView) -> str:
    """Return, in words, what an operator keeps from work where no replica takes requests for it; "" elsewhere."""
    tried = [replica for replica in view.replicas if replica.phase != FAILED]
    held = bool(tried) and all(replica.held for replica in tried) and not view.standbys
    return f"no target takes requests: {tried[0].held}" if held else ""


class Crowd(NamedTuple):
    """The `streams` there are, the `replicas` that have not failed, and how many streams these decode at a time. Before
    that their model is loaded, which took `load_s` the last time."""

    streams: int
    replicas: int
    places: int
    load_s: float = 0.0


def refuse_crowd(crowd: Crowd, limits: ControlLimits, streams: Streams, now_s: float, request: Asked = ONE) -> None:
    expected_ms = streams.latency.times.ttft_ms(crowd.streams, max(1, crowd.places))
    late_s = min(MAX_RETRY_AFTER_S, retry_s(expected_ms, limits.ttft))
    most = crowd.replicas * limits.max_running + limits.max_waiting
    if request.wanted > most:
        text = (
            f"this request has {request.wanted} choices, and {most} run or wait here at a time: ask for fewer at once"
        )
        raise RequestError(text, code="too_many_choices")
    if crowd.streams + request.coming + request.wanted > most:
        raise _busy(
            f"the queue is full: {crowd.streams + request.coming} requests run or wait",
            "queue_full",
            max(streams.promise_place(now_s, crowd.places, request.wanted), late_s, math.ceil(crowd.load_s)),
        )
    if limits.refuse_late and late_s:
        raise _busy(
            f"the first token can be expected in {expected_ms / 1000.0:.1f} s, later than slo.ttft_ms "
            f"({limits.ttft.ms:g} ms): {crowd.streams} requests run or wait",
            "slo_ttft",
            late_s,
        )


def _busy(message: str, code: str, retry_after_s: int) -> RequestError:
    return RequestError(message, status=429, code=code, retry_after_s=retry_after_s)


def places_of(replica: ReplicaView) -> int:
    """Return how many streams a replica decodes at a time, as things are; 0 where it serves none."""
    if replica.ready is None or replica.phase == FAILED:
        return 0
    return effective_places(replica.ready, replica.gauges)
