"""How many of a drafter's tokens are worth a row in the next verification.

A simple rule, priced with measured step costs: one more row costs about 6 % of a step where one sequence runs
alone and more where many share it, so a draft token is kept while the chance that it *and all before it* are
accepted is above that price. A row that exactness charges for anyway is free.
"""

from __future__ import annotations

from collections.abc import Sequence

# Cost of one more row, in tokens that the same time would have committed without it, by sequences in the batch.
# From the step costs in docs/benchmarks.md (2 cores, bf16); a later controller measures them itself.
_PRICE_BY_SEQUENCES = ((1, 0.18), (2, 0.24), (4, 0.35), (8, 0.45), (16, 0.55))


def price(sequences: int) -> float:
    """Return the least chance of acceptance that pays for a row, with `sequences` (>= 1) in the batch."""
    best = _PRICE_BY_SEQUENCES[0][1]
    for count, value in _PRICE_BY_SEQUENCES:
        if sequences >= count:
            best = value
    return best


def depth(confidences: Sequence[float], *, sequences: int, paid_rows: int, bound: int) -> int:
    """Return how many leading draft tokens to verify, at most `bound`.

    `confidences[i]` is the chance that draft i is accepted if all before it are. `paid_rows` rows are charged
    whatever is drafted, so the first `paid_rows - 1` drafts are free.
    """
    least = price(sequences)
    chance = 1.0
    for index, confidence in enumerate(confidences[:bound]):
        chance *= confidence
        if chance < least and index + 1 >= paid_rows:
            return index
    return min(len(confidences), bound)
