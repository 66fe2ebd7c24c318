"""When prediction and measurement have parted, and when a move is worth it."""

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.drift import (
    LEAST_GAIN,
    PATIENCE,
    Drift,
    count_recent,
    has_drifted,
    lasts,
    observe_drift,
    pause_s,
    worth_moving,
)


def after(ratio: float, rounds: int, drift: Drift | None = None, tolerance: float = 0.2) -> Drift:
    drift = drift or Drift()
    for _ in range(rounds):
        drift = observe_drift(drift, 10.0, 10.0 * ratio, tolerance)
    return drift


@given(st.floats(0.84, 1.19), st.integers(1, 400))
def test_rounds_within_the_tolerance_never_count_as_drift(ratio, rounds):
    assert not has_drifted(after(ratio, rounds))


@given(st.one_of(st.floats(1.25, 50.0), st.floats(0.02, 0.8)))
def test_rounds_beyond_it_count_after_a_while_whichever_way(ratio):
    assert not has_drifted(after(ratio, PATIENCE - 1))
    assert has_drifted(after(ratio, PATIENCE))


@given(st.floats(2.0, 1e6))
def test_a_stall_is_no_drift(stall):
    assert not has_drifted(after(1.0, 20, after(stall, 1, after(1.0, 200))))


def test_a_drift_that_comes_late_is_seen_and_its_size_is_learned():
    drift = after(3.0, 150, after(1.0, 500))
    assert has_drifted(drift)
    assert 2.8 < drift.ratio < 3.01


@given(st.one_of(st.floats(1.25, 8.0), st.floats(0.2, 0.8)), st.floats(0.0, 60.0))
def test_a_drift_lasts_when_its_rounds_took_so_long_on_end(ratio, after_s):
    rounds = max(PATIENCE, int(after_s * 1e3 / (10.0 * ratio)) + 2)
    assert lasts(after(ratio, rounds), after_s)
    assert not lasts(after(ratio, rounds - PATIENCE), after_s + 1e-6)
    assert not lasts(after(1.0, 60, after(ratio, rounds)), after_s), "it has passed"


def test_what_took_no_time_says_nothing():
    assert observe_drift(Drift(), 0.0, 5.0, 0.2) == Drift()
    assert observe_drift(Drift(), 5.0, 0.0, 0.2) == Drift()


@given(st.floats(1.0, 1e6), st.floats(1.0, 1e6))
def test_two_plans_never_both_are_worth_a_move_to_the_other(left, right):
    assert not (worth_moving(left, right) and worth_moving(right, left))
    assert worth_moving(left, left * (1.01 + LEAST_GAIN))


def test_pauses_grow_and_the_first_plan_needs_none():
    pauses = [pause_s(count) for count in range(20)]
    assert pauses[0] == 0
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] == 3600


@given(st.integers(0, 40), st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.floats(0.1, 60.0))
def test_plans_that_stood_long_count_no_more_and_those_that_alternate_do(plans, stood_s, more_s, first_s):
    left = count_recent(plans, stood_s, first_s)
    assert 0 <= left <= plans
    assert count_recent(plans, stood_s + more_s, first_s) <= left
    assert count_recent(plans, pause_s(plans, first_s), first_s) == plans, "made again as soon as may be"
    assert count_recent(plans, 1e9, first_s) == 0
