"""A round: schedule -> propose -> verify -> accept -> commit -> observe, adapt (the depth policy's turn)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adapters.contract import (
    CapacityError,
    DeviceLost,
    ForwardResult,
    GrammarFailed,
    GrammarTooComplex,
    LoadedModel,
    OutOfMemory,
    PendingForward,
    Segment,
    StagedModel,
    Unsupported,
)
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.messages import (
    Delta,
    Gauges,
    MovedIn,
    MovedOut,
    PageLink,
    Refused,
    RoundReport,
    SharedMemory,
    Submit,
)
from orchestrator.protocol.shared_memory import SharedMemoryFailed
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.drafting.prediction import PREDICTION
from orchestrator.worker.engine.acceptance_monitor import AcceptanceMonitor
from orchestrator.worker.engine.batch import ScheduledSequence, rows_of
from orchestrator.worker.engine.constraints import RowConstraints
from orchestrator.worker.engine.departures import Departures
from orchestrator.worker.engine.draft_counts import DrafterCounts, RoundDraftCounts, count_by_drafter
from orchestrator.worker.engine.grammar import Grammars
from orchestrator.worker.engine.kv_mover import KvMover, TakenPages
from orchestrator.worker.engine.prefix_cache import PrefixCache
from orchestrator.worker.engine.request_checks import find_refusal
from orchestrator.worker.engine.round_traces import RoundTraces
from orchestrator.worker.engine.scheduler import ALL_RESERVED, NOTHING_RESERVED, Reserved, Scheduler
from orchestrator.worker.engine.sequence import NO_SLOT, SequenceState
from orchestrator.worker.engine.speculator import Speculator
from orchestrator.worker.engine.verifier import Verdict, Verifier
from policies.sampling import NotFinite, Row, ToleranceGoal, VerifiedDraft
from policies.serving.acceptance_alarm import THRESHOLD
from policies.serving.slo import NO_OBJECTIVES, Objectives
from policies.speculation.policy import DepthPolicy

_SHARES_EVERY = 16
"""A sequence's rounds between two words on what each drafter did for it."""


class LoopTuning(NamedTuple):
    """What of a decode loop can be another without another model: see DecodeLoop."""

    policy: DepthPolicy
    max_depth: int
    max_itl_ms: float
    prefix_reuse: bool
    tolerance: ToleranceGoal
    low_acceptance_rate: float
    objectives: Objectives


@dataclass(frozen=True, slots=True)
class _WaitingForward:
    """A forward of a target that runs one at a time: it runs when it is waited for."""

    target: LoadedModel
    batch: Sequence[Segment]

    def result(self) -> ForwardResult:
        """See adapters.contract.PendingForward."""
        return self.target.forward(self.batch)


@dataclass(frozen=True, slots=True)
class _BegunRound:
    """A round whose forward was started. Times are seconds of the loop's clock; it asked for drafts at `proposed_s`."""

    started_s: float
    proposed_s: float
    draft_ms: float
    parts: list[ScheduledSequence]
    forward: PendingForward


