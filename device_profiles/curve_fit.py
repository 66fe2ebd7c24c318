"""Fits what a forward costs to what was measured: no cost below zero, and relative errors, of which few may be large.

A forward's time is linear in unknowns that are never negative (what the first knot costs, what each next knot adds,
a sequence, a position): least squares under that constraint (Lawson and Hanson, Solving Least Squares Problems, 1974,
chapter 23), each sample divided by its time, repeated with Huber's weights so that a sample that was disturbed does not
bend the curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from device_profiles.cost import US_PER_MS, StepCost

Floats = NDArray[np.float64]
_FOLDS = 5
_HUBER = 0.03
"""A relative error from which on a sample counts less."""
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class StepSample:
    """One forward that was measured. `rows` and `contexts`: of each of its sequences, the rows that it ran and the
    positions that it held before."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    ms: float


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted cost, and its relative errors on samples that it did not see: the median (also `cost.error`) and the
    largest."""

    cost: StepCost
    median_error: float
    worst_error: float


def fit_steps(samples: Sequence[StepSample], least_rows: int = 1) -> StepFit:
    """Return the cost that explains the samples best: of sequences that share a forward, or of those that are run one
    after another. Raises ValueError without samples."""
    if not samples:
        raise ValueError("there is nothing to fit")
    fits = [_validated(samples, least_rows, serial) for serial in (False, True)]
    return min(fits, key=lambda fit: fit.median_error)


def error_of(cost: StepCost, sample: StepSample) -> float:
    """Return how far a prediction is from a sample, as a share of the sample."""
    return abs(_predicted(cost, sample) - sample.ms) / sample.ms


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return x >= 0 that minimises |matrix x - target|, by Lawson and Hanson's active sets."""
    columns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(scale > 0.0, scale, 1.0)
    found, free = np.zeros(columns), np.zeros(columns, bool)
    for _ in range(10 * columns):
        gradient = np.where(free, -np.inf, scaled.T @ (target - scaled @ found))
        if free.all() or gradient.max() <= 1e-10:
            break
        free[int(gradient.argmax())] = True
        while True:
            wanted = np.zeros(columns)
            wanted[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            below = free & (wanted <= 0.0)
            if not below.any():
                break
            step = float((found[below] / np.maximum(found[below] - wanted[below], 1e-300)).min())
            found = found + step * (wanted - found)
            free &= found > 1e-12
            found[~free] = 0.0
        found = wanted
    return found / np.where(scale > 0.0, scale, 1.0)


def _validated(samples: Sequence[StepSample], least_rows: int, serial: bool) -> StepFit:
    errors = [error for fold in range(min(_FOLDS, len(samples))) for error in _fold(samples, fold, least_rows, serial)]
    median, worst = (float(np.median(errors)), max(errors)) if errors else (0.0, 0.0)
    return StepFit(replace(_fitted(samples, least_rows, serial), error=median), median, worst)


def _fold(samples: Sequence[StepSample], fold: int, least_rows: int, serial: bool) -> list[float]:
    """Return the errors on a fifth of the samples, of a fit over the others."""
    unseen = [sample for index, sample in enumerate(samples) if index % _FOLDS == fold]
    seen = [sample for index, sample in enumerate(samples) if index % _FOLDS != fold]
    if not seen:
        return []
    cost = _fitted(seen, least_rows, serial)
    return [error_of(cost, sample) for sample in unseen]


def _fitted(samples: Sequence[StepSample], least_rows: int, serial: bool) -> StepCost:
    knots = _knots(samples, least_rows, serial)
    features = np.array([_features(sample, knots, least_rows, serial) for sample in samples])
    times = np.array([sample.ms for sample in samples])
    found = _robust(features / times[:, None])
    ms = np.cumsum(found[: len(knots)])
    return StepCost(
        row_knots=tuple(knots),
        row_ms=tuple(float(value) for value in ms),
        sequence_ms=float(found[-3]),
        position_us=float(found[-2]) * US_PER_MS,
        row_position_us=float(found[-1]) * US_PER_MS,
        serial=serial,
        least_rows=least_rows,
    )


def _robust(features: Floats) -> Floats:
    """Fit features to ones."""
    weights = np.ones(len(features))
    found = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        found = nonnegative_least_squares(features * weights[:, None], weights)
        errors = np.abs(features @ found - 1.0)
        weights = np.sqrt(np.minimum(1.0, _HUBER / np.maximum(errors, 1e-12)))
    return found


def _knots(samples: Sequence[StepSample], least_rows: int, serial: bool) -> list[float]:
    """Every number of rows that was measured in a single sequence, and the largest of all."""
    single = {float(max(sample.rows[0], least_rows)) for sample in samples if len(sample.rows) == 1}
    if not serial or not single:
        single.add(float(max(sum(max(rows, least_rows) for rows in sample.rows) for sample in samples)))
    return sorted(single)


def _features(sample: StepSample, knots: Sequence[float], least_rows: int, serial: bool) -> list[float]:
    rows = [max(count, least_rows) for count in sample.rows]
    calls = rows if serial else [sum(rows)]
    steps = [sum(_reached(call, knots, index) for call in calls) for index in range(len(knots))]
    pairs = sum(count * context for count, context in zip(rows, sample.contexts, strict=True))
    return [*steps, len(rows) - 1.0, float(sum(sample.contexts)), float(pairs)]


def _reached(rows: float, knots: Sequence[float], index: int) -> float:
    """Return how much of the step up to a knot so many rows take: 0 to 1, and more beyond the last one."""
    if index == 0:
        return 1.0
    share = (rows - knots[index - 1]) / (knots[index] - knots[index - 1])
    return max(0.0, share if index == len(knots) - 1 else min(1.0, share))


def _predicted(cost: StepCost, sample: StepSample) -> float:
    knots = cost.row_knots
    ms = np.diff(cost.row_ms, prepend=0.0)
    unknowns = [*ms, cost.sequence_ms, cost.position_us / US_PER_MS, cost.row_position_us / US_PER_MS]
    features = _features(sample, knots, cost.least_rows, cost.serial)
    return float(np.dot(unknowns, features))
