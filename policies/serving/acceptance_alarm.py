"""When acceptance is so low that somebody should hear of it, and what is the likely cause. Values, no text.

Acceptance is accepted / drafted tokens, as vLLM counts it. Nothing is said before LEAST_DRAFTED tokens, nor while the
upper end of the rate's 95 % interval (Wilson, 1927) is above the threshold.
"""

from __future__ import annotations

from enum import StrEnum
from math import sqrt
from typing import NamedTuple

# ADR 0035: the 95 % interval of a rate of 0.15 is then 0.11 to 0.21.
LEAST_DRAFTED = 200
THRESHOLD = 0.15
"""Below it a warning is due, unless configured otherwise (vllm-project/vllm#44164 asks for the same)."""
_Z = 1.96  # the 95 % interval of a normal distribution
# Promised / accepted. Not tuned: which cause is named, never whether somebody hears (ADR 0035).
_OVERCONFIDENT = 2.0
_SOME = 5.0  # where so many are promised, chance leaves none in less than 1 of 100 cases
# The second position's chance to the first one's. Not tuned, as above.
_STEEP = 0.4
# Greedy to sampled acceptance, or all other classes' to one's. Not tuned, as above.
_MUCH_BETTER = 2.0


class Cause(StrEnum):
    ONE_CLASS = "one_class"  # other classes fare well: this route's or user's text
    NOTHING_ACCEPTED = "nothing_accepted"  # another vocabulary, a broken cache: chance alone would accept some
    SAMPLING = "sampling"  # greedy requests fare well: temperature, not the drafter
    TOO_DEEP = "too_deep"  # first tokens are accepted, later ones are not
    OVERCONFIDENT = "overconfident"  # the drafter is far surer than it should be
    HARD_TEXT = "hard_text"  # it promises little, and keeps it


class DraftCounts(NamedTuple):
    """Tokens `drafted` (verified) and `accepted` of them."""

    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """The acceptance rate; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Sample(NamedTuple):
    """What was seen of a drafter in a class of requests. `promised`: accepted tokens that its confidences led to
    expect. `positions`: drafts that reached each position, and were accepted there. `greedy`, `sampled`: the same
    tokens by kind of request. `others`: the drafter's in all other classes."""

    all: DraftCounts
    promised: float
    positions: tuple[DraftCounts, ...] = ()
    greedy: DraftCounts = DraftCounts()
    sampled: DraftCounts = DraftCounts()
    others: DraftCounts = DraftCounts()


class LowAcceptance(NamedTuple):
    """A warning that is due: the most that the rate can be, the threshold, the likely cause."""

    upper: float
    threshold: float
    cause: Cause


def warning(sample: Sample, *, threshold: float = THRESHOLD) -> LowAcceptance | None:
    if sample.all.drafted < LEAST_DRAFTED:
        return None
    upper = upper_rate(sample.all)
    if upper >= threshold:
        return None
    return LowAcceptance(upper, threshold, _cause(sample, threshold))


def upper_rate(of: DraftCounts) -> float:
    """Return the upper end of the 95 % interval of the acceptance rate (Wilson's, which holds near 0 too)."""
    if not of.drafted:
        return 1.0
    n, rate, z2 = of.drafted, of.rate, _Z * _Z
    return (rate + z2 / (2 * n) + _Z * sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))) / (1 + z2 / n)


def _cause(sample: Sample, threshold: float) -> Cause:
    fares_well = max(threshold, _MUCH_BETTER * sample.all.rate)
    if sample.others.drafted >= LEAST_DRAFTED and sample.others.rate > fares_well:
        return Cause.ONE_CLASS
    if sample.all.accepted == 0 and sample.promised >= _SOME:
        return Cause.NOTHING_ACCEPTED
    if sample.sampled.drafted and sample.greedy.rate > max(threshold, _MUCH_BETTER * sample.sampled.rate):
        return Cause.SAMPLING
    if len(sample.positions) > 1:
        first, second = (position.rate for position in sample.positions[:2])
        if first >= threshold and second < _STEEP * first:
            return Cause.TOO_DEEP
    if sample.promised > max(_SOME, _OVERCONFIDENT * sample.all.accepted):
        return Cause.OVERCONFIDENT
    return Cause.HARD_TEXT
