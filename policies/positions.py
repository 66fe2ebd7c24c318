"""The chance that the draft token at a position is accepted if all before it are: what counts where a drafter says
nothing of its certainty, and what is expected of a draft before it is there.

Each position has log odds, to which a request's factor is added (policies.odds), and both learn from the same verdicts:

    log odds of a position += (outcome - chance) / precision;   precision = fade * precision + chance * (1 - chance)

So what the factor explains is not learned once more by the positions: a text that turns moves the factor, which counts
for all positions alike, and they keep their shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

PRIOR_PRECISION = 1.5
FADE = 0.998
_MOST = 8.0  # of the size of log odds
_LEAST_VARIANCE = 0.01  # a chance near 0 or 1 is never so certain that an outcome would not count


@dataclass(frozen=True, slots=True)
class Positions:
    """By position: log odds, and how well they are known; a later position than all is as the last one."""

    log_odds: tuple[float, ...] = ()
    precisions: tuple[float, ...] = ()

    def chances(self, count: int) -> list[float]:
        """Return the chances of the first `count` positions, of requests whose factor is 1."""
        known = self.log_odds[:count]
        found = [1.0 / (1.0 + exp(-one)) for one in known]
        return found + [found[-1] if found else 0.5] * (count - len(found))


def judged(positions: Positions, log_factor: float, accepted: int, compared: int) -> Positions:
    """Take in a verdict (see policies.odds.judged) on a draft of a request with this factor."""
    logs, precisions = [*positions.log_odds], [*positions.precisions]
    for index in range(compared):
        if index == len(logs):
            logs.append(logs[-1] if logs else 0.0)  # a position is at first as the one before it
            precisions.append(PRIOR_PRECISION)
        chance = 1.0 / (1.0 + exp(-logs[index] - log_factor))
        precisions[index] = FADE * precisions[index] + max(_LEAST_VARIANCE, chance * (1.0 - chance))
        moved = logs[index] + ((index < accepted) - chance) / precisions[index]
        logs[index] = min(max(moved, -_MOST), _MOST)
    return Positions(tuple(logs), tuple(precisions))
