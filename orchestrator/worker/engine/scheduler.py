"""Who waits, who runs, in which slot, and what each gets of the next forward."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, cast

from adapters.loaded_model import LoadedModel, LoraSlots
from device_profiles.units import ceil_div
from orchestrator.clock import Clock
from orchestrator.worker.drafting.port import NO_SLOT
from orchestrator.worker.engine.batch import ScheduledSequence, most_blocks, rows_of, schedule_rows
from orchestrator.worker.engine.memory_guard import MemoryGuard
from orchestrator.worker.engine.prefix_cache import PrefixCache
from orchestrator.worker.engine.sequence import SequenceState
from orchestrator.worker.engine.slo_monitor import SloMonitor
from policies.serving.admission import count_admissible_requests, victims
from policies.serving.batch_bound import BatchLimits
from policies.serving.prefill_budget import observe_prefill
from policies.serving.prefill_shares import PrefillRows, bound_prefill_rows, waits_for_replays
from policies.serving.replay_budget import ReplayBudget, observe_decoding, observe_replay
from policies.serving.slo import LEAST_GROUP, NO_OBJECTIVES, Objectives, group_size, rows_that_fit
from policies.speculation.cost_model import CostModel

if TYPE_CHECKING:
    from adapters.borrowed_slots import BorrowedSlots

# ADR 0051: a first long prompt of a fresh worker was taken for a hang before. Not tuned.
_UNKNOWN_ROUND_MS = 5000.0


class Reserved(NamedTuple):
    """What other flights over the same target leave to nobody who starts: so many KV blocks and slots."""

    blocks: int = 0
    slots: int = 0


NOTHING_RESERVED = Reserved()
ALL_RESERVED = Reserved(blocks=sys.maxsize)
"""Nobody starts."""


class Scheduler:
    """First come, first admitted, but those first that were served before; the youngest gives way where KV blocks run
    out.

    `max_itl_ms` bounds a forward that decodes and prefills. `preemptions` counts since the beginning. `levels` says
    what is moved for `objectives`: it has to be told what requests get. `drafts`: there is a drafter. `cost` returns
    what forwards cost, by what is known.
    """

    def __init__(
        self,
        target: LoadedModel,
        prefixes: PrefixCache,
        clock: Clock,
        cost: Callable[[], CostModel],
        *,
        max_running: int,
        max_itl_ms: float,
        objectives: Objectives = NO_OBJECTIVES,
        drafts: bool = True,
    ) -> None:
        caps = target.capabilities
        self.max_running = min(max_running, caps.slots, caps.max_batch_rows // caps.min_rows)
        self.preemptions = 0
        self.memory = MemoryGuard(BatchLimits(caps.max_batch_rows, self.max_running, caps.min_rows), clock)
        self.levels = SloMonitor(objectives, clock, max_running=self.max_running, drafts=drafts)
        self._followed = (objectives, drafts)
        self._cost = cost
        self._turn = 0
        self._target = target
        self._prefixes = prefixes
        self._clock = clock
        self._max_itl_ms = max_itl_ms
        self._prefill_row_ms: float | None = None
        self._replays = ReplayBudget()
        self._free_slots = list(range(caps.slots - 1, -1, -1))
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []

    def retune(self, *, max_itl_ms: float, objectives: Objectives, drafts: bool) -> None:
        """Bound forwards by this, and follow these objectives, from the next round on."""
        self._max_itl_ms = max_itl_ms
        if (objectives, drafts) != self._followed:
            self._followed = (objectives, drafts)
            self.levels = SloMonitor(objectives, self._clock, max_running=self.max_running, drafts=drafts)

    def list_running(self) -> list[SequenceState]:
        return list(self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def places(self) -> int:
        """How many sequences may have a slot now."""
        return min(self.max_running, self.levels.answer.running, self.memory.sequences)

    @property
    def sequences(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def has_place(self) -> bool:
        """True where one sequence more could have a slot at once."""
        return self.sequences < self.places

    def holds(self, key: str) -> bool:
        return any(sequence.key == key for sequence in (*self._running, *self._waiting))

    def find_running(self, key: str) -> SequenceState | None:
        return next((sequence for sequence in self._running if sequence.key == key), None)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence: behind all that wait, or where it was served before behind the last of those."""
        sequence.queued_s = self._clock.monotonic_s()
        place = len(self._waiting)
        while sequence.generated and place and not self._waiting[place - 1].generated:
            place -= 1
        self._waiting.insert(place, sequence)

    def withdraw(self, key: str) -> SequenceState | None:
        """Forget a waiting sequence; return one that runs, for the caller to end. Unknown keys are ignored."""
        for sequence in self._waiting:
            if sequence.key == key:
                self._waiting.remove(sequence)
                return None
        return self.find_running(key)

    @property
    def since_s(self) -> float:
        """When the first came of those that run, or else of those that wait, by the clock; infinity without any."""
        return min((sequence.submitted_s for sequence in self._running or self._waiting), default=math.inf)

    def take_waiting(self) -> SequenceState | None:
        """Forget the last of those that wait and never ran here, and return it; None where there is none."""
        sequence = next((waiting for waiting in reversed(self._waiting) if waiting.admitted_s == 0.0), None)
        if sequence is not None:
            self._waiting.remove(sequence)
        return sequence

    def move(self, sequence: SequenceState, other: Scheduler) -> None:
        """Let a sequence that runs run in another loop, over slots of the same target, with what its slot holds."""
        own, theirs = cast("BorrowedSlots", self._target), cast("BorrowedSlots", other._target)
        slot, into = sequence.slot, other._free_slots.pop()
        own.move(slot, theirs, into)
        self._running.remove(sequence)
        self._free_slots.append(slot)
        sequence.slot, sequence.turn = into, other._turn
        other._running.append(sequence)
        other._running.sort(key=lambda running: running.admitted_s)

    def lend_slot(self) -> int:
        """Return a free slot, which is to come back before the round ends; NO_SLOT where there is none."""
        return self._free_slots.pop() if self._free_slots else NO_SLOT

    def take_back_slot(self, slot: int) -> None:
        self._free_slots.append(slot)

    def exchange_slot(self, sequence: SequenceState, slot: int) -> None:
        """Let a sequence that runs go on in a lent slot, which holds what it is to go on from; its own becomes free."""
        self._target.release(sequence.slot)
        self.take_back_slot(sequence.slot)
        sequence.slot = slot

    def give_way(self, since_s: float) -> bool:
        """Let the youngest that runs give way, where it did not come before that time. False: nobody did."""
        gives = bool(self._running) and self._running[-1].submitted_s >= since_s
        if gives:
            self._send_back(1)
        return gives

    def admit(self, reserved: Reserved = NOTHING_RESERVED) -> list[SequenceState]:
        """Give slots to those who can start now, and return them."""
        self.memory.look()
        started = self._start_admitted(reserved) if self._waiting else []
        self.levels.look(self._running, self._waiting)
        return started

    def _start_admitted(self, reserved: Reserved) -> list[SequenceState]:
        caps = self._target.capabilities
        blocks = [
            ceil_div(len(sequence.tokens) + caps.min_rows, caps.block_tokens)
            for sequence in islice(self._waiting, self.max_running)
        ]
        count = count_admissible_requests(
            blocks,
            free_blocks=self._target.free_blocks() - self.count_promised_blocks() - reserved.blocks,
            running=len(self._running),
            max_running=min(self.places, self.max_running - reserved.slots),
            spare_blocks=len(self._running) + 1,
        )
        now = self._clock.monotonic_s()
        started = [self._waiting.popleft() for _ in range(count)]
        for sequence in started:
            sequence.slot = self._free_slots.pop()
            if isinstance(self._target, LoraSlots) and self._target.loras:
                self._target.use_lora(sequence.slot, sequence.submit.lora)
            sequence.admitted_s = sequence.admitted_s or now
        self._running += started
        return started

    def count_promised_blocks(self) -> int:
        """Return the blocks that running prefills have been admitted for and do not hold yet."""
        size = self._target.capabilities.block_tokens
        return sum(
            max(0, ceil_div(len(s.tokens) + 1, size) - ceil_div(self._target.count_cached_positions(s.slot), size))
            for s in self._running
        )

    def parts(self) -> tuple[list[ScheduledSequence], list[SequenceState]]:
        """Return the next forward's parts, without drafts, and the sequences that had to give way to them. There are no
        parts where the oldest, too, finds no KV blocks: it keeps those that it has."""
        caps = self._target.capabilities
        preempted: list[SequenceState] = []
        while True:
            for sequence in self._running:
                self._prefixes.attach(sequence)
            parts = schedule_rows(
                self._in_turn(),
                max_rows=self.memory.rows,
                prefill_rows=self._count_prefill_rows(),
                min_rows=caps.min_rows,
            )
            free = self._target.free_blocks()
            if free >= most_blocks(parts, min_rows=caps.min_rows, block_tokens=caps.block_tokens):
                return parts, preempted
            missing = self._target.count_needed_blocks([part.segment() for part in parts]) - free
            if missing <= 0:
                return parts, preempted
            if len(self._running) == 1:
                return [], preempted
            preempted += self._preempt(missing)

    def _count_prefill_rows(self) -> PrefillRows:
        """Return the rows of prefill that a forward may have beside sequences that decode."""
        decoding = [
            ScheduledSequence(sequence, 1, emits_logits=True) for sequence in self._running if sequence.uncached == 1
        ]
        if len(decoding) == len(self._running):
            return PrefillRows(0, 0)
        return bound_prefill_rows(
            self._replays,
            row_ms=self._prefill_row_ms,
            decode_ms=self._decode_ms(decoding),
            bound_ms=self._max_itl_ms,
            most=self.memory.rows,
            share=self.levels.answer.prefill_share,
            waits=waits_for_replays(
                [part.sequence.first_token_s for part in decoding],
                [sequence.queued_s for sequence in self._running if sequence.replays],
            ),
        )

    def _in_turn(self) -> list[SequenceState]:
        """Return who takes part in the next round: where not all who decode fit its latency budget, those of them who
        waited longest, and all who prefill."""
        if not self.levels.may_take_turns:
            return self._running
        ready = [sequence for sequence in self._running if sequence.uncached == 1]
        if len(ready) <= LEAST_GROUP:
            return self._running
        context_tokens = sum(sequence.cached for sequence in ready) / len(ready)

        def round_ms(sequences: int) -> float:
            rows = sequences * self._target.capabilities.min_rows
            return self._cost().ms(rows, sequences, context_tokens)

        bound_ms = self.levels.update_round_bound_ms(round_ms(len(ready)))
        size = group_size(round_ms, len(ready), bound_ms=bound_ms, turns_ms=self.levels.turns_ms)
        waits = sorted(ready, key=lambda sequence: sequence.turn)[size:]
        return [sequence for sequence in self._running if sequence not in waits] if waits else self._running

    def room(self, parts: Sequence[ScheduledSequence]) -> int:
        """Return the rows that drafts may add to a forward: those that it has left, and that keep what decodes in it
        within the round's latency budget."""
        caps = self._target.capabilities
        left = max(0, self.memory.rows - rows_of(parts, caps))
        deciding = [part for part in parts if part.emits_logits]
        if not self.levels.follows or not deciding:
            return left
        rows, sequences, context_tokens = self._size(deciding)
        cost = self._cost()
        bound_ms = self.levels.update_round_bound_ms(cost.ms(rows, sequences, context_tokens))
        if bound_ms == math.inf:
            return left
        return rows_that_fit(lambda more: cost.ms(more, sequences, context_tokens), rows, left, bound_ms=bound_ms)

    def observe_round_time(self, parts: Sequence[ScheduledSequence], tokens: int, round_ms: float) -> None:
        """A round of these parts took so long, and made so many tokens."""
        if self.levels.follows:
            decoding = [part for part in parts if not part.is_prefill]
            plain_ms = self._cost().ms(*self._size(decoding)) if decoding else 0.0
            sequences, prompts = len(decoding), len(decoding) < len(parts)
            self.levels.observe_round_time(
                sequences=sequences, tokens=tokens, round_ms=round_ms, plain_ms=plain_ms, prompts=prompts
            )

    def predict_round_ms(self, parts: Sequence[ScheduledSequence]) -> float:
        """Return what a round of these parts takes, without drafts; a long time where too little is known."""
        cost = self._cost()
        prefill_rows = sum(part.num_query_tokens for part in parts if part.is_prefill)
        if not cost.known or (prefill_rows and self._prefill_row_ms is None):
            return _UNKNOWN_ROUND_MS
        return cost.ms(*self._size(parts)) + (self._prefill_row_ms or 0.0) * prefill_rows

    def _size(self, parts: Sequence[ScheduledSequence]) -> tuple[int, int, float]:
        caps, alone = self._target.capabilities, len(parts) == 1
        rows = sum(caps.count_charged_rows(1, apart=part.apart, alone=alone) for part in parts)
        return rows, len(parts), sum(part.sequence.cached for part in parts) / max(1, len(parts))

    def make_smaller(self, parts: Sequence[ScheduledSequence], reason: str) -> bool:
        """A forward of these parts ran out of memory: the next ones are smaller, and the youngest give way where fewer
        may run then. `reason`: why, in words. False: there is no smaller one."""
        if not self.memory.tighten(rows_of(parts, self._target.capabilities), len(parts), reason):
            return False
        self._send_back(max(0, len(self._running) - self.memory.sequences))
        return True

    def begin_anew(self, parts: Sequence[ScheduledSequence]) -> None:
        """A forward of these parts failed, and its model goes on. Where slots cannot be rolled back, nobody knows what
        these hold: they are computed again from the beginning."""
        if self._target.capabilities.rewinds:
            return
        for sequence in (part.sequence for part in parts if part.sequence.slot != NO_SLOT):
            self._target.release(sequence.slot)
            sequence.cached = 0
            sequence.computing = False

    def _preempt(self, missing: int) -> list[SequenceState]:
        """Let the youngest give way until so many blocks are free."""
        size = self._target.capabilities.block_tokens
        held = [ceil_div(self._target.count_cached_positions(sequence.slot), size) for sequence in self._running]
        return self._send_back(max(1, victims(held, missing=missing)))

    def _send_back(self, count: int) -> list[SequenceState]:
        """Send the youngest back to the head of the queue: their tokens are kept, their cache is computed again."""
        gone = self._running[len(self._running) - count :]
        for sequence in reversed(gone):
            self.leave(sequence)
            sequence.queued_s = self._clock.monotonic_s()
            self._waiting.appendleft(sequence)
        self.preemptions += len(gone)
        return gone

    def leave(self, sequence: SequenceState, *, garbage: bool = False) -> None:
        """Take a running sequence's slot; what it computed is remembered while there is room, unless it may be
        `garbage`."""
        if garbage:
            self._target.discard(sequence.slot)
        else:
            self._prefixes.remember(sequence)
            self._target.release(sequence.slot)
        self._running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT
        sequence.cached, sequence.reused, sequence.sought = 0, 0, False
        sequence.computing = False

    def observe(self, parts: Sequence[ScheduledSequence], forward_ms: float) -> None:
        """Learn from a forward what prefill costs. To be called before its verdicts are committed."""
        self._turn += 1
        for part in parts:
            if part.emits_logits:
                part.sequence.turn = self._turn
        decoding = [part for part in parts if not part.is_prefill]
        filling = [part for part in parts if part.is_prefill]
        rows = sum(part.num_query_tokens for part in filling)
        if decoding and not filling:
            self._replays = observe_decoding(self._replays, forward_ms)
        elif decoding and all(part.sequence.replays for part in filling):
            self._replays = observe_replay(self._replays, forward_ms, rows=rows)
        if filling:
            self._prefill_row_ms = observe_prefill(
                self._prefill_row_ms,
                prefill_rows=rows,
                decode_ms=self._decode_ms(decoding, with_drafts=True),
                forward_ms=forward_ms,
            )

    def _decode_ms(self, decoding: Sequence[ScheduledSequence], *, with_drafts: bool = False) -> float:
        """Return what a forward takes that decodes these alone; 0 where that is not known."""
        cost = self._cost()
        if not decoding or not cost.seen:
            return 0.0
        rows, sequences, context_tokens = self._size(decoding)
        if with_drafts:
            rows = rows_of(decoding, self._target.capabilities)
        return cost.ms(rows, sequences, context_tokens)
