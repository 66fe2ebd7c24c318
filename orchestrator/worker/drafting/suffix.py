"""The suffix drafter: continue as the text went on after its latest tokens, here or in an earlier output.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975): one index per request and a shared one over earlier outputs.
Answers that a draft store found for a request are an index of that request's own. The
longer a match, and the more of its occurrences agree, the deeper the draft. An index keeps the positions of every token
and of every pair of tokens. Longer matches are found by comparing backwards from the most recent of them. So it costs
tens of bytes a token where a suffix tree costs hundreds.

One draft of two sources, token by token: what earlier text votes for, and what the model's statistics say.

Whichever is surer goes on, and both go on behind it. That brings more than the better of two drafts: text that is
repeated ends somewhere, and statistics lead into it. Where both say the same, they are taken to err independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from orchestrator.clock import Clock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.packed_tokens import unpack_tokens
from orchestrator.worker.drafting.grown import GrownStatistics
from orchestrator.worker.drafting.port import NO_HINTS, NOTHING, Alternative, Ask, Draft, DraftHints, Meter
from orchestrator.worker.drafting.statistics import Guess, Statistics
from orchestrator.worker.drafting.suffix_vote import (
    Vote,
    VotedDraft,
    Voter,
    VoteRates,
    find_vote,
    keep_voters,
    vote_draft,
    weigh_match,
    without,
)
from policies.sampling import Sampling
from policies.speculation.allocation import LEAST_CHANCE
from policies.speculation.branching import MOST_BRANCHES

_CONTEXT = 32  # tokens behind which votes are looked for
_LEAST = 0.05
"""A draft ends where all of it is accepted with less than this chance: no row is worth that."""
_DOUBT = 0.5
"""Of the least chance that is worth a row: outcomes may say that these chances are too small (drafting.chain)."""
# Places of a draft at which another way is looked for. As many as may be verified (policies.speculation.branching): a
# look takes as long as a draft's.
_TURNS = MOST_BRANCHES
_CANDIDATES = 24  # most recent occurrences that are looked at
PAIR_SHIFT = 32  # a pair of token ids in one number of 64 bits
# Memory of one indexed token, measured over real outputs (CPython 3.11): its place in the list, its share of
# two dictionaries and of their position lists.
BYTES_PER_TOKEN = 240
_SEAM = -1
"""A token id that no text has ends each earlier output, so that no match runs over the seam."""


def merge_draft(
    find_voters: Callable[[Sequence[int]], tuple[list[Voter], int]],
    rates: VoteRates,
    look: Callable[[Sequence[int]], Guess | None],
    context: Sequence[int],
    limit: int,
    least: float,
    name: str,
) -> tuple[Draft, VotedDraft]:
    """Return a draft of up to `limit` tokens, and what spoke for them. `find_voters`: see drafting.suffix; it is asked
    again where `look`, into the model's statistics, went another way than all votes. `least`: see Ask."""
    least = max(_LEAST, _DOUBT * least)
    votes: list[Vote | None] = []
    every_known: list[Guess | None] = []
    end = list(context[-_CONTEXT:])
    tokens: list[int] = []
    confidences: list[float] = []
    chance, base, brought = 1.0, 0, 0
    voters, longest = find_voters(context)
    while len(tokens) < limit:
        step = len(tokens) - base
        vote = find_vote(voters, longest, step)
        votes.append(vote)
        voted = rates.weigh(vote) if vote is not None else None
        known = look(end)
        every_known.append(known)
        guess = choose_guess(voted, rates.weigh_known(known) if known is not None else None)
        if guess is None or (chance := chance * guess.chance) < least:
            break
        brought |= (voted is None or voted.token != guess.token) << len(tokens)
        tokens.append(guess.token)
        confidences.append(guess.chance)
        end.append(guess.token)
        voters = keep_voters(voters, step, guess.token)
        if not voters:
            voters, longest = find_voters(end)
            base = len(tokens)
    draft = Draft(tuple(tokens), tuple(confidences), name if tokens else "", from_statistics=brought)
    return draft, VotedDraft(tokens, votes, every_known)


def choose_guess(voted: Guess | None, known: Guess | None) -> Guess | None:
    """Return the surer of two guesses; where they are the same token, it is surer than either."""
    if voted is None or known is None:
        return voted or known
    if voted.token == known.token:
        return Guess(voted.token, 1.0 - (1.0 - voted.chance) * (1.0 - known.chance))
    return max(voted, known, key=lambda guess: guess.chance)


