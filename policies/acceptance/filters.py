"""What min-p, top-k and top-p leave of a row.

A row is as long as the vocabulary, and an array of that size that is made anew can cost more than what is computed in
it (its memory comes from the system each time). So the mass of a row is taken by pieces, in place, and only candidates
are gathered and sorted.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from policies.acceptance.sampling import Row, Sampling, finite_top, scaled

# How far below the best candidates are looked for, in nats, before all are. Alone, a width decides nothing but how many
# are sorted. Over min-p it decides whose mass is reckoned with, which is the same but for rounding.
_WIDTHS = (8.0, 10.0, 12.0, 16.0)
_WIDTHS_OVER_MIN_P = (4.0, 8.0, 16.0)
_ROUNDED = 1.0 + 1e-9  # above what the order of a sum may change
_PIECE = 8192  # tokens of which the mass is taken at a time
_GROUP = 64  # tokens that the best of them stands for


def distribution(row: Row, sampling: Sampling) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Return what a sampled token is distributed as: ids (shape (kept,)) and their probabilities, which sum to 1.

    The temperature must be above 0. Raises NotFinite.
    """
    top = finite_top(row)
    ids = np.arange(len(row), dtype=np.uint32) if sampling.unfiltered else filtered(row, sampling, top)
    shares = np.exp(scaled(row, top, ids, sampling))
    return ids, shares / shares.sum()


def filtered(row: Row, sampling: Sampling, top: float | None = None) -> NDArray[np.uint32]:
    """Return the ids that survive min-p, top-k and top-p, best first (the lower id first among equals).

    `top` is the row's best logit, where that is known. The temperature must be above 0.
    """
    top = float(row.max()) if top is None else top
    floor = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    if sampling.top_p < 1.0 and sampling.top_k == 0:
        return _nucleus(row, top, floor, sampling)
    low = top + floor * sampling.temperature
    if sampling.top_k == 0:
        return _best_first(row, low)
    ids = _best_first(row, max(low, _reached(row, sampling.top_k)))[: sampling.top_k]
    return ids if sampling.top_p >= 1.0 else _cut(row, top, ids, sampling)


def _nucleus(row: Row, top: float, floor: float, sampling: Sampling) -> NDArray[np.uint32]:
    """Return what top-p leaves, alone or behind min-p: of the whole vocabulary's mass, or of what min-p keeps."""
    widths = _WIDTHS if floor == -math.inf else tuple(width for width in _WIDTHS_OVER_MIN_P if -width > floor)
    wanted = sampling.top_p * _mass(row, top, floor, sampling) if widths else math.nan
    for width in widths:
        ids = _reaching(row, top - width * sampling.temperature)
        shares = np.exp(scaled(row, top, ids, sampling))
        if float(shares.sum()) * _ROUNDED < wanted:
            continue  # nothing is sorted in vain
        order = np.argsort(-row[ids], kind="stable")
        within = np.cumsum(shares[order]) >= wanted
        last = int(within.argmax())
        if within[last]:
            return ids[order[: last + 1]]
    return _cut(row, top, _best_first(row, top + floor * sampling.temperature), sampling)


def _cut(row: Row, top: float, ids: NDArray[np.uint32], sampling: Sampling) -> NDArray[np.uint32]:
    """Return the nucleus of some ids, best first."""
    shares = np.exp(scaled(row, top, ids, sampling))
    within = np.cumsum(shares) >= sampling.top_p * float(shares.sum())
    return ids[: int(within.argmax()) + 1] if within.any() else ids


def _reaching(row: Row, low: float) -> NDArray[np.uint32]:
    """Return the ids of logits that are no less than `low`, ascending."""
    found = np.flatnonzero(row >= np.float32(low) if math.isfinite(low) else row > -np.inf)
    return found.astype(np.uint32)


def _best_first(row: Row, low: float) -> NDArray[np.uint32]:
    ids = _reaching(row, low)
    return ids[np.argsort(-row[ids], kind="stable")]


def _reached(row: Row, count: int) -> float:
    """Return a logit that at least `count` tokens reach, and few more; -inf where there are not as many."""
    groups = len(row) // _GROUP
    if count <= groups // 4:  # the best of each group is another token; few of the best share a group
        row = row[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    return float(np.partition(row, -count)[-count]) if count <= len(row) else -math.inf


def _mass(row: Row, top: float, floor: float, sampling: Sampling) -> float:
    """Return what the shares of all tokens that min-p keeps come to; the best token's is 1."""
    best, temperature = np.float32(top), np.float32(sampling.temperature)
    mass = 0.0
    for start in range(0, len(row), _PIECE):
        shares = row[start : start + _PIECE] - best
        shares /= temperature
        kept = shares >= floor if floor > -math.inf else None
        np.exp(shares, out=shares)
        mass += float((shares if kept is None else shares[kept]).sum(dtype=np.float64))
    return mass
