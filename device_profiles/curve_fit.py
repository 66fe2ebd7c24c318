"""Fits what a forward costs to what was measured: no cost below zero, and relative errors, of which few may be large.

A forward's time is linear in unknowns that are never negative: the first knot's cost, the cost that each next knot
adds, a sequence, a position. They are found by least squares under that constraint (Lawson and Hanson, Solving Least
Squares Problems, 1974, chapter 23). Each sample is divided by its time. The fit is repeated with Huber's weights, so
that a sample that was disturbed does not bend the curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from device_profiles.cost import US_PER_MS, StepCost

Floats = NDArray[np.float64]
# Of cross-validation, by which the form of a cost is chosen (ADR 0024).
_FOLDS = 5
_HUBER = 0.03
"""A relative error from which on a sample counts less. ADR 0024. Not tuned."""
_ROUNDS = 12  # of weights and costs in turn. Bounds time; not tuned.


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


@dataclass(frozen=True, slots=True)
class _Form:
    """What is known of a cost before its figures are (see StepCost)."""

    least_rows: int
    least_forward_rows: int
    serial: bool

    def rows(self, sample: StepSample) -> list[float]:
        rows = [float(max(count, self.least_rows)) for count in sample.rows]
        missing = self.least_forward_rows - sum(rows)
        return [count + max(0.0, missing) / len(rows) for count in rows]


def fit_steps(samples: Sequence[StepSample], least_rows: int = 1, least_forward_rows: int = 1) -> StepFit:
    """Return the cost that explains the samples best: of sequences that share a forward, or of those that are run one
    after another. Raises ValueError without samples."""
    if not samples:
        raise ValueError("there is nothing to fit")
    fits = [_cross_validate(samples, _Form(least_rows, least_forward_rows, serial)) for serial in (False, True)]
    return min(fits, key=lambda fit: fit.median_error)


def error_of(cost: StepCost, sample: StepSample) -> float:
    return abs(_predict_ms(cost, sample) - sample.ms) / sample.ms


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return x >= 0 that minimises |matrix x - target|, by Lawson and Hanson's active sets."""
    columns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(scale > 0.0, scale, 1.0)
    solution, free = np.zeros(columns), np.zeros(columns, bool)
    for _ in range(10 * columns):
        gradient = np.where(free, -np.inf, scaled.T @ (target - scaled @ solution))
        if free.all() or gradient.max() <= 1e-10:
            break
        free[int(gradient.argmax())] = True
        while True:
            wanted = np.zeros(columns)
            wanted[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            below = free & (wanted <= 0.0)
            if not below.any():
                break
            step = float((solution[below] / np.maximum(solution[below] - wanted[below], 1e-300)).min())
            solution = solution + step * (wanted - solution)
            free &= solution > 1e-12
            solution[~free] = 0.0
        solution = wanted
    return solution / np.where(scale > 0.0, scale, 1.0)


def _cross_validate(samples: Sequence[StepSample], form: _Form) -> StepFit:
    errors = [error for fold in range(min(_FOLDS, len(samples))) for error in _fold(samples, fold, form)]
    median, worst = (float(np.median(errors)), max(errors)) if errors else (0.0, 0.0)
    return StepFit(replace(_fit_cost(samples, form), error=median), median, worst)


def _fold(samples: Sequence[StepSample], fold: int, form: _Form) -> list[float]:
    unseen = [sample for index, sample in enumerate(samples) if index % _FOLDS == fold]
    seen = [sample for index, sample in enumerate(samples) if index % _FOLDS != fold]
    if not seen:
        return []
    cost = _fit_cost(seen, form)
    return [error_of(cost, sample) for sample in unseen]


def _fit_cost(samples: Sequence[StepSample], form: _Form) -> StepCost:
    knots = _knots(samples, form)
    features = np.array([_features(sample, knots, form) for sample in samples])
    times = np.array([sample.ms for sample in samples])
    costs = _robust(features / times[:, None])
    return StepCost(
        row_knots=tuple(knots),
        row_ms=tuple(float(value) for value in np.cumsum(costs[: len(knots)])),
        sequence_ms=float(costs[-3]),
        position_us=float(costs[-2]) * US_PER_MS,
        row_position_us=float(costs[-1]) * US_PER_MS,
        serial=form.serial,
        least_rows=form.least_rows,
        least_forward_rows=form.least_forward_rows,
    )


def _robust(features: Floats) -> Floats:
    """Fit features to ones."""
    weights = np.ones(len(features))
    costs = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        costs = nonnegative_least_squares(features * weights[:, None], weights)
        errors = np.abs(features @ costs - 1.0)
        weights = np.sqrt(np.minimum(1.0, _HUBER / np.maximum(errors, 1e-12)))
    return costs


def _knots(samples: Sequence[StepSample], form: _Form) -> list[float]:
    """Every number of rows that was measured in a single sequence, and the largest of all."""
    single = {sum(form.rows(sample)) for sample in samples if len(sample.rows) == 1}
    if not form.serial or not single:
        single.add(max(sum(form.rows(sample)) for sample in samples))
    return sorted(single)


def _features(sample: StepSample, knots: Sequence[float], form: _Form) -> list[float]:
    rows = form.rows(sample)
    calls = rows if form.serial else [sum(rows)]
    steps = [sum(_compute_step_share(call, knots, index) for call in calls) for index in range(len(knots))]
    pairs = sum(count * context for count, context in zip(rows, sample.contexts, strict=True))
    return [*steps, len(rows) - 1.0, float(sum(sample.contexts)), float(pairs)]


def _compute_step_share(rows: float, knots: Sequence[float], index: int) -> float:
    """Return how much of the step up to a knot so many rows take: 0 to 1, and more beyond the last one."""
    if index == 0:
        return 1.0
    share = (rows - knots[index - 1]) / (knots[index] - knots[index - 1])
    return max(0.0, share if index == len(knots) - 1 else min(1.0, share))


def _predict_ms(cost: StepCost, sample: StepSample) -> float:
    unknowns = [
        *np.diff(cost.row_ms, prepend=0.0),
        cost.sequence_ms,
        cost.position_us / US_PER_MS,
        cost.row_position_us / US_PER_MS,
    ]
    form = _Form(cost.least_rows, cost.least_forward_rows, cost.serial)
    return float(np.dot(unknowns, _features(sample, cost.row_knots, form)))
