"""A running mean is among its observations: the arithmetic mean of few, and one that forgets after many."""

import math
from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st

from policies.running_mean import update_mean

VALUES = st.lists(st.floats(-100.0, 100.0), min_size=1, max_size=40)
WEIGHTS = st.floats(0.01, 1.0)


def mean_of(values: list[float], weight: float) -> float:
    mean = 0.0
    for seen, value in enumerate(values):
        mean = update_mean(mean, value, weight, seen)
    return mean


@given(VALUES, WEIGHTS)
def test_it_stays_among_what_was_seen(values, weight):
    assert min(values) - 1e-9 <= mean_of(values, weight) <= max(values) + 1e-9


@given(VALUES, WEIGHTS)
def test_it_is_of_all_while_they_are_few(values, weight):
    few = values[: max(1, int(1.0 / weight))]
    assert math.isclose(mean_of(few, weight), fmean(few), abs_tol=1e-9)


@given(VALUES, WEIGHTS, st.floats(-100.0, 100.0))
def test_each_older_observation_counts_less_by_the_weight_of_every_newer_one(values, weight, first):
    mean = first
    for value in values:
        mean = update_mean(mean, value, weight)
    kept = 1.0 - weight
    shares = [kept ** len(values), *(weight * kept ** (len(values) - 1 - n) for n in range(len(values)))]
    assert math.isclose(sum(shares), 1.0, abs_tol=1e-9)
    expected = sum(share * value for share, value in zip(shares, [first, *values], strict=True))
    assert math.isclose(mean, expected, abs_tol=1e-9)