class SuffixIndex:
    """A growing text and where each token and pair of it stands."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.singles: dict[int, list[int]] = {}
        self.pairs: dict[int, list[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. Positions are those *after* the token or pair: where its continuation starts."""
        text, singles, pairs = self.tokens, self.singles, self.pairs
        before = text[-1] if text else -1
        for token in tokens:
            text.append(token)
            after = len(text)
            singles.setdefault(token, []).append(after)
            pairs.setdefault((before << PAIR_SHIFT) | token, []).append(after)
            before = token

    def candidates(self, context: Sequence[int], max_match: int) -> list[tuple[int, int]]:
        """Return (match length, position of the continuation) of recent occurrences of the context's end."""
        if not context:
            return []
        end = len(self.tokens)
        last = context[-1]
        if len(context) > 1:
            places = self.pairs.get((context[-2] << PAIR_SHIFT) | last, ())
            recent = [place for place in places[-_CANDIDATES:] if place < end]
            if recent:
                return [(self.match(context, place, max_match, 2), place) for place in recent]
        places = self.singles.get(last, ())
        return [(1, place) for place in places[-_CANDIDATES:] if place < end]

    def match(self, context: Sequence[int], place: int, max_match: int, length: int = 0) -> int:
        """Return how many tokens before `place` equal the context's end; `length` are known to."""
        text = self.tokens
        bound = min(max_match, len(context), place)
        while length < bound and text[place - length - 1] == context[-length - 1]:
            length += 1
        return length


class OutputStore:
    """Earlier outputs within a memory bound, in two generations: when the young one fills half of it, it
    becomes the old one and the old one is forgotten."""

    def __init__(self, memory_bytes: int) -> None:
        self._half_tokens = memory_bytes // (2 * BYTES_PER_TOKEN)
        self.generations = [SuffixIndex(), SuffixIndex()]

    def add(self, tokens: Sequence[int]) -> None:
        """Remember an output (its last tokens, where it alone is larger than half the bound)."""
        if self._half_tokens < 2:
            return
        young = self.generations[0]
        if len(young.tokens) + len(tokens) + 1 > self._half_tokens:
            self.generations = [SuffixIndex(), young]
        self.generations[0].extend([*tokens[-(self._half_tokens - 1) :], _SEAM])

    def memory_bytes(self) -> int:
        return sum(len(index.tokens) for index in self.generations) * BYTES_PER_TOKEN


