"""The guard: which draft tokens are worth their rows, against trying everything."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.cost import StepCost, estimate_round_tokens
from policies.speculation.allocation import (
    LEAST_CHANCE,
    allocate_depths_in_widths,
    cumulate_acceptance,
    floor_of,
    rank_candidates,
    worth_taking,
)
from policies.speculation.allocation import allocate_depths as given_depths
from policies.speculation.cost_model import start_cost_model
from policies.speculation.widths import pad_to_width

CONFIDENCES = st.lists(st.floats(0.0, 1.0), max_size=8)
COST = start_cost_model(StepCost((1.0, 2.0, 8.0, 32.0, 128.0), (7.3, 7.7, 10.9, 27.0, 95.0), 0.25))


def falling(values):
    return sorted(values, reverse=True)


REACHES = st.lists(st.lists(st.floats(LEAST_CHANCE, 1.0), max_size=4).map(falling), min_size=1, max_size=4)
PRICES = st.floats(0.001, 2.0)


def share_out(cumulative_acceptance, free, added_ms, value):
    """The depths of the tokens that are worth their rows."""
    candidates = rank_candidates(cumulative_acceptance, free)
    return given_depths(cumulative_acceptance, free, candidates, worth_taking(candidates, added_ms, value))


def worth(cumulative_acceptance, free, depths, added_ms, value):
    """What share_out maximises: expected tokens, less the worth of the time that the rows add."""
    rows = sum(max(0, depth - none) for depth, none in zip(depths, free, strict=True))
    if rows > len(added_ms):
        return None
    gained = sum(sum(chances[:depth]) for chances, depth in zip(cumulative_acceptance, depths, strict=True))
    return gained - value * sum(added_ms[:rows])


@given(REACHES, st.data())
def test_no_other_depths_are_worth_more(cumulative_acceptance, data):
    free = [data.draw(st.integers(0, 2)) for _ in cumulative_acceptance]
    added_ms = data.draw(st.lists(st.floats(0.0, 3.0), max_size=16))
    value = data.draw(PRICES)
    depths = share_out(cumulative_acceptance, free, added_ms, value)
    assert all(0 <= depth <= len(chances) for depth, chances in zip(depths, cumulative_acceptance, strict=True))
    found = worth(cumulative_acceptance, free, depths, added_ms, value)
    every = product(*(range(len(chances) + 1) for chances in cumulative_acceptance))
    best = max(w for other in every if (w := worth(cumulative_acceptance, free, other, added_ms, value)) is not None)
    assert found == pytest.approx(best, abs=1e-9)


@given(REACHES, st.data(), PRICES)
def test_rows_that_are_run_anyway_are_always_used(cumulative_acceptance, data, value):
    free = [data.draw(st.integers(0, 3)) for _ in cumulative_acceptance]
    depths = share_out(cumulative_acceptance, free, [1000.0] * 8, value)
    assert depths == [min(len(chances), none) for chances, none in zip(cumulative_acceptance, free, strict=True)]


@given(REACHES, st.integers(0, 16), st.data())
def test_rows_never_exceed_the_room(cumulative_acceptance, room, data):
    free = [data.draw(st.integers(0, 2)) for _ in cumulative_acceptance]
    depths = share_out(cumulative_acceptance, free, [0.0] * room, 1.0)
    assert sum(max(0, depth - none) for depth, none in zip(depths, free, strict=True)) <= room


def test_rows_go_to_the_surest_sequences():
    depths = share_out([[0.9, 0.8, 0.7], [0.3, 0.1], [0.95, 0.2]], [0, 0, 0], [1.0] * 9, 0.5)
    assert depths == [3, 0, 1]
    assert share_out([[0.9, 0.8, 0.7], [0.3, 0.1], [0.95, 0.2]], [0, 0, 0], [1.0] * 2, 0.5) == [1, 0, 1]


@given(REACHES, st.data(), PRICES)
def test_in_widths_no_row_is_left_that_is_paid_for(cumulative_acceptance, data, value):
    widths = sorted(data.draw(st.sets(st.integers(1, 9), min_size=1)))
    known = [data.draw(st.integers(1, 3)) for _ in cumulative_acceptance]
    room = data.draw(st.integers(0, 30))
    depths = allocate_depths_in_widths(cumulative_acceptance, known, widths, [0.5] * room, value)
    used = 0
    for depth, chances, before in zip(depths, cumulative_acceptance, known, strict=True):
        paid = pad_to_width(before + depth, widths)
        assert depth == min(len(chances), paid - before)
        used += paid - pad_to_width(before, widths)
    assert used <= room


@given(st.lists(st.floats(0.0, 1.0), max_size=6).map(falling), st.data(), PRICES)
def test_in_widths_one_sequence_has_its_best_depth(chances, data, value):
    widths = sorted(data.draw(st.sets(st.integers(1, 9), min_size=1)))
    known = data.draw(st.integers(1, 3))
    (depth,) = allocate_depths_in_widths([chances], [known], widths, [0.5] * 40, value)

    def compute_gain(count):
        return sum(chances[:count]) - value * 0.5 * (pad_to_width(known + count, widths) - pad_to_width(known, widths))

    assert compute_gain(depth) == pytest.approx(max(compute_gain(count) for count in range(len(chances) + 1)), abs=1e-9)


@given(CONFIDENCES, st.floats(0.01, 100.0), st.integers(0, 8), st.integers(0, 3), st.floats(0.0, 0.9))
def test_reach_is_a_chain_of_chances_down_to_the_floor(confidences, factor, most, sure, floor):
    cumulated = cumulate_acceptance(confidences, factor, most, sure, floor)
    assert len(cumulated) <= min(most, len(confidences))
    assert len(cumulated) >= min(sure, most, len(confidences))
    assert all(0.0 <= chance < 1.0 for chance in cumulated)
    assert cumulated == falling(cumulated)
    assert all(chance > floor for chance in cumulated[sure:])
    plain = cumulate_acceptance(confidences, 1.0, most, most, floor)
    for index, chance in enumerate(plain):
        assert chance == pytest.approx(cumulate_acceptance(confidences, 1.0, most, most, floor)[index])
        assert (cumulate_acceptance(confidences, 2.0, most, most, floor)[index] >= chance) or chance == 0.0


@given(st.floats(0.05, 0.95), st.integers(1, 16), st.integers(1, 2), st.floats(0.0, 2000.0))
def test_the_guard_finds_the_depth_of_most_tokens_a_second(chance, sequences, min_rows, context):
    """One price of time, the rate itself, leads every sequence to the depth at which the rate is greatest."""
    value = max(
        sequences
        * estimate_round_tokens(chance, depth)
        / COST.ms(sequences * max(1 + depth, min_rows), sequences, context)
        for depth in range(13)
    )
    base = sequences * min_rows
    chances = cumulate_acceptance([chance] * 12, 1.0, 12, min_rows - 1, floor_of(COST, base, value))
    added_ms = COST.estimate_added_ms(base, 12 * sequences, sequences, context)
    depths = share_out([chances] * sequences, [min_rows - 1] * sequences, added_ms, value)
    tokens = sum(1.0 + sum(chances[:depth]) for depth in depths)
    rows = sum(max(depth + 1, min_rows) for depth in depths)
    assert tokens / COST.ms(rows, sequences, context) >= 0.999 * value
