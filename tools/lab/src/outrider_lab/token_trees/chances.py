"""How often candidates are right: learned from some outputs, applied to others, alike for chains and trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from outrider_lab.token_trees.shapes import NO_PARENT, Candidate

_PRIOR_WEIGHT = 8.0
_MOST_CERTAIN = 0.985
_BINS = 12

Bucket = tuple[int, ...]


def list_buckets(candidate: Candidate) -> Iterator[Bucket]:
    """Yield what a candidate is counted under, the coarsest first."""
    rank, own = min(candidate.rank, 3), min(int(candidate.raw * _BINS), _BINS - 1)
    yield rank, own
    yield rank, own, min(candidate.match, 10)
    yield rank, own, min(candidate.match, 10), min(candidate.depth, 2)


class Calibration:
    """Chances by rank, share of votes, length of match and depth. Each count is blended with the coarser
    one."""

    def __init__(self, seen: Iterable[tuple[Sequence[Candidate], Sequence[int]]]) -> None:
        """`seen`: candidates, and what the target went on with there."""
        self._right: Counter[Bucket] = Counter()
        self._all: Counter[Bucket] = Counter()
        for candidates, tokens in seen:
            self._count(candidates, tokens)

    def _count(self, candidates: Sequence[Candidate], tokens: Sequence[int]) -> None:
        on_path = {NO_PARENT}
        for index, candidate in enumerate(candidates):
            if candidate.parent not in on_path or candidate.depth >= len(tokens):
                continue
            right = tokens[candidate.depth] == candidate.token
            if right:
                on_path.add(index)
            for bucket in list_buckets(candidate):
                self._all[bucket] += 1
                self._right[bucket] += right

    def estimate(self, candidate: Candidate) -> float:
        """Return the chance that a candidate is accepted if all before it are."""
        chance = candidate.raw
        for bucket in list_buckets(candidate):
            chance = (self._right[bucket] + _PRIOR_WEIGHT * chance) / (self._all[bucket] + _PRIOR_WEIGHT)
        return min(chance, _MOST_CERTAIN)
