"""Quantised values in signed 8 bits, without offsets: what every runtime here multiplies fastest and exactly.

A block of Q4_1, Q4_K or Q5_x holds q * d + m: an offset m that is no whole number of steps d. With a scale of d / k
each step is k whole units, and only m is rounded, to a unit. Of all k that fit into 8 bits the one is taken whose
largest error is the smallest. Measured over the default model: docs/adr/0041-the-files-weights.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.spec import Grouped

# Values that share a scale, as in GGUF's blocks. ADR 0041: 8 bits keep 97 % of choices so.
GROUP_SIZE = 32
MIDDLE = 128  # the zero of unsigned 8-bit values
# A step of 4 bits takes at most 17 units; a group of few distinct values may take more. ADR 0041.
_MOST_UNITS = 24
_LOWEST, _HIGHEST = -128, 127  # the range of 8 bits

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


def requantise(values: Floats) -> Grouped:
    """Quantise (rows, columns) to 8 bits, symmetric, with the largest magnitude of a group of 32 at 127."""
    groups = values.reshape(len(values), -1, GROUP_SIZE)
    return _build_grouped(values.shape, *_round_groups(groups, _symmetric(groups)))


def in_8_bits(values: Floats) -> Grouped:
    """Quantise (rows, columns) that lie on a lattice of their own in each group of 32, keeping the lattice.

    A group for which that is no nearer (two lattices in one group, values far from 0) is quantised as `requantise`
    does: at most 1/254 of its largest magnitude off.
    """
    groups = values.reshape(len(values), -1, GROUP_SIZE)
    plain, scales = _symmetric(groups), _lattice(groups)
    on_lattice, coarse = _round_groups(groups, scales), _round_groups(groups, plain)
    nearer = _largest_error(groups, *on_lattice) <= _largest_error(groups, *coarse)
    chosen = np.where(nearer[..., None], on_lattice[0], coarse[0])
    return _build_grouped(values.shape, chosen, np.where(nearer, scales, plain))


def with_whole_zeros(values: Floats) -> Grouped:
    """Quantise (rows, columns) that lie on lattices of at most 16 values to 4 bits.

    Each offset is rounded to a whole number of steps. A value is half a step off at most where 0 lies within a group's
    values or a step beside them.
    """
    groups = values.reshape(len(values), -1, GROUP_SIZE)
    step, low, _ = _step(groups)
    single = step == 0  # a group of one value: 1 * value
    scales = np.where(single, low, step).astype(np.float16)
    divisor = np.where(step == 0, np.float32(1), step)
    zeros = np.where(single, 0, np.clip(np.rint(-low / divisor), 0, 15))
    units = np.where(single[..., None], 1, np.clip(np.rint((groups - low[..., None]) / divisor[..., None]), 0, 15))
    return Grouped(units.astype(np.uint8).reshape(values.shape), scales, zeros.astype(np.uint8), 4, GROUP_SIZE)


def _build_grouped(shape: tuple[int, ...], units: NDArray[np.float32], scales: Halves) -> Grouped:
    stored = (units + MIDDLE).astype(np.uint8).reshape(shape)
    return Grouped(stored, scales, np.full(scales.shape, MIDDLE, np.uint8), 8, GROUP_SIZE)


def _symmetric(groups: Floats) -> Halves:
    return np.asarray((np.abs(groups).max(axis=2) / 127.0).astype(np.float16))


def _round_groups(groups: Floats, scales: Halves) -> tuple[Floats, Halves]:
    divisor = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
    return np.clip(np.rint(groups / divisor[..., None]), _LOWEST, _HIGHEST), scales


def _largest_error(groups: Floats, units: Floats, scales: Halves) -> Floats:
    return np.asarray(np.abs(units * scales.astype(np.float32)[..., None] - groups).max(axis=2))


def _lattice(groups: Floats) -> Halves:
    """Return for each group the scale, a whole fraction of its step, that puts its ends nearest to whole units.

    Between the ends the error changes linearly, so they are where it is largest.
    """
    step, low, high = _step(groups)
    best = _symmetric(groups)
    least = np.full(best.shape, np.inf, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        for units in range(1, _MOST_UNITS + 1):
            scales = (step / np.float32(units)).astype(np.float16)
            wide = scales.astype(np.float32)
            at_low, at_high = np.rint(low / wide), np.rint(high / wide)
            error = np.maximum(np.abs(at_low * wide - low), np.abs(at_high * wide - high))
            better = (at_low >= _LOWEST) & (at_high <= _HIGHEST) & (error < least)
            best, least = np.where(better, scales, best), np.where(better, error, least)
    return best


def _step(groups: Floats) -> tuple[Floats, Floats, Floats]:
    """Return each group's step, lowest and highest value. The step is the smallest difference of two values, made
    exact by their range: it is a whole number of steps. 0 where all values are one."""
    ordered = np.sort(groups, axis=2)
    low, high = ordered[..., 0], ordered[..., -1]
    span = high - low
    apart = np.diff(ordered, axis=2)
    apart[apart <= np.maximum(np.abs(low), np.abs(high))[..., None] * np.float32(1e-5)] = np.inf  # rounding
    smallest = apart.min(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.rint(span / smallest)
        return np.where(steps > 0, span / steps, np.float32(0)), low, high
