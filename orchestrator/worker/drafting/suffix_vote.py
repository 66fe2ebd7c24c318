"""How occurrences of a sequence's end vote for what comes next, and how often such votes were right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.worker.drafting.port import NOTHING, Draft
from orchestrator.worker.drafting.statistics import Guess
from policies.speculation.calibration import count_outcome, estimate_rate

Voter = tuple[float, list[int], int, bool]
"""A weight, a text, the place in it where the continuation starts, and whether it is the request's own text."""

# Chance that the next token is accepted when all voters agree, by length of the longest match (an index beyond the
# end takes the last). Measured over greedy outputs of the default model on 240 chat prompts.
_CERTAINTY = (0.0, 0.44, 0.60, 0.67, 0.71, 0.75, 0.78, 0.83, 0.88, 0.91, 0.93, 0.95, 0.96)
_SHARES = 6
"""Votes are told apart by the winner's share of the weight, in sixths (ADR 0126), and by what follows."""
# Edges of buckets of the longest match, in tokens. ADR 0126.
_LENGTHS = (2, 3, 4, 6, 9)
# The same of voters for the winner. ADR 0126.
_AGREEING = (2, 3, 6, 12)
# The same of voters against it. ADR 0126.
_DIFFERING = (1, 2, 4, 10)
# What statistics say is told apart by the chance that they state. ADR 0126.
_TENTHS = 10
# Outcomes that what is known without them is worth. ADR 0126: 4 to 16 are within 0.3 % of each other.
_PRIOR = 8.0
_MEMORY = 2000.0
"""So many outcomes of a kind of vote are remembered: older ones fade. Not tuned."""


class Vote(NamedTuple):
    """Voters' choice. `kind`: what votes are told apart by, `broad_kind` by less; `chance`: that it is right, before
    any was counted."""

    token: int
    kind: int
    broad_kind: int
    chance: float


def weigh_match(length: int, *, own: bool) -> float:
    """Each further matching token counts threefold, the request's own text fourfold."""
    return (4.0 if own else 1.0) * 3.0 ** min(length, 10)


def find_vote(voters: list[Voter], longest: int, step: int) -> Vote | None:
    """Return the token that most voters have `step` tokens behind their places. None where no text goes on, or most
    end there. `longest`: the longest match among them, in tokens."""
    votes: dict[int, float] = {}
    voted: list[int] = []
    own_voted: list[int] = []
    for weight, text, place, own in voters:
        if place + step < len(text):
            token = text[place + step]
            votes[token] = votes.get(token, 0.0) + weight
            voted.append(token)
            if own:
                own_voted.append(token)
    if not votes:
        return None
    winner = max(votes, key=votes.__getitem__)
    if winner < 0:
        return None
    share = votes[winner] / sum(votes.values())
    agreeing, length = voted.count(winner), min(longest + step, len(_CERTAINTY) - 1)
    sixth = min(int(share * _SHARES), _SHARES - 1)
    kind = bisect_right(_LENGTHS, length) * _SHARES + sixth
    kind = kind * (len(_AGREEING) + 1) + bisect_right(_AGREEING, agreeing)
    kind = kind * (len(_DIFFERING) + 1) + bisect_right(_DIFFERING, len(voted) - agreeing)
    return Vote(winner, 2 * kind + (winner in own_voted), length * _SHARES + sixth, _CERTAINTY[length] * share)


def keep_voters(voters: list[Voter], step: int, token: int) -> list[Voter]:
    return [v for v in voters if v[2] + step < len(v[1]) and v[1][v[2] + step] == token]


def without(voters: list[Voter], token: int) -> list[Voter]:
    """Return those who do not vote for a token at their places."""
    return [v for v in voters if v[2] < len(v[1]) and v[1][v[2]] != token]


class VoteRates:
    """How often votes of each kind were right, counted as they come true: a token is first predicted, then learned
    from (prequential, Dawid 1984)."""

    def __init__(self) -> None:
        kinds = (len(_LENGTHS) + 1) * _SHARES * (len(_AGREEING) + 1) * (len(_DIFFERING) + 1) * 2
        self._kinds = _Rates(kinds)
        self._broad_kinds = _Rates(len(_CERTAINTY) * _SHARES)
        self._known = _Rates(_TENTHS + 1)

    def weigh(self, vote: Vote) -> Guess:
        """Return a vote with its chance of being right. Few outcomes of its kind lean on those of the broad kind, and
        these on `Vote.chance`."""
        broad = self._broad_kinds.estimate(vote.broad_kind, vote.chance)
        return Guess(vote.token, self._kinds.estimate(vote.kind, broad))

    def weigh_known(self, known: Guess) -> Guess:
        """Return what the model's statistics say with the chance that they have here: they may be of other texts."""
        return Guess(known.token, self._known.estimate(int(known.chance * _TENTHS), known.chance))

    def learn(self, drafted: VotedDraft, committed: Sequence[int]) -> None:
        """Learn from what was committed in a draft's place: of its tokens up to the first wrong one, and where all
        were right of the vote behind the last."""
        known = drafted.known or [None] * len(drafted.votes)
        for place, (vote, guess, token) in enumerate(zip(drafted.votes, known, committed, strict=False)):
            if guess is not None:
                self._known.add(int(guess.chance * _TENTHS), right=guess.token == token)
            if vote is not None:
                self._kinds.add(vote.kind, right=vote.token == token)
                self._broad_kinds.add(vote.broad_kind, right=vote.token == token)
            if place < len(drafted.tokens) and drafted.tokens[place] != token:
                return


class _Rates:
    """How many outcomes were seen of each kind, and how many were right."""

    def __init__(self, kinds: int) -> None:
        self._seen = [0.0] * kinds
        self._right = [0.0] * kinds

    def estimate(self, kind: int, prior: float) -> float:
        return estimate_rate(self._right[kind], self._seen[kind], prior, _PRIOR)

    def add(self, kind: int, *, right: bool) -> None:
        count_outcome(self._seen, self._right, kind, right=right, memory=_MEMORY)


class VotedDraft(NamedTuple):
    """A draft's tokens, and of each the vote, and what statistics say (none: there are no statistics). One more is of
    the token that was not worth drafting."""

    tokens: Sequence[int]
    votes: Sequence[Vote | None]
    known: Sequence[Guess | None] = ()


def vote_draft(voters: list[Voter], longest: int, rates: VoteRates, limit: int, name: str) -> tuple[Draft, VotedDraft]:
    """Return a draft of up to `limit` tokens that the voters say, and the votes on them."""
    votes: list[Vote] = []
    while len(votes) < limit and (vote := find_vote(voters, longest, len(votes))) is not None:
        voters = keep_voters(voters, len(votes), vote.token)
        votes.append(vote)
    tokens = tuple(vote.token for vote in votes)
    draft = Draft(tokens, tuple(rates.weigh(vote).chance for vote in votes), name) if votes else NOTHING
    return draft, VotedDraft(tokens, votes)
