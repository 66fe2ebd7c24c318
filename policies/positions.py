"""The chance that the draft token at a position is accepted if all before it are: what counts where a drafter says
nothing of its certainty, and what is expected of a draft before it is there.

Outcomes are counted by position, older ones fading, over a prior that is worth PRIOR outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass

PRIOR = 4.0
PRIOR_CHANCE = 0.5
MEMORY = 300.0
"""So many outcomes a position remembers."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Outcomes `seen` and those `accepted`, by position; a later position than all is as the last one."""

    seen: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()

    def chances(self, count: int) -> list[float]:
        """Return the chances of the first `count` positions."""
        found: list[float] = []
        before = PRIOR_CHANCE  # a position is at first as the one before it
        for index in range(count):
            if index < len(self.seen):
                before = (self.accepted[index] + PRIOR * before) / (self.seen[index] + PRIOR)
            found.append(before)
        return found


def judged(positions: Positions, accepted: int, compared: int) -> Positions:
    """Take in a verdict (see policies.odds.judged)."""
    missing = compared - len(positions.seen)
    seen = [*positions.seen, *([0.0] * missing)]
    right = [*positions.accepted, *([0.0] * missing)]
    for index in range(compared):
        fade = min(1.0, (MEMORY - 1.0) / max(seen[index], 1.0))
        seen[index] = seen[index] * fade + 1.0
        right[index] = right[index] * fade + (index < accepted)
    return Positions(tuple(seen), tuple(right))
