"""How occurrences of a sequence's end vote for what comes next, and how often such votes were right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.worker.drafting.port import NOTHING, Draft
from orchestrator.worker.drafting.statistics import Guess

Voter = tuple[float, list[int], int]
"""A weight, a text, and the place in it where the continuation starts."""

# Chance that the next token is accepted when all voters agree, by length of the longest match (an index beyond the
# end takes the last). Measured over greedy outputs of the default model on 240 chat prompts.
_CERTAINTY = (0.0, 0.44, 0.60, 0.67, 0.71, 0.75, 0.78, 0.83, 0.88, 0.91, 0.93, 0.95, 0.96)
# ADR 0126: votes are told apart by six shares of the weight, and by up to six voters for the winner and against it.
_SHARES = 6
_MOST_VOTERS = 6
# Outcomes that the chance before any is worth. ADR 0126: 4 to 16 are within 0.5 % of each other.
_PRIOR = 8.0
_MEMORY = 2000.0
"""So many outcomes of a kind of vote are remembered: older ones fade. Not tuned."""


class Vote(NamedTuple):
    """Voters' choice. `kind`: what votes are told apart by; `chance`: that it is right, before such votes were
    counted."""

    token: int
    kind: int
    chance: float


def weigh_match(length: int, *, own: bool) -> float:
    """Each further matching token counts threefold, the request's own text fourfold."""
    return (4.0 if own else 1.0) * 3.0 ** min(length, 10)


def find_vote(voters: list[Voter], longest: int, step: int) -> Vote | None:
    """Return the token that most voters have `step` tokens behind their places. None where no text goes on, or most
    end there. `longest`: the longest match among them, in tokens."""
    votes: dict[int, float] = {}
    said: list[int] = []
    for weight, text, place in voters:
        if place + step < len(text):
            token = text[place + step]
            votes[token] = votes.get(token, 0.0) + weight
            said.append(token)
    if not votes:
        return None
    winner = max(votes, key=votes.__getitem__)
    if winner < 0:
        return None
    share = votes[winner] / sum(votes.values())
    agreeing = said.count(winner)
    kind = min(int(share * _SHARES), _SHARES - 1) * (_MOST_VOTERS + 1) + min(agreeing, _MOST_VOTERS)
    kind = kind * (_MOST_VOTERS + 1) + min(len(said) - agreeing, _MOST_VOTERS)
    return Vote(winner, kind, _CERTAINTY[min(longest + step, len(_CERTAINTY) - 1)] * share)


def keep_voters(voters: list[Voter], step: int, token: int) -> list[Voter]:
    return [v for v in voters if v[2] + step < len(v[1]) and v[1][v[2] + step] == token]


class VoteRates:
    """How often votes of each kind were right, counted as they come true: a token is first predicted, then learned
    from (prequential, Dawid 1984)."""

    def __init__(self) -> None:
        kinds = _SHARES * (_MOST_VOTERS + 1) ** 2
        self._seen = [0.0] * kinds
        self._right = [0.0] * kinds

    def weigh(self, vote: Vote) -> Guess:
        """Return a vote with its chance of being right: the mean of a Beta posterior, whose prior is `Vote.chance`."""
        right, seen = self._right[vote.kind], self._seen[vote.kind]
        return Guess(vote.token, (right + _PRIOR * vote.chance) / (seen + _PRIOR))

    def observe(self, drafted: VotedDraft, said: Sequence[int]) -> None:
        """Learn from what was said in a draft's place: of its tokens up to the first wrong one, and of the vote behind
        the last, where all were right."""
        for place, (vote, token) in enumerate(zip(drafted.votes, said, strict=False)):
            if vote is not None:
                self._count(vote.kind, right=vote.token == token)
            if place < len(drafted.tokens) and drafted.tokens[place] != token:
                return

    def _count(self, kind: int, *, right: bool) -> None:
        fade = (_MEMORY - 1.0) / self._seen[kind] if self._seen[kind] > _MEMORY - 1.0 else 1.0
        self._seen[kind] = self._seen[kind] * fade + 1.0
        self._right[kind] = self._right[kind] * fade + right


class VotedDraft(NamedTuple):
    """A draft's tokens, and the vote on each of them. A vote more is on the token that was not worth drafting."""

    tokens: Sequence[int]
    votes: Sequence[Vote | None]


def vote_draft(
    voters: list[Voter], longest: int, rates: VoteRates, limit: int, name: str
) -> tuple[Draft, list[Vote | None]]:
    """Return a draft of up to `limit` tokens that the voters say, and the votes on them."""
    votes: list[Vote | None] = []
    confidences: list[float] = []
    while len(votes) < limit and (vote := find_vote(voters, longest, len(votes))) is not None:
        voters = keep_voters(voters, len(votes), vote.token)
        votes.append(vote)
        confidences.append(rates.weigh(vote).chance)
    if not votes:
        return NOTHING, votes
    return Draft(tuple(vote.token for vote in votes if vote is not None), tuple(confidences), name), votes
