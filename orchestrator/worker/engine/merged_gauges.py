"""The gauges of several decode loops over one target, as of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import msgspec

from orchestrator.protocol.draft_messages import DrafterState, RemoteState
from orchestrator.protocol.messages import AcceptanceWarning, Gauges, MemoryBound, SloState

_COUNTS = (
    *("running", "waiting", "preemptions", "rounds"),
    *("prefix_queries", "prefix_hits", "out_of_memory", "not_finite"),
)
_REMOTE_COUNTS = ("asks", "in_time", "late", "wait_ms", "connections", "ahead_hits", "ahead_misses")
_DRAFTER_COUNTS = ("rounds", "draft_ms", "drafted", "accepted", "statistics_drafted", "statistics_accepted")


def merge_gauges(all_of: Sequence[Gauges], places: Sequence[int]) -> Gauges:
    """Return one loop's gauges of several loops' over one target, which run so many sequences each at most. Blocks and
    the process's memory are the same in each of them, and drafters of one name share what they hold."""
    first = all_of[0]
    if len(all_of) == 1:
        return first
    return msgspec.structs.replace(
        first,
        **{name: sum(getattr(one, name) for one in all_of) for name in _COUNTS},
        drafter_bytes=max(one.drafter_bytes for one in all_of),
        drafters=_merge_drafters(all_of),
        tolerance_deltas=_merge_deltas(all_of),
        low_acceptance=_merge_warnings(all_of),
        slo=_merge_slo([one.slo for one in all_of if one.slo is not None]),
        memory_bound=_merge_memory_bounds([one.memory_bound for one in all_of], places),
    )


def _merge_drafters(all_of: Sequence[Gauges]) -> list[DrafterState]:
    """Return the drafters, those of one name as one. One that does not work in every loop is as it is where it does
    not."""
    by_name: dict[str, list[DrafterState]] = {}
    for gauges in all_of:
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


def _merge_deltas(all_of: Iterable[Gauges]) -> dict[str, float]:
    found: dict[str, float] = {}
    for gauges in all_of:
        for kind, delta in gauges.tolerance_deltas.items():
            found[kind] = max(delta, found.get(kind, delta))
    return found


def _merge_warnings(all_of: Iterable[Gauges]) -> list[AcceptanceWarning]:
    """Return the warnings, of each drafter and class the one that the most drafts led to."""
    found: dict[tuple[str, str, str], AcceptanceWarning] = {}
    for gauges in all_of:
        for warning in gauges.low_acceptance:
            key = (warning.drafter, warning.route, warning.user)
            if key not in found or warning.drafted > found[key].drafted:
                found[key] = warning
    return list(found.values())


def _merge_slo(states: Sequence[SloState]) -> SloState | None:
    """Return the state of the loop that is the furthest from its objectives, with what all of them move."""
    if not states:
        return None
    worst = max(states, key=lambda one: (len(one.levers), one.tpot_ms or 0.0, one.ttft_ms or 0.0))
    return msgspec.structs.replace(
        worst,
        ttft_ms=_find_longest([one.ttft_ms for one in states]),
        tpot_ms=_find_longest([one.tpot_ms for one in states]),
        row_price=max(one.row_price for one in states),
        prefill_share=min(one.prefill_share for one in states),
        max_running=sum(one.max_running for one in states),
        levers=list(dict.fromkeys(lever for one in states for lever in one.levers)),
    )


def _find_longest(times_ms: Iterable[float | None]) -> float | None:
    return max((one for one in times_ms if one is not None), default=None)


def _merge_memory_bounds(bounds: Sequence[MemoryBound | None], places: Sequence[int]) -> MemoryBound | None:
    """Return the tightest bound of a forward, for all sequences together."""
    tightest = min((one for one in bounds if one is not None), key=lambda one: one.rows, default=None)
    if tightest is None:
        return None
    sequences = [most if one is None else one.sequences for one, most in zip(bounds, places, strict=True)]
    return msgspec.structs.replace(tightest, sequences=sum(sequences))
