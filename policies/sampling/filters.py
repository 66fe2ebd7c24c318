"""What min-p, top-k and top-p leave of a row, and what the filters behind them do.

A row is as long as the vocabulary. To make an array of that size anew can cost more than what is computed in it (its
memory comes from the system each time). So the mass of a row is taken by pieces, in place, and only candidates are
gathered and sorted.

Where a nucleus ends is defined by `_mass`. What is taken of a row first is an estimate that costs half as much, and
leaves it open whether a few tokens are in: `contenders`. Only where one of those would be chosen, `_mass` decides.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from policies.sampling.narrowing import narrow_tokens
from policies.sampling.params import NotDecided, Row, Sampling, finite_top, relative, scale_logits

# How far below the best candidates are looked for, in nats, before all are. Alone, a width decides nothing but how many
# are sorted. Over min-p it decides whose mass is reckoned with, which is the same but for rounding.
_WIDTHS = (8.0, 10.0, 12.0, 16.0)
# The same where min-p bounds the mass: fewer, as its floor is among them.
_WIDTHS_OVER_MIN_P = (4.0, 8.0, 16.0)
_ROUNDED = 1.0 + 1e-9  # above what the order of a sum may change
# Tokens of which the mass is taken at a time; another number would round otherwise. ADR 0038: 32 KB, which stay in the
# first cache.
_PIECE = 8192
# Tokens of which it is estimated at a time. ADR 0038: the estimate's error is bounded, so no choice depends on it.
_LARGE_PIECE = 24576
# Of these at a time are summed: of more, BLAS would make threads. ADR 0038. Bounded above by that.
_DOT = 8192
# What the two may be off together, as a share. In single precision a token's nats are off by at most 3e-7 of them, and
# their mean is below the logarithm of the vocabulary's size (an entropy is); a sum of _DOT by 5e-4, in the worst order.
_ESTIMATED = 1e-3
# Tokens that the best of them stands for. ADR 0038: no choice depends on it.
_GROUP = 64


def distribution(row: Row, sampling: Sampling, position: int) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Return what a sampled token is distributed as at a position: ids (shape (kept,)) and their probabilities, which
    sum to 1.

    The temperature must be above 0. Raises NotFinite.
    """
    top = finite_top(row)
    if sampling.unfiltered:
        ids = np.arange(len(row), dtype=np.uint32)
        nats = scale_logits(row, top, ids, sampling)
    else:
        ids, nats = narrow_row(row, sampling, position, top)
    shares = np.exp(nats)
    return ids, shares / shares.sum()


def narrow_row(
    row: Row, sampling: Sampling, position: int, top: float
) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Return the ids that survive all filters at a position, in the same order for the same row, and their nats, as
    `survivors`. The temperature must be above 0."""
    if sampling.cuts_nothing and sampling.typical_p >= 1.0:  # nothing is sorted in vain
        ids = _reaching(row, -math.inf)
        nats = scale_logits(row, top, ids, sampling)
    else:
        ids, nats = survivors(row, sampling, top)
    return narrow_tokens(ids, nats, sampling, position) if sampling.narrows else (ids, nats)


def survivors(row: Row, sampling: Sampling, top: float) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Return the ids that survive min-p, top-k and top-p, best first (the lower id first among equals). With them comes
    how far each of them is below `top`, the best logit, in nats. The temperature must be above 0."""
    ids, nats, sure = contenders(row, sampling, top)
    count = sure if sure == len(ids) else nucleus_size(row, sampling, top, nats)
    return ids[:count], nats[:count]


def contenders(row: Row, sampling: Sampling, top: float) -> tuple[NDArray[np.uint32], NDArray[np.float64], int]:
    """Return ids and nats that begin with the `survivors`, and how many of them are such for sure: no more than a few
    less than all. `nucleus_size` says how many are."""
    floor = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    if sampling.top_p < 1.0 and sampling.top_k == 0:
        return _nucleus(row, top, floor, sampling)
    low = top + floor * sampling.temperature
    if sampling.top_k == 0:
        ids = _best_first(row, low)
        return ids, scale_logits(row, top, ids, sampling), len(ids)
    ids = _best_first(row, max(low, _find_top_k_floor(row, sampling.top_k)))[: sampling.top_k]
    nats = scale_logits(row, top, ids, sampling)
    return (ids, nats, len(ids)) if sampling.top_p >= 1.0 else _cut_nucleus(ids, nats, sampling)


