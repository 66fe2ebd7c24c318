"""Which of the compiled widths a number of rows is run with, and which widths compute the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint32]


class Cover:
    """Covers rows with the cheapest widths; `cost_ms` is what a forward of each width takes (measured at load)."""

    def __init__(self, cost_ms: Mapping[int, float]) -> None:
        self._cost_ms = dict(cost_ms)
        self._best: list[tuple[float, int]] = [(0.0, 0)]  # for so many rows: the cost, and the width to begin with

    @property
    def widths(self) -> tuple[int, ...]:
        """All widths, in ascending order."""
        return tuple(sorted(self._cost_ms))

    def of(self, rows: int) -> list[int]:
        """Return the widths of the forwards that `rows` rows are run in, widest first; only the last has padding."""
        while len(self._best) <= rows:
            count = len(self._best)
            self._best.append(
                min((self._best[max(0, count - width)][0] + cost, width) for width, cost in self._cost_ms.items())
            )
        chosen = []
        while rows > 0:
            chosen.append(self._best[rows][1])
            rows -= chosen[-1]
        return sorted(chosen, reverse=True)


def agreeing(runs_by_width: Mapping[int, Sequence[Bits]], prefill: int) -> tuple[int, ...]:
    """Return the widths whose rows are the same to the bit: the largest such set, one with `prefill` where two are as
    large, in ascending order.

    `found[width]`: the rows of one text, computed by this width with each row at several places of the forward. A width
    that does not agree with itself is in no set; () when there is none.
    """
    steady = {
        width: runs[0] for width, runs in runs_by_width.items() if all(np.array_equal(runs[0], run) for run in runs)
    }
    classes: list[list[int]] = []
    for width, rows in steady.items():
        for known in classes:
            if np.array_equal(steady[known[0]], rows):
                known.append(width)
                break
        else:
            classes.append([width])
    best = max(classes, key=lambda widths: (len(widths), prefill in widths), default=[])
    return tuple(sorted(best))


def list_starts(length: int, count: int, width: int) -> list[tuple[int, ...]]:
    """Return where forwards of `width` may begin. The last `count` rows of a text of `length` must stand at other
    places of them each time. The last forward ends with the text."""
    begins = {length - count, max(0, length - width), max(0, length - max(count, width // 2))}
    cuts = [(begin, *range(begin + width, length, width)) for begin in sorted(begins) if begin <= length - count]
    for first in {max(1, width // 2), max(1, width - 1)} - {width}:
        begin = length - count
        cuts.append((begin, *range(begin + first, length, width)))
    return cuts
