"""A round: schedule -> propose -> verify -> accept -> commit -> observe, adapt (the depth policy's turn)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from adapters.errors import CapacityError, DeviceLost, GrammarFailed, GrammarTooComplex, OutOfMemory
from adapters.loaded_model import ForwardResult, LoadedModel, PendingForward, StagedModel
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta, Gauges, Refused, RoundReport
from orchestrator.worker.drafting.port import NO_SLOT, Drafter, NoDrafter
from orchestrator.worker.engine.acceptance_monitor import AcceptanceMonitor
from orchestrator.worker.engine.batch import WantedRows, rows_of
from orchestrator.worker.engine.branches import BranchForks
from orchestrator.worker.engine.constraints import RowConstraints
from orchestrator.worker.engine.draft_counts import DrafterCounts, RoundDraftCounts, count_verdict
from orchestrator.worker.engine.grammar import Grammars
from orchestrator.worker.engine.prefix_cache import KeptPrefixes, PrefixCache, StartPages
from orchestrator.worker.engine.request_checks import find_refusal
from orchestrator.worker.engine.round import Round, WaitingForward, split_rows
from orchestrator.worker.engine.round_traces import RoundTraces
from orchestrator.worker.engine.scheduler import ALL_RESERVED, NOTHING_RESERVED, Reserved, Scheduler
from orchestrator.worker.engine.sequence import SequenceState
from orchestrator.worker.engine.speculator import Speculator
from orchestrator.worker.engine.verifier import Verdict, Verifier
from policies.sampling import NotFinite, ToleranceGoal, VerifiedDraft
from policies.serving.acceptance_alarm import THRESHOLD
from policies.serving.slo import NO_OBJECTIVES, Objectives
from policies.speculation.policy import DepthPolicy

_SHARES_EVERY = 16
"""A sequence's rounds between two words on what each drafter did for it. Not tuned."""


class LoopTuning(NamedTuple):
    """What of a decode loop can be another without another model: see DecodeLoop."""

    policy: DepthPolicy
    max_depth: int
    max_itl_ms: float
    prefix_reuse: bool
    tolerance: ToleranceGoal
    low_acceptance_rate: float
    objectives: Objectives


