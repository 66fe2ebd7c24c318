"""How many of a cheaper drafter's tokens a draft model checks in one step (CS-Drafting, arXiv 2312.11462, vertical).

A draft model makes one token a step. Where a cheaper drafter says what comes next, its tokens are fed with the step,
and each one that is the model's own choice saves it a step. A row more makes a step longer. Let T(r) be the time of a
step with r rows, r_0 the rows of one without such tokens, and c_i the chance that token i is the model's choice if all
before it are. Then k tokens save sum over i <= k of c_1 ... c_i T(r_0) / r_0, and add T(r_0 + k) - T(r_0).

When a costlier drafter is asked after a cheaper one, and whose draft is taken.

A draft is worth the tokens that it saves. With c_i the chance that token i is accepted if all before it are, the
expected number of accepted tokens is sum over k of prod_{i<=k} c_i. This is Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023, section 3.1, with a chance for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.running_mean import update_mean

WORTH_TOKENS = 0.5
"""A costlier drafter is asked where it usually brings so many accepted tokens more."""
OPTIMISM_TOKENS = 4.0
"""What is expected of a drafter at first: enough to ask it until its own figures say otherwise."""
_WEIGHT = 0.05  # of the newest draft, in an exponential mean
MOST_CHECKED = 8
"""So many tokens are checked in one step at most. ADR 0090: a step of 9 rows takes three times one of a single row
there."""
MEASURED_ROWS = (1, 2, 3, 5, 9)
"""Rows of the steps that are timed at the start: up to one of MOST_CHECKED tokens. ADR 0090: 11, 14, 15, 27 and
33 ms on a processor with AVX2."""


def estimate_accepted_tokens(confidences: Sequence[float]) -> float:
    total, chance = 0.0, 1.0
    for confidence in confidences:
        chance *= confidence
        total += chance
    return total


def asks_on(confidences: Sequence[float], *, limit: int, usual: float) -> bool:
    """Return whether to ask the next drafter too, where the cheaper ones' best draft has these confidences.

    `usual`: the accepted tokens that can be expected of the next one's drafts. Where there is no draft yet it is always
    asked, so what is usual stays known.
    """
    if limit <= 0:
        return False
    if not confidences:
        return True
    return estimate_accepted_tokens(confidences) + WORTH_TOKENS < min(usual, limit)


def usual_after(usual: float, confidences: Sequence[float]) -> float:
    """Return what can be expected of a drafter's drafts, one more of them considered."""
    return update_mean(usual, estimate_accepted_tokens(confidences), _WEIGHT)


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
