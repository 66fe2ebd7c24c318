"""The best logits of rows that lie in a host's memory, for whom the way of whole rows is long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adapters.contract import Logits

MOST_BEST = 128
"""Not tuned: the `top_k` that requests ask for are 20 to 64, and 128 logits with their ids take 1 KiB of a row."""
# How many parts of a row are looked at by their best alone, for each of the logits that are asked for. Not tuned.
_PARTS = 4


def find_best_logits(
    rows: Logits, count: int, temperatures: Sequence[float]
) -> tuple[Logits, NDArray[np.uint32], NDArray[np.float32]]:
    """Return what BestLogits has of rows, (rows, vocabulary): logits, ids, and masses. `temperatures`: at which those
    are asked for, 0.0 where they are not."""
    ids = np.stack([_find_best(row, count) for row in rows])
    logits = np.take_along_axis(rows, ids, axis=1)
    masses = [_sum_mass(row, own[0], at) for row, own, at in zip(rows, logits, temperatures, strict=True)]
    return logits, ids.astype(np.uint32), np.array(masses, np.float32)


def _find_best(row: Logits, count: int) -> NDArray[np.intp]:
    """Return the ids of a row's best logits. The best of `count` parts of the row are at least the floor: what is below
    it is not among them."""
    if count == 1:
        return np.array([row.argmax()])  # the first of equals, and NaN before all
    width = len(row) // (_PARTS * count)
    if width > 1:
        bests = np.maximum.reduceat(row, np.arange(0, len(row), width))
        if not np.isnan(bests).any():
            near = np.flatnonzero(row >= np.partition(bests, -count)[-count])
            return near[np.argsort(-row[near], kind="stable")[:count]]
    return np.argsort(-np.where(np.isnan(row), np.float32(np.inf), row), kind="stable")[:count]


def _sum_mass(row: Logits, best: np.float32, temperature: float) -> np.float32:
    if not temperature:
        return np.float32(0.0)
    with np.errstate(invalid="ignore"):  # of infinities, which are refused
        shares: Logits = row - best
        shares *= np.float32(1.0 / temperature)
        return np.float32(np.exp(shares, out=shares).sum())
