"""A timeline of what failed and what took over: each change of control's own counts and phases, once."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Final

from orchestrator.clock import Clock
from orchestrator.daemon.control.port import StateView
from orchestrator.daemon.control.state import FAILED, READY, RESTARTING, STARTING, UNLOADED

# ADR 0069: bounds memory. Not tuned.
_MOST_EVENTS: Final = 200
_OVER: Final = {"phase": "is gone", "health": "is healthy again"}


@dataclass(frozen=True, slots=True)
class FailoverEvent:
    """Something that happened at `at_s` (since 1970). `kind`: "loss", "restart", "takeover", "phase", "draft", "plan",
    "health" or "scale"; `who` it happened to, and `text` for people."""

    at_s: float
    model: str
    kind: str
    who: str
    text: str


class FailoverTimeline:
    """The last events of all models. Whoever has it shows it a model's state about once a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[int, dict[tuple[str, str], Any]] = {}
        self._events: deque[FailoverEvent] = deque(maxlen=_MOST_EVENTS)

    def describe(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in reversed(self._events)]

    def observe(self, index: int, model: str, view: StateView) -> None:
        """Note what has changed in the state of the model with this index. The first state is where it begins."""
        now = _list_facts(view)
        before = self._seen.get(index)
        self._seen[index] = now
        if before is None:
            return
        reasons = {replica.name: replica.detail for replica in view.replicas}
        for (kind, who), value in now.items():
            if text := _describe_change(kind, before.get((kind, who)), value, reasons.get(who, "")):
                self._events.append(FailoverEvent(self._clock.wall_s(), model, kind, who, text))
        for kind, who in before.keys() - now.keys():
            if kind in _OVER:
                self._events.append(FailoverEvent(self._clock.wall_s(), model, kind, who, _OVER[kind]))


def _list_facts(view: StateView) -> dict[tuple[str, str], Any]:
    """Return what changes are told of: counts, which only grow, and states, which are words."""
    names = {replica.engine: replica.name for replica in (*view.replicas, *view.standbys)}
    facts: dict[tuple[str, str], Any] = {}
    for (engine, loss), count in view.losses.items():
        facts["loss", f"{names.get(engine, engine)} ({loss})"] = count
    for replica in view.replicas:
        facts["phase", replica.name] = replica.phase
        facts["restart", replica.name] = replica.totals.restarts
    for bits, count in view.taken_over.items():
        facts["takeover", f"standby ({bits} bits)"] = count
    for draft in view.drafts:
        facts["draft", f"{draft.name} {draft.number}"] = draft.phase
    for part in view.health:
        facts["health", f"{part.kind} {part.name}"] = part.state
    if view.plan is not None:
        facts["plan", "plan"] = view.plan.moves
    if view.scaling is not None:
        facts["scale", "replicas"] = f"{view.scaling.wanted} wanted"
    return facts


_COUNTED: Final = {
    "loss": "was lost",
    "restart": "is started again",
    "takeover": "took the target's place",
    "plan": "replaced workers",
}


def _describe_change(kind: str, before: Any, now: Any, why: str) -> str:
    """Return what happened, "" where nothing did. `why`: of a replica that failed."""
    if before == now or UNLOADED in (before, now):  # a model that comes and goes is no failover
        return ""
    if kind == "phase" and now == FAILED:
        return f"serves no more: {why}" if before in (READY, RESTARTING) else f"was refused: {why}"
    if kind in _COUNTED:
        return _COUNTED[kind] if now > (before or 0) else ""
    if before == STARTING:
        return ""  # a start is no failover
    if before is None:
        return "" if now == STARTING else str(now)
    return f"{before} to {now}"
