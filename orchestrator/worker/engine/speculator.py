"""A round's drafts: the depth policy says how many, the drafter proposes, the policy says which of them are verified,
and both learn from what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from adapters.contract import LoadedModel
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.messages import DrafterShare
from orchestrator.worker.drafting.port import NOTHING, Ask, Draft, Drafter, DraftHints
from orchestrator.worker.drafting.tally import TallyingDrafter
from orchestrator.worker.engine.acceptance_monitor import AcceptanceMonitor
from orchestrator.worker.engine.batch import ScheduledSequence, count_min_rows, rows_of
from orchestrator.worker.engine.draft_counts import add_verified
from orchestrator.worker.engine.draft_pause import DraftPause
from orchestrator.worker.engine.sequence import SequenceState
from policies.speculation import DraftComparison, DraftSummary, Rest, RoundContext, RoundSequence, RoundTimes
from policies.speculation.policy import DepthPolicy, DraftLimits, RoundOutcome
from policies.speculation.probe import Probe

_NEW_DRAFTERS = Probe(16)

_RESTS = {
    Rest.ALL: "its drafts bring less than asking for them takes; it is asked again every few rounds",
    Rest.DEAR: "rounds with its drafts made fewer tokens than plain ones; it is tried again now and then",
}

_WATCHED = 4
"""So many drafts a round are shown to the watch, in turn: it takes about 4 us each."""


class _Outcome(NamedTuple):
    """What became of a place's draft: tokens accepted, and what all of it could be compared with."""

    accepted: int = 0
    verdict: DraftComparison = DraftComparison()


_NO_OUTCOME = _Outcome()
_NO_PROPOSAL = DraftSummary()


@dataclass(slots=True)
class _Open:
    """A round whose forward runs. `drafts` as they were proposed, also where fewer tokens are verified. `index`: where
    each sequence stands in it. `outcomes`: of those that had a draft. `tokens` that were committed."""

    now: RoundContext
    drafts: list[Draft]
    proposals: list[DraftSummary]
    depths: list[int]
    index: dict[str, int]
    outcomes: dict[str, _Outcome] = field(default_factory=dict)
    tokens: int = 0
    ended: list[str] = field(default_factory=list)