class DecodeLoop:
    """Continuous batching over one target. Not thread-safe: the engine's thread owns it, `prepare` excepted.

    `policy` chooses depths; `max_depth` bounds every request's, and a request may ask for less. `max_itl_ms` bounds a
    forward that decodes and prefills. `prefix_reuse`: requests begin with what earlier ones computed, or with
    what is `kept`.
    `grammars` starts the grammars that requests ask for. `tolerance` is what the rule of that name is to reach.
    `low_acceptance_rate`: drafters below it are warned of.
    `objectives`: what requests are to have. `scheduler`: who runs and who waits. `expected_ms`: the predicted time of
    the round that runs. `decoded_rows`: of the last round, 0 where it had prompts in it, or was not all of what had
    started.
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
        kept: KeptPrefixes | None = None,
    ) -> None:
        self._target = target
        self._staged = target if isinstance(target, StagedModel) else None
        self._round: Round | None = None
        self._grammars = grammars
        self._watch = AcceptanceMonitor(low_acceptance_rate)
        max_depth = max_depth if drafter is not None and target.capabilities.rewinds else 0
        self._speculator = Speculator(target, drafter or NoDrafter(), policy, max_depth=max_depth, watch=self._watch)
        self._clock = clock
        self._prefixes = PrefixCache(target, enabled=prefix_reuse, kept=kept)
        self.scheduler = Scheduler(
            *(target, self._prefixes, clock, lambda: self._speculator.policy.cost),
            max_running=max_running,
            max_itl_ms=max_itl_ms,
            objectives=objectives,
            drafts=max_depth > 0,
        )
        self._levels = self.scheduler.levels
        self._by_drafter = DrafterCounts()
        self._verifier = Verifier(tolerance)
        self._forks = BranchForks(target, self.scheduler, self._verifier)
        self._traces = RoundTraces(clock)
        self._failed: list[Refused] = []
        self._not_finite = 0
        self._rounds = 0
        self.expected_ms = 0.0
        self.decoded_rows = 0

    @property
    def max_running(self) -> int:
        """How many requests run at the same time, after every bound."""
        return self.scheduler.max_running

    def hand_over(self, other: DecodeLoop, joins: Callable[[Submit], None]) -> bool:
        """Let the last request that never ran wait in another loop over the same target, or else the youngest that
        decodes go on there, between two rounds. `joins`: tells the drafter there of a request's variant. False: there
        is none."""
        sequence = self.scheduler.take_waiting()
        if sequence is not None:
            other.scheduler.add(sequence)
            return True
        decoding = [running for running in self.scheduler.list_running() if running.uncached == 1]
        if not decoding:
            return False
        sequence = decoding[-1]
        self._speculator.end(sequence.key, None, keep=False)
        self.scheduler.move(sequence, other.scheduler)
        joins(sequence.submit)
        other._speculator.begin(sequence, drafts=True)
        return True

    def holds(self, request_id: str) -> bool:
        return self.scheduler.holds(request_id)

    def find_running(self, request_id: str) -> SequenceState | None:
        return self.scheduler.find_running(request_id)

    @property
    def idle(self) -> bool:
        """True when no request runs or waits, and no round is under way."""
        return self.scheduler.sequences == 0 and self._round is None

    @property
    def policy(self) -> DepthPolicy:
        return self._speculator.policy

    def exchange(self, drafter: Drafter | None) -> Drafter:
        """Draft by another drafter, between two rounds; returns the one until now, for the caller to close. `retune` is
        to follow."""
        return self._speculator.exchange(drafter or NoDrafter())

    def retune(self, tuning: LoopTuning, *, drafts: bool) -> None:
        """Go on by other settings, between two rounds. `drafts`: there is a drafter. No request notices, but for the
        depth of its drafts and the time of its tokens."""
        max_depth = tuning.max_depth if drafts and self._target.capabilities.rewinds else 0
        self.scheduler.retune(max_itl_ms=tuning.max_itl_ms, objectives=tuning.objectives, drafts=max_depth > 0)
        self._levels = self.scheduler.levels
        self._prefixes.enable(tuning.prefix_reuse)
        self._verifier.set_goal(tuning.tolerance)
        self._watch.set_threshold(tuning.low_acceptance_rate)
        self._speculator.retune(tuning.policy, max_depth, self.scheduler.list_running())

    def prepare(self, request: Submit) -> None:
        """Do ahead of `submit` what takes time; from any thread."""
        if request.grammar is not None:
            with suppress(GrammarFailed):  # `submit` says why
                self._grammars.prepare(request.grammar, request.committed)

    def submit(
        self, request: Submit, arrived_s: float | None = None, pages: StartPages | None = None
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
        self.scheduler.add(sequence)
        self._traces.observe_request(request)
        return None

    def failures(self) -> list[Refused]:
        """Return, once, the requests that the last rounds could not go on with; they are gone."""
        failed, self._failed = self._failed, []
        return failed

    def cancel(self, request_id: str) -> None:
        """Forget a request, running or waiting; its slot is free at once. Unknown ids are ignored."""
        sequence = self.scheduler.withdraw(request_id)
        if sequence is not None:
            self._retire(sequence, keep=False)
        else:  # one that gave way waits, and the drafter still knows it
            self._speculator.end(request_id, self._round, keep=False)

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
        round_ = Round(self._rounds, self._clock.monotonic_s())
        self._schedule(round_, reserved)
        if not round_.parts:
            return False
        self.expected_ms = self.scheduler.predict_round_ms(round_.parts)
        self._draft(round_)
        if round_.branches:
            started_s = self._clock.monotonic_s()
            round_.branches = self._forks.fork_sequences(round_.parts, round_.branches)
            round_.branch_ms = (self._clock.monotonic_s() - started_s) * MS_PER_S
        round_.forward = self._start_forward(round_)
        self._round = round_
        return True

    def finish_round(self) -> RoundReport:
        """The second half of the round that was begun: wait for its forward, verify, commit, learn. Requests that were
        cancelled meanwhile get nothing of it. Raises AdapterError: the target is of no more use."""
        round_ = self._round
        assert round_ is not None  # noqa: S101  # the caller's part
        result = self._wait_for_forward(round_)
        ran = round_.parts
        wanted_rows = split_rows(ran, round_.branches, result)
        pairs = zip(ran, wanted_rows[: len(ran)], strict=True)
        kept = [(part, own) for part, own in pairs if part.sequence.slot != NO_SLOT]
        round_.parts, rows = [part for part, _ in kept], [own for _, own in kept]
        complete = len(kept) == len(ran)  # what was cancelled is in the costs, and no more in the counts
        if complete:
            self.scheduler.observe(ran, result.device_ms)
        verdicts = self._judge(round_, rows)
        if round_.branches:
            self._forks.settle(round_.branches, wanted_rows[len(ran) :], round_.parts, rows, verdicts)
        deltas, tally = self._commit(round_, verdicts, rows)
        trace = self._traces.trace_round(round_, verdicts, deltas)
        self._rounds += 1
        rows_ran = rows_of(ran, self._target.capabilities) + sum(branch.rows for branch in round_.branches)
        self.decoded_rows = rows_ran if complete and not any(part.is_prefill for part in ran) else 0
        round_ms = (self._clock.monotonic_s() - round_.started_s) * MS_PER_S - round_.pages_ms
        self._speculator.settle(round_, round_ms - round_.draft_ms - round_.branch_ms)
        if complete:
            self.scheduler.observe_round_time(ran, sum(len(delta.tokens) for delta in deltas), round_ms)
        self._round = None
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
            draft_ms=round_.draft_ms,
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

    def _schedule(self, round_: Round, reserved: Reserved) -> None:
        """Choose who is in the next forward; the drafter hears of who starts. What it knows of those who give way is
        good until they start again."""
        started = self.scheduler.admit(reserved)
        for sequence in started:
            pages, sequence.pages = sequence.pages, None
            if pages is not None:
                round_.pages_ms += pages.load(sequence, self._prefixes)
        round_.parts, preempted = self.scheduler.parts()
        for sequence in started:
            self._speculator.begin(sequence, drafts=sequence not in preempted)

    def _draft(self, round_: Round) -> None:
        """Give the parts of a round their drafts, unless the policy does without it."""
        round_.proposed_s = self._clock.monotonic_s()
        if not self._speculator.pauses(round_):
            prompts = any(part.is_prefill for part in round_.parts)
            room = self.scheduler.room(round_.parts)
            self._speculator.propose(round_, room=room, row_price=self._levels.row_price(prompts=prompts))
        round_.draft_ms = (self._clock.monotonic_s() - round_.proposed_s) * MS_PER_S

    def _start_forward(self, round_: Round) -> PendingForward:
        """Start a forward, or have it run by whoever waits for it. Raises what the target's forward raises."""
        batch = [part.segment() for part in round_.parts]
        if round_.branches:
            batch += [branch.segment() for branch in round_.branches]
        return WaitingForward(self._target, batch) if self._staged is None else self._staged.start_forward(batch)

    def _wait_for_forward(self, round_: Round) -> ForwardResult:
        """Return what the round's forward gives, or a smaller one without drafts where memory runs out. Raises what the
        target's forward raises."""
        while round_.forward is not None:
            try:
                return round_.forward.result()
            except OutOfMemory as error:
                if not error.can_go_on or not self.scheduler.make_smaller(round_.parts, str(error)):
                    raise
            self._forks.release_forks(round_.branches)
            self._speculator.abandon_drafts(round_)
            self.scheduler.begin_anew(round_.parts)
            self._schedule(round_, ALL_RESERVED)
            round_.forward = self._start_forward(round_) if round_.parts else None
        # all were cancelled, or other flights have the blocks of those that gave way
        return ForwardResult(np.empty((0, self._target.spec.outputs), np.float32), 0.0)

    def _retire(self, sequence: SequenceState, *, keep: bool, garbage: bool = False) -> None:
        """The sequence ends. `keep`: its output may help later drafts. `garbage`: what it computed may be."""
        self._speculator.end(sequence.key, self._round, keep=keep)
        self.scheduler.leave(sequence, garbage=garbage)

    def _judge(self, round_: Round, rows: Sequence[WantedRows]) -> list[VerifiedDraft | None]:
        """Return the verdict on each part's draft; None where it chooses no token, or its request is given up."""
        verdicts = self._verifier.verdicts(round_.parts, rows)
        return [
            self._keep_verified(part.sequence, verdict) for part, verdict in zip(round_.parts, verdicts, strict=True)
        ]

    def _keep_verified(self, sequence: SequenceState, verdict: Verdict | None) -> VerifiedDraft | None:
        """Return a verdict that is one; where it is none, give up on that request."""
        match verdict:
            case GrammarFailed():
                self._fail(sequence, verdict)
            case NotFinite():
                self._not_finite += 1
                message = f"{self._target.capabilities.device} computed garbage for this request: {verdict}"
                self._failed.append(Refused(sequence.key, message, "not_finite"))
                self._retire(sequence, keep=False, garbage=True)
            case _:
                return verdict
        return None

    def _commit(
        self, round_: Round, verdicts: Sequence[VerifiedDraft | None], rows: Sequence[WantedRows]
    ) -> tuple[list[Delta], RoundDraftCounts]:
        deltas: list[Delta] = []
        tally = RoundDraftCounts()
        for part, verified, own in zip(round_.parts, verdicts, rows, strict=True):
            sequence = part.sequence
            if sequence.slot == NO_SLOT:  # its grammar failed, or its row was garbage
                continue
            filling = sequence.prompt_left > 0
            self._prefixes.count(sequence)
            sequence.cached += part.num_query_tokens
            if filling:
                self._prefixes.remember(sequence)
            if verified is None:
                continue
            sequence.cached += verified.accepted
            sequence.first_token_s = sequence.first_token_s or self._clock.monotonic_s()
            count_verdict(part, verified, tally, self._by_drafter)
            try:
                taken, finish = sequence.commit(verified.tokens)
            except GrammarFailed as error:
                self._fail(sequence, error)
                continue
            tolerated = sum(index < len(taken) for index in verified.tolerated)
            sequence.tolerated += tolerated
            tally.tolerated += tolerated
            if taken:
                self._levels.observe_commit(sequence, ended=bool(finish))
            shares_due = bool(finish) or sequence.steps % _SHARES_EVERY == 0
            sequence.shares = self._speculator.describe_shares(sequence) if shares_due else []
            deltas.append(_make_delta(sequence, taken, finish, part.find_choosing(own)))
            self._speculator.observe_verdict(round_, part, verified.accepted, taken)
            if finish:
                self._retire(sequence, keep=True)
        return deltas, tally

    def _fail(self, sequence: SequenceState, error: GrammarFailed) -> None:
        """Give up on one request; the others go on."""
        kind = "invalid" if isinstance(error, GrammarTooComplex) else "failed"
        self._failed.append(Refused(sequence.key, f"the grammar failed: {error}", kind))
        self._retire(sequence, keep=False)

    def gauges(self, rss_bytes: int, peak_rss_bytes: int = 0) -> Gauges:
        """Return the state between rounds."""
        return Gauges(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            free_blocks=self._target.free_blocks(),
            total_blocks=self._target.capabilities.total_blocks,
            preemptions=self.scheduler.preemptions,
            drafter_bytes=self._speculator.memory_bytes(),
            rounds=self._rounds,
            rss_bytes=rss_bytes,
            peak_rss_bytes=peak_rss_bytes,
            prefix_queries=self._prefixes.queries,
            prefix_hits=self._prefixes.hits,
            prefix_loaded=self._prefixes.loaded,
            tolerance_deltas=self._verifier.deltas,
            tolerance_recalibrations=self._verifier.recalibrations,
            low_acceptance=self._watch.standing(),
            slo=self._levels.state(),
            out_of_memory=self.scheduler.memory.failures,
            not_finite=self._not_finite,
            memory_bound=self.scheduler.memory.state(),
            drafters=self._by_drafter.states(self._speculator.states()),
        )


def _make_delta(sequence: SequenceState, taken: list[int], finish: str, rows: WantedRows) -> Delta:
    """Return what a round did for a sequence; row i chose token i."""
    scores = sequence.scores
    if scores is None:
        return Delta(sequence.key, taken, finish, sequence.stats())
    logprobs = scores.of_tokens(rows.logits, taken)
    return Delta(sequence.key, taken, finish, sequence.stats(), logprobs, scores.take_prompt())
