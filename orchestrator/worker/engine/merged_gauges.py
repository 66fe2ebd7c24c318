"""The gauges of several decode loops over one target, as of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import msgspec

from orchestrator.protocol.draft_messages import DrafterState, RemoteState
from orchestrator.protocol.rounds import AcceptanceWarning, Gauges, MemoryBound, SloState

_COUNTS = (
    *("running", "waiting", "preemptions", "rounds"),
    *("prefix_queries", "prefix_hits", "out_of_memory", "not_finite"),
)
_REMOTE_COUNTS = ("asks", "in_time", "late", "wait_ms", "connections", "ahead_hits", "ahead_misses")
_DRAFTER_COUNTS = ("rounds", "draft_ms", "drafted", "accepted", "statistics_drafted", "statistics_accepted")


def merge_gauges(loops: Sequence[Gauges], places: Sequence[int]) -> Gauges:
    """Return one loop's gauges of several loops' over one target, which run so many sequences each at most. Blocks and
    the process's memory are the same in each of them, and drafters of one name share what they hold."""
    first = loops[0]
    if len(loops) == 1:
        return first
    return msgspec.structs.replace(
        first,
        **{name: sum(getattr(gauges, name) for gauges in loops) for name in _COUNTS},
        drafter_bytes=max(gauges.drafter_bytes for gauges in loops),
        drafters=_merge_drafters(loops),
        tolerance_deltas=_merge_deltas(loops),
        low_acceptance=_merge_warnings(loops),
        slo=_merge_slo([gauges.slo for gauges in loops if gauges.slo is not None]),
        memory_bound=_merge_memory_bounds([gauges.memory_bound for gauges in loops], places),
    )


def _merge_drafters(loops: Sequence[Gauges]) -> list[DrafterState]:
    """Return the drafters, those of one name as one. One that does not work in every loop is as it is where it does
    not."""
    by_name: dict[str, list[DrafterState]] = {}
    for gauges in loops:
        for state in gauges.drafters:
            by_name.setdefault(state.name, []).append(state)
    return [_merge_states(states) for states in by_name.values()]


def _merge_states(states: Sequence[DrafterState]) -> DrafterState:
    shown = next((state for state in states if state.state != "ok"), states[0])
    counts = {name: sum(getattr(state, name) for state in states) for name in _DRAFTER_COUNTS}
    counts["memory_bytes"] = max(state.memory_bytes for state in states)
    remotes = [state.remote for state in states if state.remote is not None]
    return msgspec.structs.replace(shown, **counts, remote=reduce(_add_remotes, remotes) if remotes else None)


def _add_remotes(left: RemoteState, right: RemoteState) -> RemoteState:
    counts = {name: getattr(left, name) + getattr(right, name) for name in _REMOTE_COUNTS}
    return msgspec.structs.replace(
        left,
        **counts,
        answer_ms=max(left.answer_ms, right.answer_ms),
        peak_rss_bytes=max(left.peak_rss_bytes, right.peak_rss_bytes),
        runs_ahead=left.runs_ahead or right.runs_ahead,
    )


def _merge_deltas(loops: Iterable[Gauges]) -> dict[str, float]:
    deltas: dict[str, float] = {}
    for gauges in loops:
        for kind, delta in gauges.tolerance_deltas.items():
            deltas[kind] = max(delta, deltas.get(kind, delta))
    return deltas


def _merge_warnings(loops: Iterable[Gauges]) -> list[AcceptanceWarning]:
    """Return the warnings, of each drafter and class the one that the most drafts led to."""
    by_class: dict[tuple[str, str, str], AcceptanceWarning] = {}
    for gauges in loops:
        for warning in gauges.low_acceptance:
            key = (warning.drafter, warning.route, warning.user)
            if key not in by_class or warning.drafted > by_class[key].drafted:
                by_class[key] = warning
    return list(by_class.values())


def _merge_slo(states: Sequence[SloState]) -> SloState | None:
    """Return the state of the loop that is the furthest from its objectives, with what all of them move."""
    if not states:
        return None
    worst = max(states, key=lambda state: (len(state.levers), state.tpot_ms or 0.0, state.ttft_ms or 0.0))
    return msgspec.structs.replace(
        worst,
        ttft_ms=_find_longest([state.ttft_ms for state in states]),
        tpot_ms=_find_longest([state.tpot_ms for state in states]),
        row_price=max(state.row_price for state in states),
        prefill_share=min(state.prefill_share for state in states),
        max_running=sum(state.max_running for state in states),
        levers=list(dict.fromkeys(lever for state in states for lever in state.levers)),
    )


def _find_longest(times_ms: Iterable[float | None]) -> float | None:
    return max((time_ms for time_ms in times_ms if time_ms is not None), default=None)


def _merge_memory_bounds(bounds: Sequence[MemoryBound | None], places: Sequence[int]) -> MemoryBound | None:
    """Return the tightest bound of a forward, for all sequences together."""
    tightest = min((bound for bound in bounds if bound is not None), key=lambda bound: bound.rows, default=None)
    if tightest is None:
        return None
    sequences = [most if bound is None else bound.sequences for bound, most in zip(bounds, places, strict=True)]
    return msgspec.structs.replace(tightest, sequences=sum(sequences))
