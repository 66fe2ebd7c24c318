"""One sequence that is drafted ahead: goes on from the guess that all it proposed becomes output.

A sequence holds what was committed and then `ahead`: tokens that were drafted and are not decided yet. When the target
commits what was guessed, the rest of `ahead` is the next draft, there before it is asked for; when it does not, the
guess is thrown away. It grows by asking the drafter for one token more each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from orchestrator.drafting.port import NOTHING, Ask, Draft

_LEAST_CHANCE = 0.05  # a guess less likely than this is not gone on from
_FIRST_LIMIT = 4  # tokens drafted ahead for a sequence that nobody has asked about yet
_READING_STEPS = 256  # steps in which a drafter may read a new sequence's prompt before it has a first guess


@dataclass(slots=True, eq=False)
class LookaheadSequence:
    """One sequence, and how many tokens ahead are wanted of it. `reading`: so many steps more it may have no guess,
    because the drafter is still reading its prompt. `stuck`: there is no further guess."""

    key: str
    reading: int = _READING_STEPS
    wanted: int = _FIRST_LIMIT + 1
    guess: Draft = NOTHING
    stuck: bool = False

    @property
    def ahead(self) -> tuple[int, ...]:
        """Tokens that were drafted and are not decided yet."""
        return self.guess.tokens

    @property
    def chance(self) -> float:
        """The chance that all of `ahead` becomes output."""
        return prod(self.guess.confidences)

    @property
    def wants_ahead(self) -> bool:
        """True where one token more may be drafted before it is asked for."""
        return not self.stuck and len(self.ahead) < self.wanted and self.chance >= _LEAST_CHANCE

    def commit(self, tokens: Sequence[int]) -> None:
        """Keep what is guessed behind these tokens, where they were guessed."""
        count, self.stuck = len(tokens), False
        right = self.ahead[:count] == tuple(tokens)
        self.guess = self.guess.behind(count) if right else NOTHING

    def grow(self, draft: Draft) -> None:
        """Take in the draft that was asked for with one token more; without that it has no further guess."""
        grew = len(draft.tokens) > len(self.ahead)
        self.reading = 0 if grew else max(0, self.reading - 1)
        self.stuck = not grew and self.reading == 0
        if grew:
            self.guess = draft

    def draft(self, ask: Ask) -> Draft:
        """Return the leading part of `ahead` that is worth its verification."""
        chance, count = 1.0, 0
        for confidence in self.guess.confidences[: ask.limit]:
            chance *= confidence
            if chance < ask.least:
                break
            count += 1
        return self.guess.truncate(count)

    def wants_more_for(self, ask: Ask, least: float) -> bool:
        """True where a further token could be part of the draft, and is likely enough."""
        return not self.stuck and len(self.ahead) < ask.limit and self.chance >= max(ask.least, least)