class DecodeLoop:
    """Continuous batching over one target. Not thread-safe: the engine's thread owns it, `prepare` excepted.

    `policy` chooses depths; `max_depth` bounds every request's, and a request may ask for less. `max_itl_ms` bounds a
    forward that decodes and prefills. `prefix_reuse`: requests begin with what earlier ones computed.
    `grammars` starts the grammars that requests ask for. `tolerance` is what the rule of that name is to reach.
    `low_acceptance_rate`: drafters below it are warned of.
    `objectives`: what requests are to have. `mover`: of KV pages. `expected_ms`: the predicted time of the round that
    runs. `decoded_rows`: of the last round, 0 where it had prompts in it, or was not all of what had begun.
    """

    def __init__(
        self,
        target: LoadedModel,
        drafter: Drafter | None,
        clock: Clock,
        *,
        policy: DepthPolicy,
        max_running: int,
        max_depth: int,
        max_itl_ms: float,
        prefix_reuse: bool,
        tolerance: ToleranceGoal,
        grammars: Grammars,
        low_acceptance_rate: float = THRESHOLD,
        objectives: Objectives = NO_OBJECTIVES,
        mover: KvMover | None = None,
    ) -> None:
        self.mover = mover or KvMover(target, "")
        self._target = target
        self._staged = target if isinstance(target, StagedModel) else None
        self._begun: _BegunRound | None = None
        self._grammars = grammars
        self._watch = AcceptanceMonitor(low_acceptance_rate)
        max_depth = max_depth if drafter is not None and target.capabilities.rewinds else 0
        self._speculator = Speculator(
            target, drafter or ChainDrafter(()), policy, max_depth=max_depth, watch=self._watch
        )
        self._clock = clock
        self._prefixes = PrefixCache(target, enabled=prefix_reuse)
        self._scheduler = Scheduler(
            *(target, self._prefixes, clock, lambda: self._speculator.policy.cost),
            max_running=max_running,
            max_itl_ms=max_itl_ms,
            objectives=objectives,
            drafts=max_depth > 0,
        )
        self._levels = self._scheduler.levels
        self._by_drafter = DrafterCounts()
        self._verifier = Verifier(tolerance)
        self._traces = RoundTraces(clock)
        self._failed: list[Refused] = []
        self._moved_in: list[MovedIn] = []
        self._departures = Departures(clock)
        self._taking_in_ms = 0.0
        self._not_finite = 0
        self._rounds = 0
        self.expected_ms = 0.0
        self.decoded_rows = 0

    @property
    def max_running(self) -> int:
        """How many requests run at the same time, after every bound."""
        return self._scheduler.max_running

    @property
    def sequences(self) -> int:
        """How many requests run or wait."""
        return self._scheduler.running + self._scheduler.waiting

    @property
    def running(self) -> int:
        """How many requests have a slot."""
        return self._scheduler.running

    @property
    def has_place(self) -> bool:
        """True where one request more could have a slot at once."""
        return self.sequences < self._scheduler.places

    @property
    def since_s(self) -> float:
        """When the first came of the requests that run, or else of those that wait, by the clock."""
        return self._scheduler.since_s

    @property
    def promised_blocks(self) -> int:
        """How many KV blocks requests have been admitted for and do not hold yet."""
        return self._scheduler.count_promised_blocks()

    def holds(self, request_id: str) -> bool:
        """Return whether a request runs or waits here."""
        return self._scheduler.holds(request_id)

    def hand_over(self, other: DecodeLoop, joins: Callable[[Submit], None]) -> bool:
        """Let the last request that never ran wait in another loop over the same target, or else the youngest that
        decodes go on there, between two rounds. `joins`: tells the drafter there of a request's variant. False: there
        is none."""
        sequence = self._scheduler.take_waiting()
        if sequence is not None:
            other._scheduler.add(sequence)
            return True
        decoding = [one for one in self._scheduler.list_running() if one.uncached == 1]
        if not decoding:
            return False
        sequence = decoding[-1]
        self._speculator.end(sequence.key, keep=False)
        self._scheduler.move(sequence, other._scheduler)
        joins(sequence.submit)
        other._speculator.begin(sequence, drafts=True)
        return True

    def give_way(self, since_s: float) -> bool:
        """Let the youngest request give its KV blocks up, between two rounds, where it did not come before that time.
        False: none did."""
        return self._scheduler.give_way(since_s)

    @property
    def idle(self) -> bool:
        """True when no request runs or waits, and no round was begun."""
        return self.sequences == 0 and self._begun is None

    @property
    def policy(self) -> DepthPolicy:
        """What chooses depths now."""
        return self._speculator.policy

    def exchange(self, drafter: Drafter | None) -> Drafter:
        """Draft by another drafter, between two rounds; returns the one until now, for the caller to close. `retune` is
        to follow."""
        return self._speculator.exchange(drafter or ChainDrafter(()))

    def retune(self, tuning: LoopTuning, *, drafts: bool) -> None:
        """Go on by other settings, between two rounds. `drafts`: there is a drafter. No request notices, but for the
        depth of its drafts and the time of its tokens."""
        max_depth = tuning.max_depth if drafts and self._target.capabilities.rewinds else 0
        self._scheduler.retune(max_itl_ms=tuning.max_itl_ms, objectives=tuning.objectives, drafts=max_depth > 0)
        self._levels = self._scheduler.levels
        self._prefixes.enable(tuning.prefix_reuse)
        self._verifier.set_goal(tuning.tolerance)
        self._watch.set_threshold(tuning.low_acceptance_rate)
        self._speculator.retune(tuning.policy, max_depth, self._scheduler.list_running())

    def prepare(self, request: Submit) -> None:
        """Do ahead of `submit` what takes time; from any thread."""
        if request.grammar is not None:
            with suppress(GrammarFailed):  # `submit` says why
                self._grammars.prepare(request.grammar)

    def submit(
        self, request: Submit, arrived_s: float | None = None, pages: TakenPages | None = None
    ) -> Refused | None:
        """Queue a request; returns why not, where it can never be served. `arrived_s`: when it came, by the clock,
        where that was not now. `pages`: what it is to begin with."""
        refused = find_refusal(request, self._target)
        if refused is not None:
            return refused
        try:
            rules = RowConstraints.of(request, self._grammars)
        except GrammarFailed as error:
            return Refused(request.request_id, f"the grammar cannot be used: {error}", "invalid")
        came_s = self._clock.monotonic_s() if arrived_s is None else arrived_s
        sequence = SequenceState.open(request, came_s, self._target.capabilities, rules)
        sequence.pages = pages
        self._scheduler.add(sequence)
        self._traces.observe_request(request)
        return None

    def failures(self) -> list[Refused]:
        """Return, once, the requests that the last rounds could not go on with; they are gone."""
        failed, self._failed = self._failed, []
        return failed

    def list_moved_in(self) -> list[MovedIn]:
        """Return, once, what came of the pages of requests that were given a slot."""
        moved, self._moved_in = self._moved_in, []
        return moved

    def move_out(self, request_id: str, memory: SharedMemory) -> MovedOut:
        """Forget a request, and before that write its KV cache to shared memory. Raises what adapters raise when their
        device fails."""
        started_s = self._clock.monotonic_s()
        sequence = self._scheduler.withdraw(request_id)
        pages, why = None, "nothing of it was computed"
        if sequence is not None and sequence.cached > 0 and not sequence.scores_prompt:
            try:
                pages, why = self.mover.write(sequence.slot, sequence.tokens[: sequence.cached], memory), ""
            except SharedMemoryFailed as error:
                why = str(error)
        if sequence is not None:
            self._retire(sequence, keep=False)
        else:  # as in `cancel`
            self._speculator.end(request_id, keep=False)
        return MovedOut(request_id, pages, (self._clock.monotonic_s() - started_s) * MS_PER_S, why)

    def send_out(self, request_id: str, link: PageLink) -> MovedOut | None:
        """Let a request leave over a link, its pages ahead; `list_moved_out` says when it has. Returns what there is to
        say where it has no pages, and is forgotten at once."""
        sequence = next((one for one in self._scheduler.list_running() if one.key == request_id), None)
        if sequence is None or not sequence.cached or sequence.scores_prompt or not self.mover.moves:
            self.cancel(request_id)
            return MovedOut(request_id, None, 0.0, "nothing of it was computed")
        self._departures.begin(sequence, self.mover, link)
        return None

    def list_moved_out(self, round_ms: float) -> list[MovedOut]:
        """Send pages of requests that leave, behind a round that took so long; returns, once, those that are forgotten
        now. Raises what adapters raise when their device fails."""
        moved = self._departures.advance(self._scheduler.list_running(), self.mover, round_ms)
        for one in moved:
            self.cancel(one.request_id)
        return moved

    def cancel(self, request_id: str) -> None:
        """Forget a request, running or waiting; its slot is free at once. Unknown ids are ignored."""
        self._departures.drop(request_id)
        sequence = self._scheduler.withdraw(request_id)
        if sequence is not None:
            self._retire(sequence, keep=False)
        else:  # one that gave way waits, and the drafter still knows it
            self._speculator.end(request_id, keep=False)

    def run_round(self) -> RoundReport:
        """Run one round; there must be something to do. Raises AdapterError: the target is of no more use.

        Every committed token is in the round that is returned, so nothing is lost when the next one fails.
        """
        if not self.begin_round():
            raise CapacityError(f"{self._target.capabilities.device}: no KV blocks are left for any request")
        return self.finish_round()

    def begin_round(self, reserved: Reserved = NOTHING_RESERVED) -> bool:
        """The first half of a round: choose who is in it, draft, and start the forward. Behind it `finish_round` is
        due. `reserved`: what is not for requests that start. False: no round was begun, for there is no room for
        anybody. Raises AdapterError: the target is of no more use."""
        started_s = self._clock.monotonic_s()
        self._taking_in_ms = 0.0
        parts = self._schedule_parts(reserved)
        if not parts:
            return False
        self.expected_ms = self._scheduler.predict_round_ms(parts)
        proposed_s = self._clock.monotonic_s()
        if not self._speculator.pauses(parts):
            room, row_price = (
                self._scheduler.room(parts),
                self._levels.row_price(prompts=any(p.is_prefill for p in parts)),
            )
            self._speculator.propose(parts, room=room, row_price=row_price)
        draft_ms = (self._clock.monotonic_s() - proposed_s) * MS_PER_S
        self._begun = _BegunRound(started_s, proposed_s, draft_ms, parts, self._start_forward(parts))
        return True

    def finish_round(self) -> RoundReport:
        """The second half of the round that was begun: wait for its forward, verify, commit, learn. Requests that were
        cancelled meanwhile get nothing of it. Raises AdapterError: the target is of no more use."""
        begun, self._begun = self._begun, None
        assert begun is not None  # noqa: S101  # the caller's part
        ran, result = self._wait_for_forward(begun)
        found = [
            (part, own)
            for part, own in zip(ran, _rows_by_part(ran, result), strict=True)
            if part.sequence.slot != NO_SLOT
        ]
        parts, rows = [part for part, _ in found], [own for _, own in found]
        complete = len(parts) == len(ran)  # what was cancelled is in the costs, and no more in the counts
        if complete:
            self._scheduler.observe(parts, result.device_ms)
        verdicts = self._accept(parts, rows)
        deltas, tally = self._commit(parts, verdicts, rows)
        times = (self._rounds, begun.started_s, begun.proposed_s, begun.draft_ms)
        trace = self._traces.describe(times, parts, verdicts, deltas) if self._traces.share else None
        self._rounds += 1
        rows_ran = rows_of(ran, self._target.capabilities.paid_rows)
        self.decoded_rows = rows_ran if complete and not any(part.is_prefill for part in parts) else 0
        round_ms = (self._clock.monotonic_s() - begun.started_s) * MS_PER_S - self._taking_in_ms
        self._speculator.settle(round_ms - begun.draft_ms, begun.draft_ms)
        if complete:
            self._scheduler.observe_round_time(parts, sum(len(delta.tokens) for delta in deltas), round_ms)
        return RoundReport(
            deltas=deltas,
            sequences=len(ran),
            rows=rows_ran,
            drafts=tally.drafts,
            drafted=tally.drafted,
            accepted=tally.accepted,
            accepted_per_position=tally.per_position,
            by_rule=tally.by_rule,
            by_drafter=tally.by_drafter,
            tolerated=tally.tolerated,
            round_ms=round_ms,
            device_ms=result.device_ms,
            draft_ms=begun.draft_ms,
            expected_ms=self.expected_ms,
            trace=trace,
            stage_ms=list(result.stage_ms),
        )

    def run_round_strictly(self) -> RoundReport:
        """Run one round of requests that all have to come to their ends: whoever measures has nobody to tell of one
        that did not. Raises DeviceLost for it, and what `run_round` raises."""
        done = self.run_round()
        if failed := self.failures():
            raise DeviceLost(f"request {failed[0].request_id}: {failed[0].message}")
        return done

    def _start_forward(self, parts: Sequence[ScheduledSequence]) -> PendingForward:
        """Start a forward, or have it run by whoever waits for it. Raises what the target's forward raises."""
        batch = [part.segment() for part in parts]
        return _WaitingForward(self._target, batch) if self._staged is None else self._staged.start_forward(batch)

    def _wait_for_forward(self, begun: _BegunRound) -> tuple[list[ScheduledSequence], ForwardResult]:
        """Return what a forward gives, of smaller ones without drafts while memory runs out, and the parts that it had.
        Raises what the target's forward raises."""
        parts, forward = begun.parts, begun.forward
        while True:
            try:
                return parts, forward.result()
            except OutOfMemory as error:
                if not error.can_go_on or not self._scheduler.make_smaller(parts, str(error)):
                    raise
            self._speculator.abandon_round()
            self._scheduler.begin_anew(parts)
            parts = self._schedule_parts(ALL_RESERVED)
            if not parts:  # all were cancelled, or other flights have the blocks of those that gave way
                return parts, ForwardResult(np.empty((0, self._target.spec.outputs), np.float32), 0.0)
            forward = self._start_forward(parts)

    def _schedule_parts(self, reserved: Reserved) -> list[ScheduledSequence]:
        """Return who is in the next forward; the drafter hears of who starts. What it knows of those who give way is
        good until they start again."""
        started = self._scheduler.admit(reserved)
        for sequence in started:
            self._take_in(sequence)
        parts, preempted = self._scheduler.parts()
        for sequence in started:
            self._speculator.begin(sequence, drafts=sequence not in preempted)
        return parts

    def _take_in(self, sequence: SequenceState) -> None:
        """Let a sequence that has a slot begin with the pages that came with it, where they are of use."""
        pages, sequence.pages = sequence.pages, None
        if pages is None or sequence.scores_prompt:
            return
        started_s, why = self._clock.monotonic_s(), ""
        self._prefixes.attach(sequence)
        if sequence.cached < pages.positions:
            try:
                self.mover.load(sequence.slot, pages)
            except (CapacityError, Unsupported) as error:
                why = str(error)
            else:
                sequence.cached, sequence.begun = pages.positions, True
                self._prefixes.remember(sequence)
        took_ms = (self._clock.monotonic_s() - started_s) * MS_PER_S
        self._taking_in_ms += took_ms
        length_bytes = 0 if why else len(pages.data)
        self._moved_in.append(MovedIn(sequence.key, length_bytes, pages.took_ms + took_ms, why))

    def _retire(self, sequence: SequenceState, *, keep: bool, garbage: bool = False) -> None:
        """The sequence ends. `keep`: its output may help later drafts. `garbage`: what it computed may be."""
        self._departures.drop(sequence.key)
        self._speculator.end(sequence.key, keep=keep)
        self._scheduler.leave(sequence, garbage=garbage)

    def _accept(self, parts: Sequence[ScheduledSequence], rows: Sequence[Row]) -> list[VerifiedDraft | None]:
        asked: list[tuple[SequenceState, Row]] = []
        for part, own in zip(parts, rows, strict=True):
            sequence = part.sequence
            if not self._score_prompt(sequence, own):
                continue
            if part.emits_logits:
                asked.append((sequence, own[len(own) - len(sequence.draft.tokens) - 1 :]))
        judged = iter(self._verifier.verdicts(asked))
        emitting = [part.emits_logits and part.sequence.slot != NO_SLOT for part in parts]
        return [
            self._usable(part.sequence, next(judged)) if emits else None
            for part, emits in zip(parts, emitting, strict=True)
        ]

    def _score_prompt(self, sequence: SequenceState, rows: Row) -> bool:
        """Score a prompt's rows where that is asked for. False: they are garbage, and the sequence is gone."""
        if sequence.scores is not None and sequence.scores_prompt:
            try:
                sequence.scores.see_prompt(rows, sequence.cached + 1)
            except NotFinite as error:
                self._usable(sequence, error)
                return False
        return True

    def _usable(self, sequence: SequenceState, judged: Verdict) -> VerifiedDraft | None:
        """Return a verdict that is one; where it is none, give up on that request."""
        match judged:
            case GrammarFailed():
                self._fail(sequence, judged)
            case NotFinite():
                self._not_finite += 1
                said = f"{self._target.capabilities.device} computed garbage for this request: {judged}"
                self._failed.append(Refused(sequence.key, said, "not_finite"))
                self._retire(sequence, keep=False, garbage=True)
            case _:
                return judged
        return None

    def _commit(
        self, parts: Sequence[ScheduledSequence], verdicts: Sequence[VerifiedDraft | None], rows: Sequence[Row]
    ) -> tuple[list[Delta], RoundDraftCounts]:
        deltas: list[Delta] = []
        tally = RoundDraftCounts()
        for part, judged, own in zip(parts, verdicts, rows, strict=True):
            sequence = part.sequence
            if sequence.slot == NO_SLOT:  # its grammar failed, or its row was garbage
                continue
            filling = sequence.prompt_left > 0
            self._prefixes.count(sequence)
            sequence.cached += part.num_query_tokens
            if filling:
                self._prefixes.remember(sequence)
            if judged is None:
                continue
            sequence.cached += judged.accepted
            self._count(sequence, judged, tally)
            try:
                taken, finish = sequence.commit(judged.tokens)
            except GrammarFailed as error:
                self._fail(sequence, error)
                continue
            tolerated = sum(index < len(taken) for index in judged.tolerated)
            sequence.tolerated += tolerated
            tally.tolerated += tolerated
            if taken:
                self._levels.observe_commit(sequence, ended=bool(finish))
            told = bool(finish) or sequence.steps % _SHARES_EVERY == 0
            sequence.shares = self._speculator.describe_shares(sequence) if told else []
            deltas.append(_delta(sequence, taken, finish, own[len(own) - len(sequence.draft.tokens) - 1 :]))
            self._speculator.observe_verdict(sequence, judged.accepted, taken)
            if finish:
                self._retire(sequence, keep=True)
        return deltas, tally

    def _fail(self, sequence: SequenceState, error: GrammarFailed) -> None:
        """Give up on one request; the others go on."""
        kind = "invalid" if isinstance(error, GrammarTooComplex) else "failed"
        self._failed.append(Refused(sequence.key, f"the grammar failed: {error}", kind))
        self._retire(sequence, keep=False)

    def _count(self, sequence: SequenceState, judged: VerifiedDraft, tally: RoundDraftCounts) -> None:
        drafted = sequence.draft.guessed
        accepted = min(judged.accepted, drafted)
        if sequence.first_token_s == 0.0:
            sequence.first_token_s = self._clock.monotonic_s()
        sequence.steps += 1
        sequence.drafted += drafted
        sequence.accepted += accepted
        if sequence.draft.drafter == PREDICTION:
            sequence.predicted += sequence.draft.own
            sequence.predicted_right += min(accepted, sequence.draft.own)
        tally.add(drafted, accepted, sequence.submit.sampling.rule)
        count_by_drafter(tally.by_drafter, sequence.draft, accepted)
        count_by_drafter(sequence.by_drafter, sequence.draft, accepted)
        self._by_drafter.add(sequence.draft, accepted)

    def gauges(self, rss_bytes: int, peak_rss_bytes: int = 0) -> Gauges:
        """Return the state between rounds."""
        return Gauges(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            free_blocks=self._target.free_blocks(),
            total_blocks=self._target.capabilities.total_blocks,
            preemptions=self._scheduler.preemptions,
            drafter_bytes=self._speculator.memory_bytes(),
            rounds=self._rounds,
            rss_bytes=rss_bytes,
            peak_rss_bytes=peak_rss_bytes,
            prefix_queries=self._prefixes.queries,
            prefix_hits=self._prefixes.hits,
            tolerance_deltas=self._verifier.deltas,
            tolerance_recalibrations=self._verifier.recalibrations,
            low_acceptance=self._watch.standing(),
            slo=self._levels.state(),
            out_of_memory=self._scheduler.memory.failures,
            not_finite=self._not_finite,
            memory_bound=self._scheduler.memory.state(),
            drafters=self._by_drafter.states(self._speculator.states()),
        )


def _rows_by_part(parts: Sequence[ScheduledSequence], result: ForwardResult) -> list[Row]:
    """Return each part's own rows of the logits."""
    found: list[Row] = []
    start = 0
    for part in parts:
        first, last = part.wanted
        found.append(result.logits[start : start + last - first])
        start += last - first
    return found


def _delta(sequence: SequenceState, taken: list[int], finish: str, rows: Row) -> Delta:
    """Return what a round did for a sequence; row i chose token i."""
    scores = sequence.scores
    if scores is None:
        return Delta(sequence.key, taken, finish, sequence.stats())
    logprobs = scores.of_tokens(rows, taken)
    return Delta(sequence.key, taken, finish, sequence.stats(), logprobs, scores.take_prompt())
