"""Keeping the number of rows costs no more than the changes that it saves."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from policies.goodput import worth_taking
from policies.same_rows import SameRows, kept, observed

CHANCES = st.lists(st.floats(0.0, 1.0), max_size=8).map(lambda found: list(accumulate(found, lambda a, b: a * b)))
ROUNDS = st.lists(st.tuples(CHANCES, st.integers(1, 4)), min_size=1, max_size=40)
ADDED_MS = [0.5] * 20


def worth(offers, rows, value):
    return sum(offers[:rows]) - value * sum(ADDED_MS[:rows])


@given(ROUNDS, st.floats(0.05, 2.0), st.floats(0.0, 5.0))
def test_rows_change_when_as_much_was_given_up_as_that_takes(rounds, value, change_ms):
    state = SameRows(change_ms=change_ms)
    lost = 0.0  # since the last change
    for offers, before in rounds:
        best = worth_taking(offers, ADDED_MS, value)
        taken, filling, given_up = kept(state, before, offers, ADDED_MS, value, best)
        rows = before + taken + filling
        assert taken <= len(offers)
        if rows == state.last:
            lost += worth(offers, best, value) - worth(offers, taken + filling, value)
        else:
            assert (taken, filling) == (best, 0)
            lost = 0.0
        assert lost <= value * change_ms + 1e-6
        state = observed(state, rows, given_up, None)


@given(CHANCES, st.integers(0, 12), st.floats(0.05, 2.0))
def test_where_a_change_takes_no_time_the_best_is_taken(offers, last, value):
    best = worth_taking(offers, ADDED_MS, value)
    assert kept(SameRows(last), 1, offers, ADDED_MS, value, best)[:2] == (best, 0)


def test_a_sure_long_draft_is_worth_a_change_at_once():
    offers = [0.95**place for place in range(1, 9)]
    best = worth_taking(offers, ADDED_MS, 0.2)
    assert kept(SameRows(2, change_ms=5.0), 2, offers, ADDED_MS, 0.2, best).taken == best == 8


def test_rows_are_filled_up_for_a_round_that_drafts_nothing():
    assert kept(SameRows(5, change_ms=5.0), 2, [], ADDED_MS, 0.1, 0)[:2] == (0, 3)


@given(st.lists(st.floats(-2.0, 9.0), min_size=200, max_size=200))
def test_what_a_change_takes_is_learned_from_changes_alone(over):
    state = SameRows(last=1, change_ms=5.0)
    for number, ms in enumerate(over):
        same = observed(state, state.last, 0.0, ms)
        assert same.change_ms == state.change_ms
        state = observed(state, 2 + number % 2, 0.0, ms)
        assert -2.0 <= state.change_ms <= 9.0
