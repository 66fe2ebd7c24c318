"""Fits find what a device costs again, from few samples, some of them disturbed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_profiles.cost import StepCost
from device_profiles.curve_fit import StepSample, error_of, fit_steps, nonnegative_least_squares

SHAPES = [
    *((1, rows, 16) for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)),
    *((1, rows, 2000) for rows in (1, 4, 8, 16)),
    *((2, rows, 100) for rows in (1, 3)),
    *((4, rows, context) for rows in (1, 2, 5) for context in (16, 800)),
    *((8, rows, context) for rows in (1, 4) for context in (16, 500)),
    *((16, rows, context) for rows in (1, 2) for context in (16, 300)),
]
"""Sequences, rows of each, positions before each."""

costs = st.builds(
    lambda first, row, bend, sequence, position, pair, serial: StepCost(
        (1.0, 8.0, 16.0, 32.0),
        (first, first + 7 * row, first + 7 * row + 8 * bend, first + 7 * row + 24 * bend),
        sequence_ms=sequence,
        position_us=position,
        row_position_us=pair,
        serial=serial,
    ),
    st.floats(1.0, 50.0),
    st.floats(0.05, 3.0),
    st.floats(0.05, 3.0),
    st.floats(0.0, 2.0),
    st.floats(0.0, 2.0),
    st.floats(0.0, 1.0),
    st.booleans(),
)


def sample_costs(cost, factors):
    samples = []
    for (sequences, rows, context), factor in zip(SHAPES, factors, strict=True):
        ms = cost.ms(sequences * rows, sequences, context)
        samples.append(StepSample((rows,) * sequences, (context,) * sequences, ms * factor))
    return samples


@settings(max_examples=12, deadline=None)
@given(costs)
def test_a_cost_is_found_again(cost):
    fit = fit_steps(sample_costs(cost, [1.0] * len(SHAPES)))
    for sample in sample_costs(cost, [1.0] * len(SHAPES)):
        assert error_of(fit.cost, sample) < 0.06


@settings(max_examples=12, deadline=None)
@given(costs, st.integers(0, 2**32 - 1))
def test_noise_and_disturbed_samples_bend_it_little(cost, seed):
    rng = np.random.default_rng(seed)
    factors = 1.0 + 0.02 * rng.standard_normal(len(SHAPES))
    factors[int(rng.integers(len(SHAPES) - 10)) + 10] = 2.0  # somebody else had the cores
    fit = fit_steps(sample_costs(cost, factors))
    errors = [error_of(fit.cost, sample) for sample in sample_costs(cost, [1.0] * len(SHAPES))]
    assert float(np.median(errors)) < 0.05
    assert fit.cost.error == fit.median_error < 0.2


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(0.01, 1000.0), min_size=len(SHAPES), max_size=len(SHAPES)),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(0, 4000),
)
def test_whatever_was_measured_more_work_is_never_cheaper(times, rows, sequences, context):
    samples = [
        StepSample((count,) * many, (before,) * many, ms)
        for (many, count, before), ms in zip(SHAPES, times, strict=True)
    ]
    cost = fit_steps(samples).cost
    now = cost.ms(rows * sequences, sequences, context)
    assert now >= 0.0
    slack = 1e-9 * (1.0 + now)
    assert cost.ms((rows + 1) * sequences, sequences, context) >= now - slack
    assert cost.ms(rows * (sequences + 1), sequences + 1, context) >= now - slack
    assert cost.ms(rows * sequences, sequences, context + 100) >= now - slack


def test_sequences_that_run_one_after_another_are_recognised():
    serial = StepCost((1.0, 2.0, 8.0, 32.0), (5.0, 5.2, 13.0, 45.0), serial=True)
    cost = fit_steps(sample_costs(serial, [1.0] * len(SHAPES))).cost
    assert cost.serial
    assert cost.ms(16, 8, 16) == pytest.approx(8 * 5.2, rel=0.02)


def test_rows_that_only_fill_up_are_paid_for():
    padded = [StepSample((rows,), (0,), 10.0 + max(rows, 2)) for rows in (1, 2, 4, 8)]
    padded += [StepSample((1,) * 4, (0,) * 4, 18.0), StepSample((2,) * 4, (0,) * 4, 18.0)]
    cost = fit_steps(padded, least_rows=2).cost
    assert cost.ms(4, 4) == cost.ms(8, 4) == pytest.approx(18.0, rel=0.01)


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="nothing to fit"):
        fit_steps([])


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(6, 20))
def test_least_squares_below_no_zero_is_optimal(seed, columns, rows):
    """No direction that is allowed leads further down (the conditions of Karush, Kuhn and Tucker)."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.standard_normal((rows, columns)), rng.standard_normal(rows)
    solution = nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ solution - target)
    assert (solution >= 0.0).all()
    assert (gradient >= -1e-6).all()
    assert abs(float(gradient @ solution)) < 1e-6
