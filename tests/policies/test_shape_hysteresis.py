"""Keeping the number of rows costs no more than the changes that it saves."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.allocation import worth_taking
from policies.speculation.shape_hysteresis import ShapeHysteresis, decide_shape, more_ms, observe_shape

CHANCES = st.lists(st.floats(0.0, 1.0), max_size=8).map(lambda found: list(accumulate(found, lambda a, b: a * b)))
ROUNDS = st.lists(st.tuples(CHANCES, st.integers(1, 4)), min_size=1, max_size=40)
ADDED_MS = [0.5] * 20


def worth(candidates, rows, value):
    return sum(candidates[:rows]) - value * sum(ADDED_MS[:rows])


@given(ROUNDS, st.floats(0.05, 2.0), st.floats(0.0, 5.0))
def test_rows_change_when_as_much_was_given_up_as_that_takes(rounds, value, change_ms):
    state = ShapeHysteresis(changed_ms=change_ms)
    lost = 0.0  # since the last change
    for candidates, before in rounds:
        best = worth_taking(candidates, ADDED_MS, value)
        taken, filling, regret = decide_shape(state, before, candidates, ADDED_MS, value, best)
        rows = before + taken + filling
        assert taken <= len(candidates)
        if rows == state.last:
            lost += worth(candidates, best, value) - worth(candidates, taken + filling, value)
        elif rows == before < best + before and before > state.last:  # they change anyway, but more would change back
            lost = worth(candidates, best, value)
            assert lost <= value * change_ms + 1e-6
        else:
            assert (taken, filling) == (best, 0)
            lost = 0.0
        assert lost <= value * (1.0 if best < rows - before else 2.0) * change_ms + 1e-6
        state = observe_shape(state, before, rows, regret, 0.0, 10.0)._replace(changed_ms=change_ms)


@given(CHANCES, st.integers(0, 12), st.floats(0.05, 2.0))
def test_where_a_change_takes_no_time_the_best_is_taken(candidates, last, value):
    best = worth_taking(candidates, ADDED_MS, value)
    assert decide_shape(ShapeHysteresis(last), 1, candidates, ADDED_MS, value, best)[:2] == (best, 0)


def test_a_sure_long_draft_is_worth_a_change_at_once():
    candidates = [0.95**place for place in range(1, 9)]
    best = worth_taking(candidates, ADDED_MS, 0.2)
    assert decide_shape(ShapeHysteresis(2, changed_ms=5.0), 2, candidates, ADDED_MS, 0.2, best).taken == best == 8


def test_rows_are_filled_up_for_a_round_that_drafts_nothing():
    assert decide_shape(ShapeHysteresis(5, changed_ms=5.0), 2, [], ADDED_MS, 0.1, 0)[:2] == (0, 3)


@given(
    st.lists(st.tuples(st.booleans(), st.floats(-2.0, 60.0)), min_size=50, max_size=200),
    st.floats(0.0, 5.0),
)
def test_what_a_change_takes_is_learned_beside_rounds_without_one(rounds, change_ms):
    state, calm = ShapeHysteresis(last=2, changed_ms=5.0), ShapeHysteresis(last=2, changed_ms=5.0)
    for number, (changes, noise_ms) in enumerate(rounds):
        rows = 2 + number % 2 if changes else state.last
        took_ms = change_ms * (rows != state.last)
        before = state
        state = observe_shape(state, 2, rows, 0.0, took_ms + noise_ms, 100.0)
        calm = observe_shape(calm, 2, rows, 0.0, took_ms, 100.0)
        learned = state.same_ms if rows == before.last else state.changed_ms
        kept_as_it_was = (
            (state.changed_ms, before.changed_ms) if rows == before.last else (state.same_ms, before.same_ms)
        )
        assert kept_as_it_was[0] == kept_as_it_was[1]
        assert -2.0 <= learned <= 55.0
    assert min(5.0, change_ms) <= calm.change_ms <= max(5.0, change_ms)


def test_a_stretch_of_slow_rounds_does_not_make_changes_dear():
    state = ShapeHysteresis(last=2, changed_ms=1.0)
    for number in range(100):
        state = observe_shape(state, 2, 2 + number // 2 % 2, 0.0, 30.0, 100.0)  # all take 30 ms longer
    assert abs(state.change_ms) <= 1.0


@given(st.integers(1, 40), st.integers(0, 12), st.integers(0, 12))
def test_only_changes_that_drafts_make_are_charged_to_them(base, last_more, more):
    state = ShapeHysteresis(last=base + last_more, changed_ms=4.0, last_base=base)
    assert more_ms(state, base, more) == 4.0 * (more != last_more)
    assert more_ms(state, base + 1, 0) == 4.0 * (last_more != 1) - 4.0  # plain decoding changes too
    assert more_ms(ShapeHysteresis(changed_ms=4.0), base, more) == 0.0  # behind a prefill everything changes
