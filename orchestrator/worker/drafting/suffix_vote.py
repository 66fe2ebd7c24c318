"""How occurrences of a sequence's end vote for what comes next."""

from __future__ import annotations

from orchestrator.worker.drafting.port import Draft
from orchestrator.worker.drafting.statistics import Guess

Voter = tuple[float, list[int], int]
"""A weight, a text, and the place in it where the continuation starts."""

# Chance that the next token is accepted when all voters agree, by length of the longest match (an index beyond the
# end takes the last). Measured over greedy outputs of the default model on 240 chat prompts.
_CERTAINTY = (0.0, 0.44, 0.60, 0.67, 0.71, 0.75, 0.78, 0.83, 0.88, 0.91, 0.93, 0.95, 0.96)


def weigh_match(length: int, *, own: bool) -> float:
    """Each further matching token counts threefold, the request's own text fourfold."""
    return (4.0 if own else 1.0) * 3.0 ** min(length, 10)


def guess_by_vote(voters: list[Voter], longest: int, step: int) -> Guess | None:
    """Return the token that most voters have `step` tokens behind their places. None where no text goes on, or most
    end there. `longest`: the longest match among them, in tokens."""
    votes: dict[int, float] = {}
    for weight, text, place in voters:
        if place + step < len(text):
            token = text[place + step]
            votes[token] = votes.get(token, 0.0) + weight
    if not votes:
        return None
    winner = max(votes, key=votes.__getitem__)
    if winner < 0:
        return None
    share = votes[winner] / sum(votes.values())
    return Guess(winner, _CERTAINTY[min(longest + step, len(_CERTAINTY) - 1)] * share)


def keep_voters(voters: list[Voter], step: int, token: int) -> list[Voter]:
    return [v for v in voters if v[2] + step < len(v[1]) and v[1][v[2] + step] == token]


def vote_draft(voters: list[Voter], longest: int, limit: int, name: str) -> Draft:
    tokens: list[int] = []
    confidences: list[float] = []
    for step in range(limit):
        guess = guess_by_vote(voters, longest, step)
        if guess is None:
            break
        tokens.append(guess.token)
        confidences.append(guess.chance)
        voters = keep_voters(voters, step, guess.token)
    return Draft(tuple(tokens), tuple(confidences), name)
