"""How many of a cheaper drafter's tokens a draft model checks in one step (CS-Drafting, arXiv 2312.11462, vertical).

A draft model makes one token a step. Where a cheaper drafter says what comes next, its tokens are fed with the step,
and each one that is the model's own choice saves it a step. A row more makes a step longer. Let T(r) be the time of a
step with r rows, r_0 the rows of one without such tokens, and c_i the chance that token i is the model's choice if all
before it are. Then k tokens save sum over i <= k of c_1 ... c_i T(r_0) / r_0, and add T(r_0 + k) - T(r_0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_CHECKED = 8
"""So many tokens are checked in one step at most."""
MEASURED_ROWS = (1, 2, 3, 5, 9)
"""Rows of the steps that are timed at the start: up to one of MOST_CHECKED tokens."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What steps of one sequence took, by their rows, ascending; nothing where it was not measured."""

    rows: tuple[int, ...] = ()
    ms: tuple[float, ...] = ()

    def estimate_ms(self, rows: int) -> float:
        """Return what a step of so many rows takes: between two measured ones by interpolation, beyond the last in
        proportion."""
        if rows > self.rows[-1]:
            return self.ms[-1] * rows / self.rows[-1]
        return float(np.interp(rows, self.rows, self.ms))


def count_checked_tokens(chances: Sequence[float], times: StepTimes, rows: int) -> int:
    """Return how many tokens with these chances to feed with a step that has so many rows without them."""
    if not times.rows:
        return 0
    step_ms = times.estimate_ms(rows)
    best, best_ms, reached, saved_ms = 0, 0.0, 1.0, 0.0
    for count, chance in enumerate(chances[:MOST_CHECKED], start=1):
        reached *= chance
        saved_ms += reached * step_ms / rows
        gain_ms = saved_ms - (times.estimate_ms(rows + count) - step_ms)
        if gain_ms > best_ms:
            best, best_ms = count, gain_ms
    return best
