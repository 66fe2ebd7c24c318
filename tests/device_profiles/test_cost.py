"""What a forward costs, and what a round is expected to yield."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.cost import StepCost, estimate_round_tokens
from device_profiles.link import LinkProfile

times = st.floats(0.1, 100.0)
costs = st.builds(
    lambda first, steps, sequence, position, pair: StepCost(
        tuple(float(2**index) for index in range(len(steps) + 1)),
        tuple(first + sum(steps[:index]) for index in range(len(steps) + 1)),
        sequence,
        position,
        pair,
    ),
    times,
    st.lists(times, min_size=0, max_size=6),
    times,
    times,
    st.floats(0.0, 1.0),
)


@given(costs, st.integers(1, 200), st.integers(1, 16), st.integers(0, 4096))
def test_more_work_never_costs_less(cost, rows, sequences, context):
    now = cost.ms(rows, sequences, context)
    assert cost.ms(rows + 1, sequences, context) >= now - 1e-6
    assert cost.ms(rows, sequences + 1, context) >= now
    assert cost.ms(rows, sequences, context + 1) >= now


@given(costs, st.integers(1, 200), st.floats(0.1, 4.0))
def test_a_share_of_the_work_costs_its_share(cost, rows, share):
    assert cost.scale_by(share).ms(rows, 2, 100) == pytest.approx(share * cost.ms(rows, 2, 100))


def test_between_and_beyond_the_knots_it_is_linear():
    cost = StepCost((1.0, 3.0), (10.0, 14.0), sequence_ms=1.0, position_us=2.0, row_position_us=1.0)
    assert cost.ms(2) == 12.0
    assert cost.ms(5) == 18.0
    assert cost.ms(2, 3, 1000) == pytest.approx(12.0 + 2.0 + 6.0 + 2.0)
    assert cost.prefill_ms(6, chunk_rows=3) == pytest.approx(2 * 14.0 + 3 * (2 + 3) / 1000)


def test_a_forward_of_other_rows_than_the_last_may_take_longer():
    cost = StepCost((1.0,), (10.0,), changing_ms=4.0)
    assert cost.ms(3) == 10.0
    assert cost.ms(3, changes=0.5) == pytest.approx(12.0)
    assert cost.scale_by(2.0).ms(3, changes=1.0) == pytest.approx(28.0)


@given(costs, costs, st.integers(1, 600), st.integers(0, 2000), st.integers(8, 600))
def test_prompts_beside_others_never_cost_more_than_alone(cost, prefill, tokens, done, chunk):
    both = replace(cost, prefill=prefill)
    alone = both.prefill_ms(tokens, done=done, chunk_rows=chunk)
    beside = both.prefill_ms(tokens, done=done, chunk_rows=chunk, beside=True)
    assert -1e-9 <= beside <= alone * (1 + 1e-9)
    if cost.serial:  # nothing is shared
        assert beside == alone


def test_what_a_forward_takes_anyway_is_not_charged_to_a_prompt_beside_others():
    cost = StepCost((1.0, 8.0), (8.0, 9.0), prefill=StepCost((10.0, 20.0, 40.0), (15.0, 25.0, 45.0)))
    assert cost.prefill_ms(30) == 35.0
    assert cost.prefill_ms(30, beside=True) == 30.0
    assert cost.prefill_ms(30, chunk_rows=15, beside=True) == 30.0


def test_rows_that_fill_up_are_paid():
    each = StepCost((1.0, 101.0), (1.0, 101.0), least_rows=2)
    assert (each.ms(1), each.ms(4, 4), each.ms(12, 4)) == (2.0, 8.0, 12.0)
    whole = StepCost((1.0, 101.0), (1.0, 101.0), least_forward_rows=2)
    assert (whole.ms(1), whole.ms(4, 4)) == (2.0, 4.0)


def test_knots_that_do_not_ascend_are_refused():
    with pytest.raises(ValueError, match="ascend"):
        StepCost((1.0, 1.0), (1.0, 2.0))


@given(st.floats(0.0, 0.99), st.integers(0, 16))
def test_expected_tokens_is_leviathans_formula(chance, depth):
    assert estimate_round_tokens(chance, depth) == pytest.approx((1 - chance ** (depth + 1)) / (1 - chance))
    assert estimate_round_tokens([chance], depth) == pytest.approx(estimate_round_tokens(chance, depth))


def test_a_transfer_is_half_a_round_trip_and_its_bytes():
    assert LinkProfile("a", "b", 2.0, 1e6).transfer_ms(500_000) == pytest.approx(1.0 + 500.0)
