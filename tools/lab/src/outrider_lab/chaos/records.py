"""What a run leaves behind: its faults, its streams, its restarts, and the figures made of them. No effects."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from outrider_lab.chaos.compare import NO_DIFFERENCE, Difference

DAEMON = "daemon"
"""Its name among the workers. Where it ends by itself, a fault that costs workers may be the cause."""
SETTLE_S = 2.0
"""So long after a fault was cleared, restarts are still its own."""
DRAINED_S = 1.0
"""A pause is a fault's own when it begins before the fault, or at most so much later: tokens are on their way."""
PAUSE_S = 0.5
"""Of gaps that begin behind a fault, only so long ones are pauses: shorter ones are the pace of tokens."""
ACTIVITY_GAP_S = 0.25
"""Tokens that are no further apart are one stretch of activity in the report."""


@dataclass(slots=True)
class FaultRecord:
    """One fault. `victims` are the workers that it may cost; `cleared_s`: when they served again, and it was healed."""

    number: int
    kind: str
    planned_s: float
    disrupts: bool = True
    began_s: float | None = None
    healed_s: float | None = None
    cleared_s: float | None = None
    victims: tuple[str, ...] = ()
    detail: str = ""
    skipped: str = ""
    recovery_s: float | None = None
    ready_after_s: float | None = None


@dataclass(slots=True)
class StreamRecord:
    """One request of a client. `times_s`: when tokens came."""

    number: int
    lane: int
    case: str
    streamed: bool
    began_s: float
    ended_s: float = math.inf
    times_s: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""
    difference: Difference = NO_DIFFERENCE
    unfinished_tokens: int = 0
    resumes: int = 0
    first_difference: str = ""
    changes: int = 0
    unmarked: bool = False


@dataclass(frozen=True, slots=True)
class Restart:
    """A worker, or the daemon, that was there again after an end. `count`: how often, between two looks."""

    at_s: float
    worker: str
    count: int
    detail: str


def is_explained(restart: Restart, faults: Sequence[FaultRecord]) -> bool:
    for fault in faults:
        may_cost = restart.worker in fault.victims or (restart.worker == DAEMON and bool(fault.victims))
        if fault.began_s is None or not may_cost:
            continue
        until_s = math.inf if fault.cleared_s is None else fault.cleared_s + SETTLE_S
        if fault.began_s <= restart.at_s <= until_s:
            return True
    return False


def find_false_alarms(restarts: Sequence[Restart], faults: Sequence[FaultRecord]) -> list[Restart]:
    return [restart for restart in restarts if not is_explained(restart, faults)]


def measure_recovery(at_s: float, streams: Sequence[StreamRecord]) -> float | None:
    """Return after how many seconds every stream that was running at a moment had its next token.

    Counted are streams that had a token before. None: there was none, or one of them had no further token.
    """
    longest: float | None = None
    for stream in streams:
        times = stream.times_s
        if not times or times[0] > at_s or stream.ended_s < at_s:
            continue
        if stream.error and times[-1] <= at_s + DRAINED_S:
            return None
        for before, after in zip(times, [*times[1:], stream.ended_s], strict=True):
            begins = before <= at_s or (before <= at_s + DRAINED_S and after - before >= PAUSE_S)
            if after > at_s and begins and math.isfinite(after):
                longest = max(longest or 0.0, after - at_s)
    return longest


def measure_silence(stream: StreamRecord) -> float:
    """Return the longest time in which a streamed answer had no token, from its request to its end."""
    ends = (stream.began_s, *stream.times_s, stream.ended_s)
    return max(after - before for before, after in pairwise(ends)) if stream.streamed else 0.0


def list_activity(times_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return the stretches in which tokens came."""
    found: list[tuple[float, float]] = []
    for at_s in times_s:
        if found and at_s - found[-1][1] <= ACTIVITY_GAP_S:
            found[-1] = (found[-1][0], at_s)
        else:
            found.append((at_s, at_s))
    return found


def kinds_met(stream: StreamRecord, faults: Sequence[FaultRecord]) -> list[str]:
    met = (
        fault.kind
        for fault in faults
        if fault.began_s is not None
        and fault.began_s <= stream.ended_s
        and (fault.cleared_s is None or fault.cleared_s >= stream.began_s)
    )
    return sorted(set(met))


def summarise(
    faults: Sequence[FaultRecord], streams: Sequence[StreamRecord], restarts: Sequence[Restart]
) -> dict[str, Any]:
    """Return the figures by which a run is judged."""
    injected = [fault for fault in faults if fault.began_s is not None]
    recoveries = [fault.recovery_s for fault in injected if fault.disrupts and fault.recovery_s is not None]
    total = sum((stream.difference for stream in streams), NO_DIFFERENCE)
    return {
        "faults": len(injected),
        "fault_kinds": dict(sorted(Counter(fault.kind for fault in injected).items())),
        "streams": len(streams),
        "client_errors": sum(bool(stream.error) for stream in streams),
        "wrong_tokens": total.wrong,
        "lost_tokens": total.lost,
        "doubled_tokens": total.doubled,
        "recovery_p50_s": _percentile(recoveries, 50),
        "recovery_p99_s": _percentile(recoveries, 99),
        "false_alarms": sum(restart.count for restart in find_false_alarms(restarts, faults)),
        "longest_silence_s": round(max(map(measure_silence, streams), default=0.0), 3),
        "tokens": sum(stream.tokens for stream in streams),
        "unfinished_tokens": sum(stream.unfinished_tokens for stream in streams),
        "resumes": sum(stream.resumes for stream in streams),
        "changed_group": sum(bool(stream.changes) for stream in streams),
        "unmarked_changes": sum(stream.unmarked for stream in streams),
        "restarts": sum(restart.count for restart in restarts),
        "faults_without_target": sum(bool(fault.skipped) for fault in faults),
    }


LOSSES = ("client_errors", "wrong_tokens", "lost_tokens", "doubled_tokens", "unmarked_changes", "false_alarms")


def is_whole(summary: dict[str, Any]) -> bool:
    """Return whether nothing was lost."""
    return not any(summary[name] for name in LOSSES)


def summarise_kinds(faults: Sequence[FaultRecord], streams: Sequence[StreamRecord]) -> dict[str, dict[str, Any]]:
    """Return for each kind what streams lost that ran while it held. A stream counts under every kind that it met."""
    found: dict[str, dict[str, Any]] = {}
    met = [(stream, kinds_met(stream, faults)) for stream in streams]
    for kind in sorted({fault.kind for fault in faults}):
        mine = [fault for fault in faults if fault.kind == kind and fault.began_s is not None]
        recoveries = [fault.recovery_s for fault in mine if fault.recovery_s is not None]
        ready = [fault.ready_after_s for fault in mine if fault.ready_after_s is not None]
        here = [stream for stream, kinds in met if kind in kinds]
        total = sum((stream.difference for stream in here), NO_DIFFERENCE)
        found[kind] = {
            "faults": len(mine),
            "streams_met": len(here),
            "client_errors": sum(bool(stream.error) for stream in here),
            "wrong_tokens": total.wrong,
            "lost_tokens": total.lost,
            "doubled_tokens": total.doubled,
            "recovery_p50_s": _percentile(recoveries, 50),
            "recovery_max_s": max(recoveries, default=None),
            "longest_silence_s": round(max(map(measure_silence, here), default=0.0), 3),
            "ready_max_s": max(ready, default=None),
            "never_ready": sum(bool(fault.victims) and fault.cleared_s is None for fault in mine),
        }
    return found


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if values else None
