"""One running sequence of a drafter in another process: what that must be told, and what it guessed."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.drafting.cache import count_common_prefix
from orchestrator.drafting.port import NOTHING, Draft
from policies.sampling import Sampling


@dataclass(slots=True, eq=False)
class RemoteSequence:
    """One running sequence: its tokens are all that a new process must be told. `guess` continues the first `base`
    tokens; `open`: it is not known yet how much of it the target chose. `met`: there was a guess once, so the other
    side has read the prompt."""

    key: str
    tokens: list[int]
    sampling: Sampling
    base: int = 0
    guess: Draft = NOTHING
    open: bool = False
    met: bool = False

    def rest(self, limit: int) -> Draft:
        """Return what is left of the guess behind the tokens, where they bear it out."""
        done = len(self.tokens) - self.base
        guess = self.guess
        if done >= len(guess.tokens) or list(guess.tokens[:done]) != self.tokens[self.base :]:
            return NOTHING
        return guess.behind(done).truncate(limit)

    def verdict(self) -> int | None:
        """Return how many tokens of the guess the target chose too, once, when that is decided."""
        right = count_common_prefix(self.guess.tokens, self.tokens[self.base :])
        decided = right == len(self.guess.tokens) or right < len(self.tokens) - self.base
        if not self.open or not decided:
            return None
        self.open = False
        return right