def contenders_of_best(
    row: Row, sampling: Sampling, top: float, mass: float
) -> tuple[NDArray[np.uint32], NDArray[np.float64], int]:
    """Return what `contenders` does, as places in the best logits of a row, which BestRow says more of. Raises
    NotDecided where there may be more than these."""
    if sampling.has_nucleus:
        nats = relative(row, top, sampling)
        steps, ends = np.add.accumulate(np.exp(nats)), sampling.top_p * mass
        last = int(steps.searchsorted(ends * (1.0 + _ESTIMATED)))
        if last == len(steps):
            raise NotDecided
        ids = np.arange(last + 1, dtype=np.uint32)
        return ids, nats[: last + 1], int(steps.searchsorted(ends * (1.0 - _ESTIMATED))) + 1
    if not sampling.top_k and row[-1] >= np.float32(top + math.log(sampling.min_p) * sampling.temperature):
        raise NotDecided
    return contenders(row, sampling, top)


def nucleus_size(row: Row, sampling: Sampling, top: float, nats: NDArray[np.float64]) -> int:
    """Return how many of the `contenders`, whose nats these are, survive."""
    wanted = sampling.top_p * _mass(row, top, -math.inf, sampling)
    return int(np.add.accumulate(np.exp(nats)).searchsorted(wanted)) + 1


def _nucleus(
    row: Row, top: float, floor: float, sampling: Sampling
) -> tuple[NDArray[np.uint32], NDArray[np.float64], int]:
    """Return the contenders of top-p, alone or behind min-p: of the whole vocabulary's mass, or of what min-p keeps."""
    widths: tuple[float, ...]
    if floor == -math.inf:
        widths, mass, error = _WIDTHS, _estimate_mass(row, top, sampling), _ESTIMATED
    else:
        widths, error = tuple(width for width in _WIDTHS_OVER_MIN_P if -width > floor), 0.0
        mass = _mass(row, top, floor, sampling) if widths else math.nan
    least, most = sampling.top_p * mass * (1.0 - error), sampling.top_p * mass * (1.0 + error)
    for width in widths:
        ids = _reaching(row, top - width * sampling.temperature)
        logits = row[ids]
        nats = relative(logits, top, sampling)
        shares = np.exp(nats)
        if float(np.add.reduce(shares)) * _ROUNDED < least:
            continue  # nothing is sorted in vain
        order = (-logits).argsort(kind="stable")
        steps = np.add.accumulate(shares[order])
        if steps[-1] < most and least < most:  # it may end here, or among the next
            least = most = sampling.top_p * _mass(row, top, floor, sampling)
        last = int(steps.searchsorted(most))
        if last < len(steps):
            order = order[: last + 1]
            return ids[order], nats[order], int(steps.searchsorted(least)) + 1
    ids = _best_first(row, top + floor * sampling.temperature)
    return _cut_nucleus(ids, scale_logits(row, top, ids, sampling), sampling)


def _cut_nucleus(
    ids: NDArray[np.uint32], nats: NDArray[np.float64], sampling: Sampling
) -> tuple[NDArray[np.uint32], NDArray[np.float64], int]:
    shares = np.exp(nats)
    within = np.cumsum(shares) >= sampling.top_p * float(shares.sum())
    count = int(within.argmax()) + 1 if within.any() else len(ids)
    return ids[:count], nats[:count], count


def _reaching(row: Row, low: float) -> NDArray[np.uint32]:
    """Return the ids of logits that are no less than `low`, ascending."""
    kept = (row >= np.float32(low) if math.isfinite(low) else row > -np.inf).nonzero()[0]
    return kept.astype(np.uint32)


def _best_first(row: Row, low: float) -> NDArray[np.uint32]:
    ids = _reaching(row, low)
    return ids[np.argsort(-row[ids], kind="stable")]


def _find_top_k_floor(row: Row, count: int) -> float:
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


def _estimate_mass(row: Row, top: float, sampling: Sampling) -> float:
    """Return `_mass` without min-p, but for _ESTIMATED of it."""
    best, scale = np.float32(top), np.float32(math.log2(math.e) / 2.0 / sampling.temperature)
    mass = 0.0
    for start in range(0, len(row), _LARGE_PIECE):
        roots = row[start : start + _LARGE_PIECE] - best
        roots *= scale
        np.exp2(roots, out=roots)
        for begin in range(0, len(roots), _DOT):
            some = roots[begin : begin + _DOT]
            mass += float(some.dot(some))
    return mass
