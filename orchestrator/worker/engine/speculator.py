"""A round's drafts: the depth policy says how many, the drafter proposes, the policy says which of them are verified,
and both learn from what became of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from adapters.loaded_model import ForkableKv, LoadedModel
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import DrafterShare
from orchestrator.worker.drafting.port import (
    NO_SLOT,
    NOTHING,
    Ask,
    Draft,
    Drafter,
    DraftHints,
    TallyingDrafter,
    describe_beside,
)
from orchestrator.worker.engine.acceptance_monitor import AcceptanceMonitor
from orchestrator.worker.engine.batch import ScheduledSequence, rows_of
from orchestrator.worker.engine.branches import Branch
from orchestrator.worker.engine.draft_counts import add_verified
from orchestrator.worker.engine.round import DraftOutcome, Round, RoundDrafts
from orchestrator.worker.engine.sequence import SequenceState
from policies.speculation import DraftComparison, DraftSummary, Rest, RoundContext, RoundSequence, RoundTimes
from policies.speculation.branching import NO_BRANCHES, BranchOffer, RoundBranches
from policies.speculation.policy import BranchingPolicy, DepthPolicy, DraftLimits, RoundOutcome
from policies.speculation.probe import Probe

# ADR 0029: a drafter that comes back resets the switch. Not tuned.
_NEW_DRAFTERS = Probe(16)

_RESTS = {
    Rest.ALL: "its drafts bring less than asking for them takes; it is asked again every few rounds",
    Rest.DEAR: "rounds with its drafts made fewer tokens than plain ones; it is tried again now and then",
}

_WATCHED = 4
"""So many drafts a round are shown to the watch, in turn: it takes about 4 us each. ADR 0035."""


# The rules by which what is chosen does not depend on drafts.
_CHOSEN_ALIKE = ("greedy", "coupled")
_NO_OUTCOME = DraftOutcome()
_NO_PROPOSAL = DraftSummary()


class PausedRounds(NamedTuple):
    """What happened in a pause: `rounds` (0: there was none), the last round's parts, the tokens committed to each
    sequence."""

    rounds: int = 0
    last_parts: Sequence[ScheduledSequence] = ()
    tokens: Mapping[str, Sequence[int]] = {}


class DraftPause:
    """Rounds that the depth policy of one decode loop does without. A pause outlives requests that come and go, as long
    as no more of them do than were in the round before it. Drafters hear of its tokens in one piece."""

    def __init__(self) -> None:
        self._left = self._rounds = 0
        self._sequence_changes_left = 0
        self._never_paused: set[str] = set()
        self._last_parts: Sequence[ScheduledSequence] = ()
        self._tokens: dict[str, list[int]] = {}

    def start(self, rounds: int, sequences: int) -> None:
        """The next `rounds` are a pause, behind one of so many sequences. None where a sequence is never paused."""
        self._left = 0 if self._never_paused else rounds
        self._sequence_changes_left = sequences

    def begin_sequence(self, key: str, *, never_paused: bool) -> None:
        """A sequence starts, or starts again. `never_paused`: it may draft where the policy would not."""
        self._count_sequence_change()
        if never_paused:
            self._never_paused.add(key)
            self._left = 0
        self._tokens.pop(key, None)

    def end_sequence(self, key: str) -> Sequence[int]:
        """A sequence ends; returns the tokens that its drafter has not heard of."""
        self._count_sequence_change()
        self._never_paused.discard(key)
        return self._tokens.pop(key, ())

    def _count_sequence_change(self) -> None:
        self._sequence_changes_left -= 1
        if self._sequence_changes_left < 0:
            self._left = 0

    def take_round(self, parts: Sequence[ScheduledSequence]) -> bool:
        """Begin a round; returns whether it belongs to the pause."""
        if not self._left:
            return False
        self._left -= 1
        self._rounds += 1
        self._last_parts = parts
        return True

    def hold_tokens(self, key: str, tokens: Sequence[int]) -> None:
        """Keep tokens of a paused round for the drafter until the pause is over."""
        self._tokens.setdefault(key, []).extend(tokens)

    def finish(self) -> PausedRounds:
        """Return, once, what happened in the pause that is over."""
        paused = PausedRounds(self._rounds, self._last_parts, self._tokens)
        if self._rounds:
            self._rounds, self._last_parts, self._tokens = 0, (), {}
        return paused


class Speculator:
    """Drafts for one decode loop. `max_depth` bounds every request's depth; `watch` hears what became of drafts."""

    def __init__(
        self, target: LoadedModel, drafter: Drafter, policy: DepthPolicy, *, max_depth: int, watch: AcceptanceMonitor
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._policy = policy
        self._branching = _find_branching(target, policy)
        self._max_depth = max_depth
        self._watch = watch
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
            hints = DraftHints(submit.recalled, submit.prediction, sequence.generated, submit.stores, submit.owner)
            self._drafter.begin(sequence.key, sequence.tokens, submit.sampling, hints)

    def end(self, key: str, round_: Round | None, *, keep: bool) -> None:
        """A sequence ends. `round_`: the one that is under way. `keep`: its output may help later drafts."""
        if (held := self._pause.end_sequence(key)) and keep:
            self._drafter.extend(key, held)
        self._drafter.end(key, keep=keep)
        if round_ is not None and round_.drafts is not None:
            round_.drafts.ended.append(key)  # what came of its last drafts is still to be learned
        else:
            self._policy.end(key)

    def _bound_draft_tokens(self, sequence: SequenceState) -> int:
        submit = sequence.submit
        depth = submit.most_depth if submit.depth is None else submit.depth
        return self._max_depth if depth is None else min(depth, self._max_depth)

    def pauses(self, round_: Round) -> bool:
        """Begin a round. True: it is one that the policy does without, and nobody has a draft in it."""
        round_.paused = self._pause.take_round(round_.parts)
        if round_.paused:
            self._drafter.propose([])  # it hears that a round begins
        else:
            self._end_pause()
        return round_.paused

    def _end_pause(self) -> None:
        paused = self._pause.finish()
        if paused.rounds:
            filled = any(part.is_prefill for part in paused.last_parts)
            rows = 0 if filled else rows_of(paused.last_parts, self._target.capabilities)
            self._policy.observe_pause(paused.rounds, rows)
            for key, tokens in paused.tokens.items():
                self._drafter.extend(key, tokens)

    def retune(self, policy: DepthPolicy, max_depth: int, running: Sequence[SequenceState]) -> None:
        """Choose depths by another policy and bound, between two rounds; `running` sequences go on."""
        self._end_pause()
        self._policy, self._max_depth = policy, max_depth
        self._branching = _find_branching(self._target, policy)
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
        return self._policy

    def propose(self, round_: Round, *, room: int, row_price: float) -> None:
        """Give every sampling part its draft, within `room` rows and the blocks that are left, outside a pause.
        `row_price`: see policies.speculation.RoundContext."""
        parts = round_.parts
        deciding = [part for part in parts if part.emits_logits]
        if not deciding:
            self._drafter.propose([])  # it hears that a round begins
            return
        context = self._describe_round(parts, deciding, room, row_price)
        limits = self._policy.decide_draft_limits(context)
        ruled = any(part.sequence.rules is not None for part in deciding)
        if ruled or any(limits.limits):
            self._drafting_rounds += 1
            branching = self._list_branching(context, deciding)
            drafts = self._draft(parts, deciding, context, self._list_asks(deciding, context, limits, branching))
            summaries = [
                DraftSummary(len(draft.tokens), draft.confidences, any(draft.proposals))
                if draft.tokens
                else _NO_PROPOSAL
                for draft in drafts
            ]
        else:
            self._drafter.propose([])
            drafts, summaries = [NOTHING] * len(deciding), [_NO_PROPOSAL] * len(deciding)
        depths = _keep_within_room(context, self._policy.decide_depths(context, summaries))
        for part, draft, depth in zip(deciding, drafts, depths, strict=True):
            part.draft = _pad_draft(part.sequence, draft.truncate(depth), depth) if depth else NOTHING
        if any(depths) and self._lacks_blocks(parts):
            depths = [0] * len(depths)
            for part in deciding:  # drafts never cost a running sequence its place
                part.draft = NOTHING
        index = {place.key: number for number, place in enumerate(context.places)}
        round_.drafts = RoundDrafts(context, drafts, summaries, depths, index)
        if self._branching is not None and any(draft.alternatives for draft in drafts):
            round_.branches = self._choose_branches(self._branching, round_.drafts, deciding)

    def describe_shares(self, sequence: SequenceState) -> list[DrafterShare]:
        drafter = self._drafter
        shares = drafter.describe_shares(sequence.key) if isinstance(drafter, TallyingDrafter) else []
        return add_verified(shares, sequence.by_drafter)

    def abandon_drafts(self, round_: Round) -> None:
        """The round goes on without its drafts: nothing is learned from what it proposed."""
        drafts, round_.drafts, round_.branches = round_.drafts, None, []
        for key in drafts.ended if drafts is not None else ():
            self._policy.end(key)

    def _describe_round(
        self, parts: Sequence[ScheduledSequence], deciding: Sequence[ScheduledSequence], room: int, row_price: float
    ) -> RoundContext:
        caps, alone = self._target.capabilities, len(parts) == 1
        places, base_rows = [], 0
        for part in deciding:
            sequence = part.sequence
            charged = caps.count_charged_rows(1, apart=part.apart, alone=alone)
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

    def _list_branching(self, context: RoundContext, deciding: Sequence[ScheduledSequence]) -> Collection[str]:
        """Return whose drafts may go several ways: where rows cost little, of sequences whose tokens do not depend on
        what was drafted. Nobody's in a round that reads prompts, whose times say nothing of rows."""
        if self._branching is None or context.filling_rows or context.widths:
            return ()
        return {
            part.sequence.key
            for part, place in zip(deciding, context.places, strict=True)
            if not place.fixed
            and part.sequence.rules is None
            and part.sequence.cached > 0
            and part.sequence.submit.sampling.rule in _CHOSEN_ALIKE
        }

    def _choose_branches(
        self, policy: BranchingPolicy, drafts: RoundDrafts, deciding: Sequence[ScheduledSequence]
    ) -> list[Branch]:
        """Return the branches that are worth it, and note in `drafts` all that there might be."""
        vocabulary = self._target.spec.vocabulary_size
        offers, ways = [], []
        for number, (part, draft) in enumerate(zip(deciding, drafts.proposed, strict=True)):
            sampled = part.sequence.submit.sampling.temperature > 0.0
            for way in draft.alternatives:
                place, (share, *further) = way.place, way.confidences
                if place < drafts.depths[number] and all(0 <= token < vocabulary for token in way.tokens):
                    offers.append(BranchOffer(number, place, way.tokens[0], share, further, place + 2, sampled))
                    ways.append((part, draft, way))
        drafts.offers = offers
        chosen = policy.choose_branches(drafts.context, drafts.depths, offers)
        return [
            Branch(part, draft.turn(way, further))
            for (part, draft, way), further in ((ways[choice.offer], choice.further) for choice in chosen)
        ]

    def _list_asks(
        self,
        deciding: Sequence[ScheduledSequence],
        context: RoundContext,
        limits: DraftLimits,
        branching: Collection[str],
    ) -> list[Ask]:
        first = {part.sequence.key for part in deciding if part.is_prefill}
        return [
            Ask(
                place.key,
                min(limit, place.max_draft_tokens),
                0.0 if place.fixed else limits.least,
                limits.round_ms,
                limits.row_ms,
                place.free,
                last_ms=self._last_ms,
                cheap_only=limits.cheap_only and not place.fixed,
                fixed=place.fixed,
                gain=limits.gain,
                alternatives=place.key in branching,
                first=place.key in first,
                slot=part.sequence.slot if part.sequence.uncached == 1 else NO_SLOT,
            )
            for part, place, limit in zip(deciding, context.places, limits.limits, strict=True)
            if limit > 0
        ]

    def _draft(
        self,
        parts: Sequence[ScheduledSequence],
        deciding: Sequence[ScheduledSequence],
        context: RoundContext,
        asks: Sequence[Ask],
    ) -> list[Draft]:
        """Return a draft for each deciding part, as its rules make it: what they force is drafted without an ask."""
        withheld = self._find_withheld(parts, deciding, context)
        asking = [ask for ask in asks if ask.key not in withheld] if withheld else asks
        proposed = dict(zip([ask.key for ask in asking], self._drafter.propose(asking), strict=True))
        drafts, vocabulary = [], self._target.spec.vocabulary_size
        for part, place in zip(deciding, context.places, strict=True):
            draft = proposed.get(place.key, NOTHING)
            if draft.tokens:
                draft = draft.within(vocabulary)
            rules = part.sequence.rules
            if rules is not None and place.max_draft_tokens > 0 and place.key not in withheld:
                draft = rules.draft(draft, place.max_draft_tokens)
            drafts.append(draft.truncate(place.max_draft_tokens) if draft.tokens else NOTHING)
        return drafts

    def _find_withheld(
        self, parts: Sequence[ScheduledSequence], deciding: Sequence[ScheduledSequence], context: RoundContext
    ) -> set[str]:
        """Return who would draw drafts for which there may be no block: once drawn, a draft is verified."""
        drawing = {part.sequence.key for part in deciding if part.sequence.submit.sampling.draws_drafts}
        if not drawing:
            return drawing
        for part, place in zip(deciding, context.places, strict=True):
            part.draft = Draft((0,) * place.max_draft_tokens)
        lacking = self._lacks_blocks(parts)
        for part in deciding:
            part.draft = NOTHING
        return drawing if lacking else set()

    def _lacks_blocks(self, parts: Sequence[ScheduledSequence]) -> bool:
        return self._target.count_needed_blocks([part.segment() for part in parts]) > self._target.free_blocks()

    def observe_verdict(self, round_: Round, part: ScheduledSequence, accepted: int, taken: Sequence[int]) -> None:
        """The verdict on a part's draft: so many of its tokens were accepted, and these were committed."""
        sequence, drafts = part.sequence, round_.drafts
        if round_.paused:
            self._pause.hold_tokens(sequence.key, taken)
            return
        self._drafter.extend(sequence.key, taken)
        if drafts is not None:
            drafts.tokens += len(taken)
            number = drafts.index[sequence.key]
            draft = drafts.proposed[number]
            if not draft.tokens and not part.draft.tokens:
                return
            verified = len(part.draft.tokens)
            if part.chain_accepted >= 0:  # another draft stands in the place of the one that is judged here
                accepted, verified = part.chain_accepted, drafts.depths[number]
            comparison = _compare_draft(part, draft, accepted, taken)
            if drafts.offers and (place := comparison.accepted) < comparison.compared:
                missed = [offer for offer in drafts.offers if (offer.number, offer.place) == (number, place)]
                drafts.verdicts += [(offer, offer.token == taken[place]) for offer in missed]
            drafts.outcomes[sequence.key] = DraftOutcome(accepted, comparison)
            every = 1 + (len(drafts.depths) - 1) // _WATCHED
            if number % every == self._drafting_rounds % every:
                right = max(accepted, comparison.accepted)
                self._watch.add(sequence.submit, draft, verified, right, comparison.compared)

    def settle(self, round_: Round, verify_ms: float) -> None:
        """The round is over; all of it but drafting took so long. The policy learns from it."""
        drafts = round_.drafts
        if drafts is None:
            return
        prompts = drafts.context.filling_rows > 0
        self._last_ms = 0.0 if prompts else verify_ms
        outcomes = [drafts.outcomes.get(key, _NO_OUTCOME) for key in drafts.index]
        times = None
        if not prompts and verify_ms > 0.0:
            beside = describe_beside(self._drafter)
            times = RoundTimes(verify_ms, round_.draft_ms, *beside)
        self._policy.observe_round(
            drafts.context,
            RoundOutcome(
                drafts.summaries,
                drafts.depths,
                [outcome.accepted for outcome in outcomes],
                [outcome.comparison for outcome in outcomes],
                times,
                drafts.tokens,
                _sum_branches(round_, drafts) if self._branching is not None else NO_BRANCHES,
            ),
        )
        for key in drafts.ended:
            self._policy.end(key)
        self._pause.start(self._policy.decide_pause(), len(drafts.index))
        self._rounds += 1
        if _NEW_DRAFTERS.is_due(self._rounds):
            before, self._usable = self._usable, sum(state.state == "ok" for state in self._drafter.states())
            if self._usable > before:
                self._policy.reset_gain()

    def memory_bytes(self) -> int:
        """What the drafter remembers, running sequences excluded; an estimate."""
        return self._drafter.memory_bytes()

    def states(self) -> list[DrafterState]:
        rest = self._policy.rest
        states = self._drafter.states()
        return states if rest is Rest.NONE else [_let_rest(state, rest) for state in states]


def _find_branching(target: LoadedModel, policy: DepthPolicy) -> BranchingPolicy | None:
    """Return the policy where drafts may go several ways: slots can be forked, and rows cost little."""
    if not isinstance(policy, BranchingPolicy) or not isinstance(target, ForkableKv):
        return None
    return policy if policy.branches else None


def _sum_branches(round_: Round, drafts: RoundDrafts) -> RoundBranches:
    branches = round_.branches
    return RoundBranches(len(branches), sum(branch.rows for branch in branches), round_.branch_ms, drafts.verdicts)


def _let_rest(state: DrafterState, rest: Rest) -> DrafterState:
    concerned = state.state == "ok" and (rest is Rest.ALL or state.remote is not None)
    return msgspec.structs.replace(state, rests=_RESTS[rest]) if concerned else state


def _keep_within_room(context: RoundContext, depths: Sequence[int]) -> list[int]:
    """Return depths that the forward has rows for, whatever a policy chose: first come, first served."""
    left, kept = context.room, []
    for place, depth in zip(context.places, depths, strict=True):
        kept.append(min(depth, place.free + left))
        left -= max(0, kept[-1] - place.free)
    return kept


def _pad_draft(sequence: SequenceState, draft: Draft, count: int) -> Draft:
    """Return the draft with so many tokens. A tolerant judge might accept one that nobody proposed: it gets none."""
    if len(draft.tokens) >= count or sequence.submit.sampling.rule == "tolerance":
        return draft
    return draft.pad_to(count, sequence.tokens[-1])


def _compare_draft(part: ScheduledSequence, draft: Draft, accepted: int, taken: Sequence[int]) -> DraftComparison:
    """Return what is known of a draft's tokens. Where the target's choice does not depend on drafts, those that were
    not verified are compared with what it went on to choose."""
    if part.sequence.submit.sampling.rule not in _CHOSEN_ALIKE:
        return DraftComparison(accepted, min(len(part.draft.tokens), accepted + 1))
    right = 0
    for token, chosen in zip(draft.tokens, taken, strict=False):
        if token != chosen:
            break
        right += 1
    return DraftComparison(right, min(len(draft.tokens), len(taken), right + 1))