class Speculator:
    """Drafts for one decode loop. `max_depth` bounds every request's depth; `watch` hears what became of drafts."""

    def __init__(
        self, target: LoadedModel, drafter: Drafter, policy: DepthPolicy, *, max_depth: int, watch: AcceptanceMonitor
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._policy = policy
        self._max_depth = max_depth
        self._watch = watch
        self._open: _Open | None = None
        self._rounds = self._usable = self._drafting_rounds = 0
        self._pause = DraftPause()
        self._last_ms = 0.0  # what the target's part of the last round took, 0 where it had prompts in it

    def begin(self, sequence: SequenceState, *, drafts: bool) -> None:
        """A sequence starts, or starts again. `drafts` False: it gives way at once, and nothing is drafted for it."""
        most, submit = self._bound_draft_tokens(sequence), sequence.submit
        fixed_or_ruled = submit.depth is not None or sequence.rules is not None
        self._pause.begin_sequence(sequence.key, never_paused=most > 0 and fixed_or_ruled)
        self._policy.begin(sequence.key, most, sure=bool(submit.prediction))
        if drafts and most > 0 and sequence.depth_bound > 0:
            hints = DraftHints(submit.recalled, submit.prediction, sequence.generated, submit.stores)
            self._drafter.begin(sequence.key, sequence.tokens, submit.sampling, hints)

    def end(self, key: str, *, keep: bool) -> None:
        """A sequence ends. `keep`: its output may help later drafts."""
        if (held := self._pause.end_sequence(key)) and keep:
            self._drafter.extend(key, held)
        self._drafter.end(key, keep=keep)
        if self._open is not None:
            self._open.ended.append(key)  # what came of its last drafts is still to be learned
        else:
            self._policy.end(key)

    def _bound_draft_tokens(self, sequence: SequenceState) -> int:
        submit = sequence.submit
        asked = submit.most_depth if submit.depth is None else submit.depth
        return self._max_depth if asked is None else min(asked, self._max_depth)

    def pauses(self, parts: Sequence[ScheduledSequence]) -> bool:
        """Begin a round. True: it is one that the policy does without, and nobody has a draft in it."""
        self._open = None
        if self._pause.take_round(parts):
            self._drafter.propose([])  # it hears that a round begins
            for part in parts:
                part.sequence.draft = NOTHING
            return True
        self._end_pause()
        return False

    def _end_pause(self) -> None:
        """Let policy and drafter hear of a pause that is over."""
        paused = self._pause.finish()
        if paused.rounds:
            filled = any(part.is_prefill for part in paused.last_parts)
            rows = 0 if filled else rows_of(paused.last_parts, self._target.capabilities.paid_rows)
            self._policy.observe_pause(paused.rounds, rows)
            for key, tokens in paused.tokens.items():
                self._drafter.extend(key, tokens)

    def retune(self, policy: DepthPolicy, max_depth: int, running: Sequence[SequenceState]) -> None:
        """Choose depths by another policy and bound, between two rounds; `running` sequences go on."""
        self._end_pause()
        self._policy, self._max_depth, self._open = policy, max_depth, None
        self._pause = DraftPause()
        for sequence in running:
            self.begin(sequence, drafts=True)

    def exchange(self, drafter: Drafter) -> Drafter:
        """Draft by another drafter, between two rounds; returns the one until now. `retune` is to follow."""
        self._end_pause()
        before, self._drafter = self._drafter, drafter
        self._usable = 0
        return before

    @property
    def policy(self) -> DepthPolicy:
        """What chooses depths now."""
        return self._policy

    def propose(self, parts: Sequence[ScheduledSequence], *, room: int, row_price: float = 1.0) -> None:
        """Give every sampling part its draft, within `room` rows and the blocks that are left, outside a pause.
        `row_price`: see policies.speculation.RoundContext."""
        deciding = [part for part in parts if part.emits_logits]
        if not deciding:
            self._drafter.propose([])  # it hears that a round begins
            return
        now = self._round_of(parts, deciding, room, row_price)
        asked = self._policy.decide_draft_limits(now)
        ruled = any(part.sequence.rules is not None for part in deciding)
        if ruled or any(asked.limits):
            self._drafting_rounds += 1
            drafts = self._drafts(parts, deciding, now, self._asks(now, asked))
            proposals = [
                DraftSummary(len(draft.tokens), draft.confidences, any(draft.proposals))
                if draft.tokens
                else _NO_PROPOSAL
                for draft in drafts
            ]
        else:
            self._drafter.propose([])
            drafts, proposals = [NOTHING] * len(deciding), [_NO_PROPOSAL] * len(deciding)
        depths = _within_room(now, self._policy.decide_depths(now, proposals))
        for part, draft, depth in zip(deciding, drafts, depths, strict=True):
            part.sequence.draft = _pad_draft(part.sequence, draft.truncate(depth), depth) if depth else NOTHING
        if any(depths) and self._short_of_blocks(parts):
            depths = [0] * len(depths)
            for part in deciding:  # drafts never cost a running sequence its place
                part.sequence.draft = NOTHING
        index = {place.key: at for at, place in enumerate(now.places)}
        self._open = _Open(now, drafts, proposals, depths, index)

    def describe_shares(self, sequence: SequenceState) -> list[DrafterShare]:
        """Return what each drafter did for a sequence that has not ended yet."""
        drafter = self._drafter
        told = drafter.describe_shares(sequence.key) if isinstance(drafter, TallyingDrafter) else []
        return add_verified(told, sequence.by_drafter)

    def abandon_round(self) -> None:
        """The round goes on without its drafts: nothing is learned from what it proposed."""
        self._open = None

    def _round_of(
        self, parts: Sequence[ScheduledSequence], deciding: Sequence[ScheduledSequence], room: int, row_price: float
    ) -> RoundContext:
        caps, alone = self._target.capabilities, len(parts) == 1
        places, base_rows = [], 0
        for part in deciding:
            sequence = part.sequence
            charged = count_min_rows(part, alone, caps.paid_rows)
            free = max(0, charged - part.num_query_tokens)
            most = min(self._bound_draft_tokens(sequence), sequence.depth_bound, room + free) if part.drafts else 0
            places.append(
                RoundSequence(
                    sequence.key, max(0, most), part.num_query_tokens, free, sequence.submit.depth is not None
                )
            )
            base_rows += charged
        filling_rows = sum(part.num_query_tokens for part in parts if part.is_prefill)
        context_tokens = sum(part.sequence.cached for part in deciding) / len(deciding)
        return RoundContext(places, base_rows, room, context_tokens, caps.static_widths, filling_rows, row_price)

    def _asks(self, now: RoundContext, asked: DraftLimits) -> list[Ask]:
        return [
            Ask(
                place.key,
                min(limit, place.max_draft_tokens),
                0.0 if place.fixed else asked.least,
                asked.round_ms,
                asked.row_ms,
                place.free,
                last_ms=self._last_ms,
                cheap_only=asked.cheap_only and not place.fixed,
                fixed=place.fixed,
            )
            for place, limit in zip(now.places, asked.limits, strict=True)
            if limit > 0
        ]

    def _drafts(
        self,
        parts: Sequence[ScheduledSequence],
        deciding: Sequence[ScheduledSequence],
        now: RoundContext,
        asks: Sequence[Ask],
    ) -> list[Draft]:
        """Return a draft for each deciding part, as its rules make it: what they force is drafted without an ask."""
        withheld = self._find_withheld(parts, deciding, now)
        asking = [ask for ask in asks if ask.key not in withheld] if withheld else asks
        proposed = dict(zip([ask.key for ask in asking], self._drafter.propose(asking), strict=True))
        drafts, vocabulary = [], self._target.spec.vocabulary_size
        for part, place in zip(deciding, now.places, strict=True):
            draft = proposed.get(place.key, NOTHING)
            if draft.tokens:
                draft = draft.within(vocabulary)
            rules = part.sequence.rules
            if rules is not None and place.max_draft_tokens > 0 and place.key not in withheld:
                draft = rules.draft(draft, place.max_draft_tokens)
            drafts.append(draft.truncate(place.max_draft_tokens) if draft.tokens else NOTHING)
        return drafts

    def _find_withheld(
        self, parts: Sequence[ScheduledSequence], deciding: Sequence[ScheduledSequence], now: RoundContext
    ) -> set[str]:
        """Return who would draw drafts for which there may be no block: once drawn, a draft is verified."""
        drawing = {part.sequence.key for part in deciding if part.sequence.submit.sampling.draws_drafts}
        if not drawing:
            return drawing
        for part, place in zip(deciding, now.places, strict=True):
            part.sequence.draft = Draft((0,) * place.max_draft_tokens)
        short = self._short_of_blocks(parts)
        for part in deciding:
            part.sequence.draft = NOTHING
        return drawing if short else set()

    def _short_of_blocks(self, parts: Sequence[ScheduledSequence]) -> bool:
        return self._target.count_needed_blocks([part.segment() for part in parts]) > self._target.free_blocks()

    def observe_verdict(self, sequence: SequenceState, accepted: int, taken: Sequence[int]) -> None:
        """The verdict on a sequence's draft: so many of its tokens were accepted, and these were committed."""
        if self._pause.hold_tokens(sequence.key, taken):
            return
        self._drafter.extend(sequence.key, taken)
        if self._open is not None:
            self._open.tokens += len(taken)
            index = self._open.index[sequence.key]
            draft = self._open.drafts[index]
            if not draft.tokens and not sequence.draft.tokens:
                return
            verdict = _compare_draft(sequence, draft, accepted, taken)
            self._open.outcomes[sequence.key] = _Outcome(accepted, verdict)
            every = 1 + (len(self._open.now.places) - 1) // _WATCHED
            if index % every == self._drafting_rounds % every:
                right, verified = max(accepted, verdict.accepted), len(sequence.draft.tokens)
                self._watch.add(sequence.submit, draft, verified, right, verdict.compared)

    def settle(self, verify_ms: float, draft_ms: float) -> None:
        """The round is over, after so long for drafting and for all the rest of it: the policy learns from it."""
        done, self._open = self._open, None
        if done is None:
            return
        self._last_ms = 0.0 if done.now.filling_rows else verify_ms
        outcomes = [_NO_OUTCOME] * len(done.depths)
        for key, outcome in done.outcomes.items():
            outcomes[done.index[key]] = outcome
        times = RoundTimes(verify_ms, draft_ms) if done.now.filling_rows == 0 and verify_ms > 0.0 else None
        self._policy.observe_round(
            done.now,
            RoundOutcome(
                done.proposals,
                done.depths,
                [outcome.accepted for outcome in outcomes],
                [outcome.verdict for outcome in outcomes],
                times,
                done.tokens,
            ),
        )
        for key in done.ended:
            self._policy.end(key)
        self._pause.start(self._policy.decide_pause(), len(done.index))
        self._rounds += 1
        if _NEW_DRAFTERS.is_due(self._rounds):
            before, self._usable = self._usable, sum(state.state == "ok" for state in self._drafter.states())
            if self._usable > before:
                self._policy.reset_gain()

    def memory_bytes(self) -> int:
        """What the drafter remembers, running sequences excluded; an estimate."""
        return self._drafter.memory_bytes()

    def states(self) -> list[DrafterState]:
        """Return the effective state of each drafter."""
        rest = self._policy.rest
        states = self._drafter.states()
        return states if rest is Rest.NONE else [_let_rest(one, rest) for one in states]


def _let_rest(one: DrafterState, rest: Rest) -> DrafterState:
    """Return a drafter's state, with why the policy leaves it alone where it does."""
    concerned = one.state == "ok" and (rest is Rest.ALL or one.method == "model")
    return msgspec.structs.replace(one, rests=_RESTS[rest]) if concerned else one


def _within_room(now: RoundContext, depths: Sequence[int]) -> list[int]:
    """Return depths that the forward has rows for, whatever a policy chose: first come, first served."""
    left, found = now.room, []
    for place, depth in zip(now.places, depths, strict=True):
        found.append(min(depth, place.free + left))
        left -= max(0, found[-1] - place.free)
    return found


def _pad_draft(sequence: SequenceState, draft: Draft, count: int) -> Draft:
    """Return the draft with so many tokens. A tolerant judge might accept one that nobody proposed: it gets none."""
    if len(draft.tokens) >= count or sequence.submit.sampling.rule == "tolerance":
        return draft
    return draft.pad_to(count, sequence.tokens[-1])


def _compare_draft(sequence: SequenceState, draft: Draft, accepted: int, taken: Sequence[int]) -> DraftComparison:
    """Return what is known of a draft's tokens. Where the target's choice does not depend on drafts, those that were
    not verified are compared with what it went on to choose."""
    if sequence.submit.sampling.rule not in ("greedy", "coupled"):
        return DraftComparison(accepted, min(len(sequence.draft.tokens), accepted + 1))
    right = 0
    for token, chosen in zip(draft.tokens, taken, strict=False):
        if token != chosen:
            break
        right += 1
    return DraftComparison(right, min(len(draft.tokens), len(taken), right + 1))
