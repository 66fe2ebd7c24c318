"""Step costs that are corrected by what rounds really take."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.cost import StepCost
from policies.speculation.cost_model import KNOWN_ROUNDS, TYPICAL, observe_forward, start_cost_model

FIT = StepCost((1.0, 2.0, 8.0, 32.0, 128.0), (7.3, 7.7, 10.9, 27.0, 95.0), 0.25, 2.0, 0.05)
SERIAL = replace(FIT, serial=True)
PADDED = replace(FIT, least_rows=2, least_forward_rows=8)
ROWS = st.integers(1, 200)


@given(ROWS, st.integers(1, 16), st.floats(0.0, 4000.0))
def test_before_any_round_it_is_the_fit(rows, sequences, context):
    for fit in (FIT, SERIAL, PADDED):
        cost = start_cost_model(fit)
        assert cost.ms(rows, sequences, context) == pytest.approx(fit.ms(rows, sequences, context), rel=0.02)
    assert start_cost_model(FIT).ms(rows, sequences, context) == pytest.approx(FIT.ms(rows, sequences, context))
    cost = start_cost_model(FIT)
    assert cost.ms(400) == pytest.approx(FIT.ms(400), rel=0.05)  # beyond the table


@given(st.integers(1, 300), st.integers(0, 40), st.floats(0.0, 4000.0))
def test_added_rows_add_up(rows, count, context):
    for fit in (FIT, SERIAL, PADDED):
        cost = start_cost_model(fit)
        added = cost.estimate_added_ms(rows, count, 4, context)
        assert len(added) == count
        assert sum(added) == pytest.approx(cost.ms(rows + count, 4, context) - cost.ms(rows, 4, context))
        assert all(ms >= cost.least_added_ms(rows) - 1e-9 for ms in added)


@given(st.floats(0.1, 10.0), st.lists(ROWS, min_size=1, max_size=40))
def test_a_slower_machine_is_known_after_one_round(factor, visited):
    for fit in (FIT, SERIAL, PADDED):
        cost = start_cost_model(fit)
        for rows in visited:
            cost = observe_forward(cost, factor * fit.ms(rows, 2, 100.0), rows=rows, sequences=2, context_tokens=100.0)
            assert cost.ms(rows, 2, 100.0) == pytest.approx(factor * fit.ms(rows, 2, 100.0), rel=0.03)


@given(st.lists(st.tuples(ROWS, st.floats(0.01, 1000.0)), max_size=120))
def test_whatever_rounds_take_more_rows_never_cost_less(rounds):
    cost = start_cost_model(FIT)
    for rows, ms in rounds:
        cost = observe_forward(cost, ms, rows=rows, sequences=1, context_tokens=0.0)
    times = [cost.ms(rows) for rows in range(1, 200)]
    assert all(left <= right for left, right in pairwise(times))
    assert times[0] > 0.0


@given(st.integers(20, 200), st.floats(5.0, 100.0))
def test_a_single_slow_round_teaches_little(rounds, factor):
    cost = start_cost_model(FIT)
    for _ in range(rounds):
        cost = observe_forward(cost, FIT.ms(4), rows=4, sequences=1, context_tokens=0.0)
    cost = observe_forward(cost, factor * FIT.ms(4), rows=4, sequences=1, context_tokens=0.0)
    assert cost.ms(4) < 1.05 * FIT.ms(4)


def test_a_fit_that_is_wrong_for_many_rows_is_bent():
    """What 32 rows cost here is not what the fit says, while 2 rows cost what it says."""
    cost = start_cost_model(FIT)
    for _ in range(300):
        cost = observe_forward(cost, FIT.ms(2), rows=2, sequences=1, context_tokens=0.0)
        cost = observe_forward(cost, 1.6 * FIT.ms(32), rows=32, sequences=1, context_tokens=0.0)
    assert cost.ms(2) == pytest.approx(FIT.ms(2), rel=0.08)
    assert cost.ms(32) == pytest.approx(1.6 * FIT.ms(32), rel=0.08)


def test_a_step_between_two_numbers_of_rows_is_found():
    """Rows 3 and 4 take another pass of a kernel, which the fit does not know."""
    cost = start_cost_model(FIT)
    true_ms = {rows: FIT.ms(rows) * (1.15 if rows > 2 else 1.0) for rows in (1, 2, 3, 4, 8)}
    for _ in range(60):
        for rows in (2, 2, 2, 2, 3, 4):
            cost = observe_forward(cost, true_ms[rows], rows=rows, sequences=1, context_tokens=0.0)
    step_ms = true_ms[3] - true_ms[2]
    assert cost.estimate_added_ms(2, 1)[0] == pytest.approx(step_ms, rel=0.35)
    assert cost.estimate_added_ms(2, 1)[0] > 2.0 * (FIT.ms(3) - FIT.ms(2))


@given(st.floats(0.5, 0.9), st.integers(1, 16))
def test_a_number_of_rows_that_is_always_run_does_not_stand_for_all(factor, rows):
    """A machine that slows down slows all rows down."""
    cost = start_cost_model(FIT)
    for number in range(600):
        pace = factor if number < 300 else 1.0
        cost = observe_forward(cost, pace * FIT.ms(rows), rows=rows, sequences=1, context_tokens=0.0)
    added_ms = sum(cost.estimate_added_ms(rows, 4))
    assert added_ms == pytest.approx(FIT.ms(rows + 4) - FIT.ms(rows), rel=0.45)


def test_without_a_fit_a_typical_shape_is_scaled():
    cost = observe_forward(start_cost_model(TYPICAL), 20.0, rows=1, sequences=1, context_tokens=0.0)
    assert cost.ms(1) == pytest.approx(20.0)
    assert cost.ms(8) == pytest.approx(30.0)


@given(st.floats(1.5, 4.0), st.booleans(), st.lists(ROWS, min_size=60, max_size=60))
def test_a_machine_that_turns_is_followed_within_twelve_rounds(factor, faster, visited):
    factor = 1.0 / factor if faster else factor
    cost = start_cost_model(FIT)
    for number, rows in enumerate(visited):
        took_ms = FIT.ms(rows) * (factor if number >= 48 else 1.0)
        cost = observe_forward(cost, took_ms, rows=rows, sequences=1, context_tokens=0.0)
    assert cost.ms(visited[-1]) == pytest.approx(factor * FIT.ms(visited[-1]), rel=0.2)


@given(st.randoms(use_true_random=False))
def test_rounds_that_others_disturb_are_no_turn(draw):
    cost = start_cost_model(FIT)
    for _ in range(200):  # a third of rounds take twice as long
        ms = FIT.ms(4) * (2.0 if draw.random() < 0.33 else 1.0)
        cost = observe_forward(cost, ms, rows=4, sequences=1, context_tokens=0.0)
        assert FIT.ms(4) * 0.8 <= cost.ms(4) <= FIT.ms(4) * 2.3


@given(st.floats(1.0, 1.6), st.lists(st.integers(1, 12), min_size=60, max_size=120))
def test_a_draft_model_that_slows_forwards_does_not_make_plain_ones_seem_dear(factor, visited):
    cost = start_cost_model(FIT)
    for _ in range(KNOWN_ROUNDS):
        assert not cost.known
        cost = observe_forward(cost, FIT.ms(1), rows=1, sequences=1, context_tokens=0.0, plain=True)
    assert cost.known
    for rows in visited:
        cost = observe_forward(cost, factor * FIT.ms(rows), rows=rows, sequences=1, context_tokens=0.0, slowed=True)
    assert cost.slowdown == pytest.approx(factor, rel=0.2)
    assert cost.ms(1) == pytest.approx(FIT.ms(1), rel=0.2)
    faster = observe_forward(cost, FIT.ms(4) / 2, rows=4, sequences=1, context_tokens=0.0, slowed=True)
    assert faster.slowdown <= cost.slowdown


def test_where_even_drafted_rounds_take_less_plain_ones_do_too():
    cost = start_cost_model(FIT)
    for _ in range(KNOWN_ROUNDS):
        cost = observe_forward(cost, FIT.ms(1), rows=1, sequences=1, context_tokens=0.0, plain=True)
    for _ in range(60):  # the batch became smaller, or other programs went
        cost = observe_forward(cost, FIT.ms(4) / 2, rows=4, sequences=1, context_tokens=0.0, slowed=True)
    assert cost.slowdown == pytest.approx(1.0, abs=0.06)
    assert cost.ms(1) == pytest.approx(FIT.ms(1) / 2, rel=0.1)
