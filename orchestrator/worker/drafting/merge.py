"""One draft of two sources, token by token: what earlier text votes for, and what the model's statistics say.

Whichever is surer goes on, and both go on behind it. That brings more than the better of two drafts: text that is
repeated ends somewhere, and statistics lead into it. Where both say the same, they are taken to err independently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.worker.drafting.port import Draft
from orchestrator.worker.drafting.statistics import Guess, Statistics
from orchestrator.worker.drafting.suffix_vote import Voter, guess_by_vote, keep_voters

_CONTEXT = 32  # tokens behind which votes are looked for
_LEAST = 0.05
"""A draft ends where all of it is accepted with less than this chance: no row is worth that."""
_DOUBT = 0.5
"""Of the least chance that is worth a row: outcomes may say that these chances are too small (drafting.chain)."""


def merge_draft(
    find_voters: Callable[[Sequence[int]], tuple[list[Voter], int]],
    statistics: Statistics,
    context: Sequence[int],
    limit: int,
    least: float,
    name: str,
) -> Draft:
    """Return a draft of up to `limit` tokens. `find_voters`: see drafting.suffix; it is asked again where the
    statistics went another way than all votes. `least`: see Ask."""
    least = max(_LEAST, _DOUBT * least)
    end = list(context[-_CONTEXT:])
    tokens: list[int] = []
    confidences: list[float] = []
    chance, base, brought = 1.0, 0, 0
    voters, longest = find_voters(context)
    while len(tokens) < limit:
        step = len(tokens) - base
        voted = guess_by_vote(voters, longest, step)
        guess = choose_guess(voted, statistics.look(end))
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
    return Draft(tuple(tokens), tuple(confidences), name if tokens else "", from_statistics=brought)


def choose_guess(voted: Guess | None, known: Guess | None) -> Guess | None:
    """Return the surer of two guesses; where they are the same token, it is surer than either."""
    if voted is None or known is None:
        return voted or known
    if voted.token == known.token:
        return Guess(voted.token, 1.0 - (1.0 - voted.chance) * (1.0 - known.chance))
    return max(voted, known, key=lambda guess: guess.chance)