class SuffixDrafter:
    """Implements drafting.port.Drafter. `max_match` is in tokens, `memory_bytes` bounds the store of earlier outputs.
    `beside`: whose store it shares, and does not count as its own. `statistics` of the model, which it closes, are
    merged with what the text votes for; `reason`: why there are none that there should be. Where there are none,
    `grown` ones are; they are those of the drafter `beside` it, if that has some."""

    def __init__(
        self,
        *,
        max_match: int,
        memory_bytes: int,
        clock: Clock,
        name: str = "suffix",
        beside: SuffixDrafter | None = None,
        statistics: Statistics | None = None,
        reason: str = "",
        grown: GrownStatistics | None = None,
    ) -> None:
        self.name = name
        self._grown: GrownStatistics | None = grown if beside is None else beside._grown
        self._scopes: dict[str, int] = {}
        if statistics is None and self._grown is not None:
            statistics = self._grown.statistics
        self._statistics = statistics
        state = DrafterState(name, "suffix", reason=reason)
        if statistics is not None:
            state = msgspec.structs.replace(
                state, source=statistics.format_source(), planned_memory_bytes=statistics.size_bytes
            )
        self._meter = Meter(state, clock)
        self._max_match, self._memory_bytes = max_match, memory_bytes
        self._store: OutputStore = OutputStore(memory_bytes) if beside is None else beside._store
        self._counts_store = beside is None
        self._rates: VoteRates = VoteRates() if beside is None else beside._rates
        self._voted: dict[str, VotedDraft] = {}
        self._indexes: dict[str, SuffixIndex] = {}
        self._recalled: dict[str, SuffixIndex] = {}
        self._prompts: dict[str, int] = {}

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        self._indexes[key] = index = SuffixIndex()
        self._prompts[key] = len(tokens)
        self._voted.pop(key, None)
        index.extend(tokens)
        if self._grown is not None:
            self._scopes[key] = self._grown.find_scope(hints.owner)
        self._recalled.pop(key, None)
        if hints.recalled:
            recalled = self._recalled[key] = SuffixIndex()
            for output in reversed(hints.recalled):  # the later ones count more in a vote: the likeliest goes last
                recalled.extend([*unpack_tokens(output), _SEAM])

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        index = self._indexes.get(key)
        if index is not None:  # a request with speculation off was never begun
            index.extend(tokens)
            if (voted := self._voted.pop(key, None)) is not None:
                self._rates.learn(voted, tokens)

    def end(self, key: str, *, keep: bool) -> None:
        index = self._indexes.pop(key, None)
        self._recalled.pop(key, None)
        prompt = self._prompts.pop(key, 0)
        self._voted.pop(key, None)
        scope = self._scopes.pop(key, 0)
        if index is not None and keep and len(index.tokens) > prompt:
            self._store.add(index.tokens[prompt:])
            if self._grown is not None:
                self._grown.add(scope, index.tokens, prompt)

    def forget(self) -> None:
        self._store = OutputStore(self._memory_bytes)

    def memory_bytes(self) -> int:
        if not self._counts_store:
            return 0
        statistics = self._statistics.size_bytes if self._statistics is not None else 0
        grown = self._grown.memory_bytes() if self._grown is not None else 0
        return self._store.memory_bytes() + statistics + grown

    def states(self) -> list[DrafterState]:
        return [msgspec.structs.replace(self._meter.state, memory_bytes=self.memory_bytes())]

    def close(self) -> None:
        if self._statistics is not None:
            self._statistics.close()
        if self._grown is not None and self._counts_store:
            self._grown.close()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        if not asks:
            return []
        with self._meter.round():
            drafts = []
            for ask in asks:
                draft, voted = self._draft(ask.key, (), ask.limit, ask.least)
                self._voted[ask.key] = voted
                drafts.append(self._find_alternatives(ask, draft) if ask.alternatives and draft.tokens else draft)
            return drafts

    def _draft(self, key: str, tokens: Sequence[int], limit: int, least: float) -> tuple[Draft, VotedDraft]:
        own = self._indexes.get(key)
        if own is None or limit <= 0:
            return NOTHING, VotedDraft((), ())
        context = own.tokens if not tokens else [*own.tokens[-self._max_match :], *tokens]
        if (look := self._choose_look(key)) is not None:
            find = partial(self._find_voters, key, own)
            return merge_draft(find, self._rates, look, context, limit, least, self.name)
        voters, longest = self._find_voters(key, own, context)
        return vote_draft(voters, longest, self._rates, limit, self.name)

    def _choose_look(self, key: str) -> Callable[[Sequence[int]], Guess | None] | None:
        """Return what says what the model says most often; None where nothing does."""
        statistics = self._statistics
        return partial(statistics.look, scope=self._scopes.get(key, 0)) if statistics is not None else None

    def _find_alternatives(self, ask: Ask, draft: Draft) -> Draft:
        """Return the draft with what would be proposed where it is the likeliest to go wrong, were its token not the
        target's."""
        misses, reached = [], 1.0
        for place, confidence in enumerate(draft.confidences):
            misses.append((reached * (1.0 - confidence), place))
            reached *= confidence
        own = self._indexes[ask.key]
        alternatives = []
        for missed, place in sorted(misses, reverse=True)[:_TURNS]:
            path = draft.tokens[:place]
            second = self._find_second(ask.key, own, [*own.tokens[-self._max_match :], *path], draft.tokens[place])
            if second is not None and missed * second.chance >= LEAST_CHANCE:
                more = self._draft(ask.key, (*path, second.token), ask.limit - place - 1, ask.least)[0]
                tokens, chances = (second.token, *more.tokens), (second.chance, *more.confidences)
                alternatives.append(Alternative(place, tokens, chances))
        return replace(draft, alternatives=tuple(alternatives))

    def _find_second(self, key: str, own: SuffixIndex, context: Sequence[int], first: int) -> Guess | None:
        """Return the surest guess but a token. Its chance is as stated: what was counted is of first guesses."""
        voters, longest = self._find_voters(key, own, context)
        vote, look = find_vote(without(voters, first), longest, 0), self._choose_look(key)
        voted = Guess(vote.token, vote.chance) if vote is not None else None
        known = look(context[-_CONTEXT:]) if look is not None else None
        return choose_guess(voted, known if known is None or known.token != first else None)

    def _find_voters(self, key: str, own: SuffixIndex, context: Sequence[int]) -> tuple[list[Voter], int]:
        voters: list[Voter] = []
        longest = 0
        recalled = self._recalled.get(key)
        beside = self._store.generations if recalled is None else [*self._store.generations, recalled]
        for source, index in enumerate((own, *beside)):
            candidates = index.candidates(context, self._max_match)
            for age, (length, place) in enumerate(candidates, start=1):
                longest = max(longest, length)
                recency = 1.0 + 3.0 * age / len(candidates)  # the latest occurrence counts up to four times the oldest
                voters.append((weigh_match(length, own=source == 0) * recency, index.tokens, place, source == 0))
        return voters, longest
