"""How many of a drafter's tokens are worth a row in the next verification.

A simple rule, with a price that was measured once and for all: a draft token is kept while the chance that it *and all
before it* are accepted is above the price of one more row, which is higher where many sequences share a forward. A row
that exactness charges for anyway is free.
"""

from __future__ import annotations

from collections.abc import Sequence

# The least chance of acceptance that pays for one more row, by sequences in the batch: found by decoding real prompts
# at several prices in one run (docs/benchmarks.md; 2 cores, bf16). policies/goodput takes them from measured costs.
_PRICE_BY_SEQUENCES = ((1, 0.45), (8, 0.50), (16, 0.55))


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
