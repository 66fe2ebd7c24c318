"""The model drafter: a small model decodes ahead, and its KV cache follows every verdict of the target.

A round drafts step by step, one ragged forward a step for all sequences. Each token is chosen as the target chooses,
with the noise of the same seed and position on the draft's own logits. So it tends to be the target's choice. Where the
request's rule judges distributions, it is drawn from the draft's own, with random numbers of its own. How sure the
model is decides, calibrated by outcomes, where drafting stops, and what drafting takes beside what it saves, whether
there is any (`drafting/gate`).

A model that fails costs speed and nothing else: the drafter closes it, says why in its state, and proposes nothing from
then on.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce

import msgspec

from adapters.contract import AdapterError, LoadedModel
from device_profiles.cost import bound_draft_reading
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.cache import DraftCache, DraftSequence, count_common_prefix
from orchestrator.worker.drafting.gate import DraftGate
from orchestrator.worker.drafting.growing import GrowingDraft, Outputs, Proposal, Rival, find_rivals, probability_of
from orchestrator.worker.drafting.port import (
    NO_HINTS,
    NO_SLOT,
    NOTHING,
    Ask,
    Draft,
    DraftHints,
    Meter,
    Outcome,
    WorkBeside,
)
from policies.running_mean import update_mean
from policies.sampling import NotFinite, Row, Rule, Sampling, choose, propose
from policies.sampling.penalties import Penalties
from policies.speculation.calibration import (
    Calibration,
    chance,
    observe_draft_outcome,
    observe_token_outcome,
    usual_chance,
)
from policies.speculation.gate import token_price

_NEWEST_STEP = 0.1  # weight of the newest step in their mean time. Not tuned.
# Of a prompt that is read once at the start (ADR 0016). Not tuned.
_MEASURED_ROWS = 128
# The least of them counts (ADR 0016). Not tuned.
_MEASURED_STEPS = 4
_RESTS = "its last trial brought less than it took; it is tried again when rounds without it have paid for that"
_FOLLOWED_TOKENS = 2  # fed anyway: the target's own token, and the last accepted one


class ModelDrafter:
    """Implements drafting.port.Drafter: see the module. `state` says what was loaded, under which name; `vocabulary` is
    the target's, in tokens: the model's own may be padded to another size. A sequence with a token for which it has no
    row is not drafted for. `prefill_ms` bounds what a round spends on prompts that the draft model has not seen yet.
    `branches`: it is to be asked for branches (drafting.port.BranchingDrafter)."""

    def __init__(
        self,
        model: LoadedModel,
        state: DrafterState,
        clock: Clock,
        *,
        vocabulary: int,
        prefill_ms: float,
        branches: bool = False,
    ) -> None:
        self.name = state.name
        self._model = model
        self._meter = Meter(state, clock)
        self._clock = clock
        self._vocabulary = vocabulary
        self._own = model.spec.vocabulary_size
        self._outputs = Outputs(model.spec)
        self._context = model.capabilities.max_context_tokens
        self._cache = DraftCache(model, prefill_ms=prefill_ms)
        self._branches = branches
        self._known: dict[str, DraftSequence] = {}
        self._branch_keys: set[str] = set()
        self._proposed: dict[str, Proposal] = {}
        # Greedy, coupled and drawn tokens are accepted at different rates.
        self._calibrations: defaultdict[Rule, Calibration] = defaultdict(Calibration)
        # What the target chooses where it rejects a draft's token.
        self._rival_calibrations: defaultdict[Rule, Calibration] = defaultdict(Calibration)
        self._guard = DraftGate(self._reading_ms)
        self._step_ms = self._least_step_ms = self._gated_ms = 0.0

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        """KV of the tokens that both begin with is kept."""
        if self._meter.failed:
            return
        if not self._has(tokens):
            self.end(key, keep=False)
            return
        before = self._known.pop(key, None)
        if before is not None:
            self._settle_restart(before, tokens)
        else:
            self._guard.observe_sequence_start()
        self._proposed.pop(key, None)
        if not self._has([token for token, _ in sampling.logit_bias]):
            bias = tuple((token, bias) for token, bias in sampling.logit_bias if token < self._own)
            sampling = replace(sampling, logit_bias=bias)
        penalties = Penalties.of(sampling, tokens)
        apart = len(tokens) <= self._model.capabilities.apart_tokens
        known = self._known[key] = DraftSequence(key, list(tokens), sampling, len(tokens), apart, penalties)
        if before is not None:
            self._cache.take_over(known, before)

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        known = self._known.get(key)
        if known is None:
            return
        if not self._has(tokens):
            self.end(key, keep=False)
            return
        self._learn(key, known.sampling, tokens)
        known.extend(tokens)

    def end(self, key: str, *, keep: bool) -> None:
        known = self._known.pop(key, None)
        self._proposed.pop(key, None)
        if known is not None:
            self._guard.observe_sequence_end(known)
            self._cache.drop(known)

    def list_outcomes(self, key: str) -> list[Outcome]:
        known, made = self._known.get(key), self._proposed.get(key)
        if known is None or made is None:
            return []
        outcomes, reached = [], 1.0
        rule = known.sampling.rule
        calibration, of_rivals = self._calibrations[rule], self._rival_calibrations[rule]
        for index, (rivals, probability) in enumerate(zip(made.rivals, made.probabilities, strict=False)):
            right = chance(calibration, probability)
            wrong = reached * (1.0 - right)
            outcomes += [Outcome(index, rival.token, wrong * chance(of_rivals, rival.share)) for rival in rivals]
            reached *= right
        return outcomes

    def branch(self, key: str, branch: str, outcome: Outcome) -> bool:
        known, made = self._known.get(key), self._proposed.get(key)
        if known is None or made is None or outcome.accepted > len(made.tokens):
            return False
        path = [*made.tokens[: outcome.accepted], outcome.token]
        forked = DraftSequence(
            branch, [*known.tokens, *path], known.sampling, known.prompt, known.apart, known.penalties
        )
        forked.counts = dict(known.counts)
        for token in path if known.penalties is not None else ():
            forked.counts[token] = forked.counts.get(token, 0) + 1
        try:
            if not self._cache.fork(forked, known):
                return False
        except AdapterError as error:
            self._meter.fail(str(error))
            self.close()
            return False
        self._known[branch] = forked
        self._branch_keys.add(branch)
        return True

    def adopt(self, key: str, branch: str) -> None:
        known, forked = self._known.get(key), self._known.get(branch)
        if known is None or forked is None or forked.tokens != known.tokens or forked.slot == NO_SLOT:
            self.prune(branch)
            return
        self._branch_keys.discard(branch)
        self._cache.drop(known)
        del self._known[branch]
        forked.key = key
        self._known[key] = forked
        if (made := self._proposed.pop(branch, None)) is not None:
            self._proposed[key] = made

    def prune(self, branch: str) -> None:
        self._branch_keys.discard(branch)
        self._proposed.pop(branch, None)
        if (forked := self._known.pop(branch, None)) is not None:
            self._cache.drop(forked)

    def memory_bytes(self) -> int:
        """The KV cache, which is allocated whole."""
        if self._meter.failed:
            return 0
        caps = self._model.capabilities
        return caps.total_blocks * caps.block_tokens * self._model.spec.bytes_per_token

    def states(self) -> list[DrafterState]:
        rests = _RESTS if self._guard.rests else ""
        return [msgspec.structs.replace(self._meter.state, memory_bytes=self.memory_bytes(), rests=rests)]

    def close(self) -> None:
        self._known.clear()
        self._proposed.clear()
        with suppress(AdapterError):  # a broken model may not even close
            self._model.close()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = self._list_ready(asks)
        self._choose_windows(ready)
        worth = [] if self._meter.failed else self._guard.choose_asks(ready, self._known, self._least_step_ms)
        self._gated_ms = 0.0
        if not worth:
            return [NOTHING] * len(asks)
        before_ms = self._meter.state.draft_ms
        try:
            with self._meter.round():
                drafts = self._drafts(worth)
            self._gated_ms = self._meter.state.draft_ms - before_ms
        except (AdapterError, NotFinite) as error:
            self._meter.fail(str(error))
            self.close()
            return [NOTHING] * len(asks)
        return [drafts.get(ask.key, NOTHING) for ask in asks]

    def _choose_windows(self, asks: Sequence[Ask]) -> None:
        """Let no more of a text be read than is expected to come behind it: what reading takes is bounded so by a share
        of what decoding takes. At a fixed depth nobody asks what it takes."""
        for ask in asks:
            if (known := self._known.get(ask.key)) is not None:
                bound = bound_draft_reading(self._guard.estimate_left(known))
                known.window = sys.maxsize if ask.fixed else bound

    def _list_ready(self, asks: Sequence[Ask]) -> Sequence[Ask]:
        """Return those that can be drafted for in this round."""
        return asks

    def describe_beside(self) -> WorkBeside:
        return WorkBeside(gated_ms=self._gated_ms)

    def measure(self) -> None:
        """Learn what reading and a step take, before there is a request that it could cost something."""
        apart_tokens = self._model.capabilities.apart_tokens
        rows = min(_MEASURED_ROWS, self._model.capabilities.max_batch_rows, self._context - 1)
        try:
            # The first pass warms up; of the others the shorter one counts.
            for cache in (DraftCache(self._model, prefill_ms=0.0), self._cache, self._cache):
                known = DraftSequence("", [0] * rows, Sampling(), rows, rows <= apart_tokens, None)
                cache.read(known)
                if known.held == rows:
                    step_ms = self._time_step(cache, known)
                    self._least_step_ms = min(self._least_step_ms or step_ms, step_ms) if cache is self._cache else 0.0
                    self._step_ms = self._least_step_ms
                cache.drop(known)
        except AdapterError as error:
            self._meter.fail(str(error))
            self.close()

    def _time_step(self, cache: DraftCache, known: DraftSequence) -> float:
        took_ms = []
        for _ in range(_MEASURED_STEPS):
            took_ms.append(self._step(cache, {known: 0})[1])
            known.guessed.clear()
        return min(took_ms)

    def _reading_ms(self, known: DraftSequence) -> float:
        return max(0, known.missing - _FOLLOWED_TOKENS) * (self._cache.row_ms or self._step_ms)

    def _has(self, tokens: Sequence[int]) -> bool:
        return max(tokens, default=0) < self._own

    def _drafts(self, asks: Sequence[Ask]) -> dict[str, Draft]:
        drafting: dict[DraftSequence, GrowingDraft] = {}
        for ask in asks:
            known = self._known.get(ask.key)
            if known is not None and known.slot == NO_SLOT and ask.key in self._branch_keys:
                continue  # it gave its place up, and is not worth reading all again
            if known is not None and ask.limit > 0 and known.positions + ask.limit <= self._context:
                price = 0.0 if ask.fixed else token_price(self._step_ms + ask.row_ms, ask.round_ms)
                least = max(ask.least, price)
                usual = 1.0 if ask.fixed else usual_chance(self._calibrations[known.sampling.rule])
                drafting[known] = GrowingDraft(ask, known, least, dict(known.counts), usual, cheaper=ask.cheaper)
        follow = all(known.follows for known in drafting)
        started_s = self._clock.monotonic_s()
        self._grow(drafting)
        for growing in drafting.values():
            self._proposed[growing.ask.key] = growing
        drafts = [(growing, growing.draft(self.name)) for growing in drafting.values()]
        took_ms = (self._clock.monotonic_s() - started_s) * MS_PER_S
        made = [(growing.known.sampling.rule, growing.ask, draft) for growing, draft in drafts]
        self._guard.observe_drafts(took_ms, made, reading=not follow)
        return {growing.ask.key: draft for growing, draft in drafts if draft.tokens}

    def _grow(self, drafting: dict[DraftSequence, GrowingDraft]) -> None:
        """Append what the draft model chooses to each draft, until none is to go on. Raises NotFinite, AdapterError."""
        resumed = [growing for growing in drafting.values() if self._resume(growing)]
        fresh = [growing for growing in drafting.values() if not growing.tokens]
        feeds = {growing.known: growing.tokens[-1] for growing in resumed if growing.goes_on}
        rows = self._cache.catch_up([growing.known for growing in fresh], [growing.known for growing in resumed], feeds)
        took_ms = 0.0  # reading is no step
        while rows:
            stepping = [drafting[known] for known in rows]
            for growing in stepping:
                self._choose(growing, rows[growing.known])
            if took_ms:
                self._step_ms = update_mean(self._step_ms or took_ms, took_ms, _NEWEST_STEP)
                self._least_step_ms = min(self._least_step_ms or took_ms, took_ms)
            feeds = {growing.known: growing.tokens[-1] for growing in stepping if growing.goes_on}
            rows, took_ms = self._step(self._cache, feeds) if feeds else ({}, 0.0)

    def _step(self, cache: DraftCache, feeds: dict[DraftSequence, int]) -> tuple[dict[DraftSequence, Row], float]:
        started_s = self._clock.monotonic_s()
        rows = cache.step(feeds)
        return rows, (self._clock.monotonic_s() - started_s) * MS_PER_S

    def _resume(self, growing: GrowingDraft) -> bool:
        """Go on from what was proposed before, as far as the target bore it out. False: there is nothing."""
        before = self._proposed.get(growing.ask.key)
        if before is None or not before.tokens or not growing.known.goes_on_from(before.tokens):
            return False
        growing.proposals.extend(before.proposals)
        growing.rivals.extend(before.rivals)
        for token, probability in zip(before.tokens, before.probabilities, strict=True):
            self._append(growing, token, probability)
        return True

    def _choose(self, growing: GrowingDraft, row: Row) -> None:
        sampling, penalties = growing.known.sampling, growing.known.penalties
        # Noise and penalties go by token; the best column is the best token without them.
        by_column = sampling.temperature == 0.0 and penalties is None
        if not by_column:
            row = self._outputs.spread(row)
        if penalties is not None:
            text = [] if penalties.dry is None else [*growing.known.tokens, *growing.tokens]
            row = penalties.apply_penalties(row, growing.counts, text)
        row = row[: self._vocabulary]  # rows behind that fill its vocabulary up, and are no tokens of the target
        behind = len(growing.known.tokens)
        if sampling.draws_drafts:
            token, proposal = propose(row, sampling, behind + len(growing.tokens), behind)
            growing.proposals.append(proposal)
            self._append(growing, token, proposal.peak)  # of the row, not of the token: see policies/sampling/verify
            return
        chosen = choose(row, sampling, behind + len(growing.tokens))
        token = self._outputs.token(chosen) if by_column else chosen
        if token >= self._vocabulary:
            raise AdapterError(f"it drafted token {token}, and the target has {self._vocabulary}")
        probability = probability_of(row, chosen, sampling.temperature)
        self._append(growing, token, probability)
        if self._branches or growing.ask.alternatives:
            at = behind + len(growing.tokens) - 1
            rivals = find_rivals(row, chosen, sampling, at, several=self._branches)
            growing.rivals.append(
                [Rival(self._outputs.token(rival) if by_column else rival, share) for rival, share in rivals]
            )

    def _append(self, growing: GrowingDraft, token: int, probability: float) -> None:
        sampling = growing.known.sampling
        growing.counts[token] = growing.counts.get(token, 0) + 1
        confidence = chance(self._calibrations[sampling.rule], probability)
        growing.tokens.append(token)
        growing.probabilities.append(probability)
        growing.confidences.append(confidence)
        growing.certainty *= confidence

    def _learn(self, key: str, sampling: Sampling, committed: Sequence[int]) -> None:
        """Learn from what was committed; what was proposed behind it is kept while it bears that out."""
        rule = sampling.rule
        before = self._proposed.pop(key, None)
        if before is None:
            return
        learned = observe_draft_outcome(self._calibrations[rule], before.tokens, before.probabilities, committed)
        self._calibrations[rule] = learned
        right = count_common_prefix(before.tokens, committed)
        if right < min(len(committed), len(before.rivals)):
            self._rival_calibrations[rule] = reduce(
                lambda calibration, rival: observe_token_outcome(
                    calibration, rival.share, rival.token == committed[right]
                ),
                before.rivals[right],
                self._rival_calibrations[rule],
            )
        self._observe_gain(rule, before, right, committed)
        if right == len(committed) < len(before.tokens):
            self._proposed[key] = before.behind(right)

    def _settle_restart(self, before: DraftSequence, tokens: Sequence[int]) -> None:
        """A sequence is begun anew, perhaps because its last tokens became others: its draft counts all the same."""
        if (made := self._proposed.get(before.key)) is not None:
            base = len(before.tokens)
            right = count_common_prefix([*before.tokens, *made.tokens], tokens) - base
            self._observe_gain(before.sampling.rule, made, max(0, right), tokens[base:])

    def _observe_gain(self, rule: Rule, made: Proposal, right: int, committed: Sequence[int]) -> None:
        """`right`: of the draft's tokens, so many were committed. The target's own token is the last one, and whichever
        draft was verified, the cheaper one's tokens are known to be right as far as they were committed."""
        if made.tokens and committed:
            cheaper, most = count_common_prefix(made.cheaper, committed), len(committed) - 1
            self._guard.observe_gain(rule, min(max(right, cheaper), most) - cheaper)
