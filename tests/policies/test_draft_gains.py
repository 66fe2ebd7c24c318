"""What sets a category of requests apart on a pair of target and draft."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.draft_gains import (
    UNKNOWN_GAIN,
    DraftGains,
    StepSums,
    estimate_gain,
    predict_saved_ms,
)

STEPS = st.integers(1, 400)
MADE = st.floats(1.0, 8.0)
MS = st.floats(1.0, 100.0)


def learn(rates: dict[str, float], rounds: int = 60) -> DraftGains:
    """Return what is known where each category's steps make so many tokens."""
    gains = DraftGains()
    for _ in range(rounds):
        for category, rate in rates.items():
            gains.observe(category, "pair", round(100 * rate), 100)
    return gains


@given(st.dictionaries(st.sampled_from("abcdef"), MADE, min_size=1))
def test_what_is_known_of_a_category_comes_to_what_its_steps_make(rates):
    gains = learn(rates)
    mean = sum(rates.values()) / len(rates)
    for category, rate in rates.items():
        assert gains.find(category, "pair").factor == pytest.approx(rate / mean, rel=0.15, abs=0.1)


@given(st.dictionaries(st.sampled_from("abcdef"), MADE, min_size=2, max_size=2))
def test_the_category_whose_steps_make_more_is_never_taken_for_the_slower_one(rates):
    gains = learn(rates, rounds=10)
    slow, fast = sorted(rates, key=lambda category: rates[category])
    assert gains.find(slow, "pair").factor <= gains.find(fast, "pair").factor


@given(STEPS, MADE, STEPS, MADE)
def test_one_that_was_not_seen_is_taken_for_better_than_the_mean_and_each_request_says_more(steps, made, own, rate):
    everybody = StepSums(10.0, 10 * made * steps, 10.0 * steps)
    unseen = estimate_gain(StepSums(), everybody)
    assert unseen.factor > 1.0
    seen, more = StepSums(1.0, rate * own, own), StepSums(9.0, 9 * rate * own, 9.0 * own)
    truth = rate / made
    assert abs(estimate_gain(more, everybody).factor - truth) <= abs(estimate_gain(seen, everybody).factor - truth) + 1e-9


@given(MS, st.floats(0.0, 1.0), st.floats(0.2, 5.0))
def test_a_draft_saves_no_more_than_there_is_and_costs_nothing(plain_ms, share, factor):
    saved_ms = predict_saved_ms(plain_ms, share * plain_ms, factor)
    assert 0.0 <= saved_ms <= plain_ms
    assert predict_saved_ms(plain_ms, share * plain_ms, 1.0) == pytest.approx(share * plain_ms, abs=1e-9)
    assert predict_saved_ms(plain_ms, share * plain_ms, factor + 0.1) >= saved_ms


def test_pairs_and_categories_are_apart_and_bounded():
    gains = learn({"code": 3.0, "chat": 1.5})
    assert gains.find("code", "another") is UNKNOWN_GAIN
    gains.observe("code", "pair", 0, 5)
    gains.observe("code", "none", 5, 0)
    assert gains.find("code", "none") is UNKNOWN_GAIN
    for number in range(600):
        gains.observe(f"c{number}", "pair", 10, 5)
    assert gains.find("code", "pair").requests == 0.0, "it was forgotten"
    assert gains.find("c599", "pair").requests == 1.0
