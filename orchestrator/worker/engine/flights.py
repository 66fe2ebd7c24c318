"""Rounds in flight: while one stage of a target runs one round, the next stage runs another one.

A target in several stages (StagedModel) can run as many forwards at a time. A sequence has one at a
time, because its next tokens follow from the last. So sequences are split into flights. Each is a decode loop of its
own, with slots of the target, and has one round under way. The field calls their forwards micro-batches (GPipe,
Huang et al., arXiv 1811.06965) and the loops virtual engines (vLLM).

Everything else is as in one loop. One thread runs all halves of rounds in turn. Flights share the KV blocks, the
memory of prompts and the grammars. A request that is alone has the whole target, round after round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import msgspec

from adapters.errors import CapacityError
from adapters.loaded_model import LoadedModel
from device_profiles.units import ceil_div
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState, RemoteState
from orchestrator.protocol.rounds import AcceptanceWarning, Gauges, MemoryBound, Refused, RoundReport, SloState
from orchestrator.worker.engine.loop import DecodeLoop
from orchestrator.worker.engine.prefix_cache import StartPages
from orchestrator.worker.engine.scheduler import ALL_RESERVED, Reserved
from orchestrator.worker.engine.sequence import SequenceState
from policies.serving.flights import FlightCosts, choose_flights, observe_flight

_COUNTS = (
    *("running", "waiting", "preemptions", "rounds"),
    *("prefix_queries", "prefix_hits", "prefix_loaded", "out_of_memory", "not_finite"),
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
    tightest = min((bound for bound in bounds if bound is not None), key=lambda bound: bound.rows, default=None)
    if tightest is None:
        return None
    sequences = [most if bound is None else bound.sequences for bound, most in zip(bounds, places, strict=True)]
    return msgspec.structs.replace(tightest, sequences=sum(sequences))


class Flights:
    """The decode loops of one target, as one: see DecodeLoop for what is not said here. `loops`: one for each flight
    that there may be, over slots of `target` (adapters.borrowed_slots), or the only one there is. `joins`: tells
    drafters of a request's variant. Not thread-safe: the engine's thread owns it, `prepare` excepted."""

    def __init__(self, target: LoadedModel, loops: Sequence[DecodeLoop], *, max_running: int) -> None:
        self.loops = tuple(loops)
        self.max_running = min(max_running, sum(loop.max_running for loop in loops))
        self.expected_ms = 0.0
        self.joins: Callable[[Submit], None] = lambda request: None
        self._target = target
        self._costs = FlightCosts()
        self._under_way: deque[DecodeLoop] = deque()
        self._ended: deque[RoundReport] = deque()
        self._short: DecodeLoop | None = None
        """The flight that found no KV blocks for any of its requests, the one with the oldest of several."""

    @property
    def idle(self) -> bool:
        """True when no request runs or waits, and every round was returned."""
        return not self._ended and all(loop.idle for loop in self.loops)

    def prepare(self, request: Submit) -> None:
        self.loops[0].prepare(request)

    def submit(
        self, request: Submit, arrived_s: float | None = None, pages: StartPages | None = None
    ) -> Refused | None:
        """The flight with the fewest requests gets it."""
        used = self._list_used()
        chosen = used if len(used) >= self._choose_count(1) else self.loops
        loop = min(chosen, key=lambda flight: (not flight.scheduler.has_place, flight.scheduler.sequences))
        return loop.submit(request, arrived_s, pages)

    def cancel(self, request_id: str) -> None:
        """What a round under way finds out of it is for nobody."""
        self._find(request_id).cancel(request_id)

    def holds(self, request_id: str) -> bool:
        return any(loop.holds(request_id) for loop in self.loops)

    def find_running(self, request_id: str) -> SequenceState | None:
        return self._find(request_id).find_running(request_id)

    def _find(self, request_id: str) -> DecodeLoop:
        return next((loop for loop in self.loops if loop.holds(request_id)), self.loops[0])

    def failures(self) -> list[Refused]:
        return [failed for loop in self.loops for failed in loop.failures()]

    def gauges(self, rss_bytes: int, peak_rss_bytes: int = 0) -> Gauges:
        return merge_gauges(
            [loop.gauges(rss_bytes, peak_rss_bytes) for loop in self.loops], [loop.max_running for loop in self.loops]
        )

    def run_round(self) -> RoundReport:
        """Begin a round of every flight that has something to do and none under way, and end the one that was begun
        first; there must be something to do. Raises AdapterError: the target is of no more use.

        Every committed token is in the round that is returned, so nothing is lost when the next one fails.
        """
        if not self._ended:
            self._begin_rounds()
            self._end_round()
        return self._ended.popleft()

    def settle(self) -> None:
        """End the rounds that are under way; `run_round` returns them. To be called where something is to change
        between two rounds. Raises AdapterError: the target is of no more use."""
        while self._under_way:
            self._end_round()

    def _list_used(self) -> list[DecodeLoop]:
        return [loop for loop in self.loops if loop.scheduler.sequences]

    def _choose_count(self, more: int = 0) -> int:
        if len(self.loops) == 1:
            return 1
        sequences = sum(loop.scheduler.sequences for loop in self.loops) + more
        running = min(sequences, self.max_running)
        best = choose_flights(self._costs, sequences=running, most=len(self.loops), now=len(self._list_used()))
        return min(len(self.loops), max(best, ceil_div(running, self.loops[0].max_running)))

    def _balance(self) -> None:
        """Let requests of flights that have no round under way go to others, until there are as many flights as there
        are to be, of equal size."""
        wanted = self._choose_count()
        for loop in self.loops:
            if loop in self._under_way or not loop.scheduler.sequences:
                continue
            used = self._list_used()
            others = sorted(
                (other for other in used if other is not loop), key=lambda flight: flight.scheduler.sequences
            )
            if len(used) > wanted and loop.scheduler.sequences <= others[0].scheduler.sequences:
                self._move_requests(loop, others[0], loop.scheduler.sequences)
                continue
            if len(used) < wanted:
                others = [other for other in self.loops if not other.scheduler.sequences]
            if others:
                self._move_requests(loop, others[0], (loop.scheduler.sequences - others[0].scheduler.sequences) // 2)

    def _move_requests(self, giver: DecodeLoop, taker: DecodeLoop, count: int) -> None:
        for _ in range(count):
            if not taker.scheduler.has_place or not giver.hand_over(taker, self.joins):
                return

    def _begin_rounds(self) -> None:
        if len(self.loops) > 1:
            self._balance()
        if (short := self._short) is not None and not self._begin_round(short) and self._make_way():
            self._begin_round(short)
        for loop in self.loops:
            self._begin_round(loop)
        while not self._under_way:
            if not self._make_way():
                raise CapacityError(f"{self._target.capabilities.device}: no KV blocks are left for any request")
            for loop in self.loops:
                self._begin_round(loop)
        self.expected_ms = sum(loop.expected_ms for loop in self._under_way)

    def _begin_round(self, loop: DecodeLoop) -> bool:
        """Begin a flight's round where it has none. False: it has no KV blocks for one."""
        if loop in self._under_way or not loop.scheduler.sequences:
            ready = True
        elif ready := loop.begin_round(self._reserve(loop)):
            self._under_way.append(loop)
        if ready:
            self._short = None if self._short is loop else self._short
        elif not loop.scheduler.running and sum(other.scheduler.running for other in self.loops) >= self.max_running:
            ready = True  # what it has not is a slot, and that it will have in its turn
        elif self._short is None or loop.scheduler.since_s < self._short.scheduler.since_s:
            self._short = loop
        return ready

    def _make_way(self) -> bool:
        """Let the youngest request of every other flight give its blocks to the one that is short of them. False: none
        did."""
        short = self._short
        if short is None:
            return False
        others = [loop for loop in self.loops if loop is not short and loop not in self._under_way]
        gave = [loop.scheduler.give_way(short.scheduler.since_s) for loop in others]
        return any(gave)

    def _reserve(self, loop: DecodeLoop) -> Reserved:
        """Return what the requests of a flight leave to those of others when they start: slots and blocks that these
        were admitted for, or all, so that nobody overtakes a flight without any blocks."""
        if self._short is not None and self._short is not loop:
            return ALL_RESERVED
        others = [other for other in self.loops if other is not loop]
        return Reserved(
            sum(other.scheduler.count_promised_blocks() for other in others),
            sum(other.scheduler.running for other in others),
        )

    def _end_round(self) -> None:
        count, loop = len(self._under_way), self._under_way.popleft()
        done = loop.finish_round()
        if loop.decoded_rows and len(self.loops) > 1:
            self._costs = observe_flight(
                self._costs,
                rows=loop.decoded_rows,
                sequences=done.sequences,
                stage_ms=done.stage_ms,
                alone_ms=done.round_ms if count == 1 else None,
            )
        self._ended.append(done if count == 1 else msgspec.structs.replace(done, in_flight=count))
