"""What verdicts teach about the chances of drafts, with and without a drafter's own word."""

from math import exp, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import odds, positions
from policies.positions import Positions


def believed(known, confidence):
    return confidence * known.factor / (1.0 - confidence + confidence * known.factor)


def taught(known, confidence, outcomes):
    for outcome in outcomes:
        chance = believed(known, confidence)
        known = odds.judged(known, outcome - chance, chance * (1.0 - chance))
    return known


@given(st.floats(0.02, 0.98), st.lists(st.booleans(), max_size=200), st.floats(-3.0, 3.0))
def test_beliefs_stay_chances_and_follow_outcomes(confidence, outcomes, seed):
    known = taught(odds.begun(seed), confidence, outcomes)
    assert 0.0 < believed(known, confidence) < 1.0
    assert abs(known.log_factor) <= odds.MOST
    chance = believed(known, confidence)
    assert odds.judged(known, 1.0 - chance, chance * (1.0 - chance)).log_factor >= known.log_factor
    assert odds.judged(known, -chance, chance * (1.0 - chance)).log_factor <= known.log_factor


@given(st.floats(0.1, 0.9), st.integers(1, 19))
def test_a_drafter_that_is_wrong_about_itself_is_corrected(confidence, right_of_20):
    """Outcomes in an even rhythm, so that every stretch has the same share of right ones."""
    outcomes = [(index * right_of_20) % 20 < right_of_20 for index in range(400)]
    known = taught(odds.begun(0.0), confidence, outcomes)
    assert believed(known, confidence) == pytest.approx(right_of_20 / 20, abs=0.12)


@given(st.integers(20, 500))
def test_a_text_that_turns_is_believed_within_a_few_verdicts(before):
    known = taught(odds.begun(0.0), 0.9, [index % 10 != 9 for index in range(before)])
    assert believed(known, 0.9) > 0.6
    known = taught(known, 0.9, [False] * 6)
    assert believed(known, 0.9) < 0.35
    known = taught(known, 0.9, [False] * before)
    known = taught(known, 0.9, [True] * 10)
    assert believed(known, 0.9) > 0.6


@given(st.integers(1, 12), st.lists(st.integers(0, 12), min_size=60, max_size=120), st.randoms())
def test_positions_follow_what_could_be_compared(length, accepted, random):
    random.shuffle(accepted)  # a text that turns is another matter
    known = Positions()
    for right in [min(right, length) for right in accepted]:
        known = positions.judged(known, 0.0, right, min(right + 1, length))
    for place, chance in enumerate(known.chances(length)):
        reached = sum(min(right, length) >= place for right in accepted)
        passed = sum(min(right, length) > place for right in accepted)
        if reached > 50:
            assert chance == pytest.approx(passed / reached, abs=0.15)
        assert 0.0 <= chance <= 1.0


@given(st.sampled_from([-4.0, -2.0, 2.0, 4.0]), st.floats(0.2, 0.8))
def test_what_a_factor_explains_positions_do_not_learn_once_more(log_factor, usual):
    """The drafts of a request are better or worse than its class's, as its factor says: positions keep their shape."""
    before = Positions((log(usual / (1.0 - usual)),) * 6, (50.0,) * 6)
    chance = 1.0 / (1.0 + exp(-log_factor) * (1.0 - usual) / usual)
    draws, known = Random(7), before
    for _ in range(200):
        right = next((place for place in range(6) if draws.random() >= chance), 6)
        known = positions.judged(known, log_factor, right, min(right + 1, 6))
    for now, then in zip(known.chances(6), before.chances(6), strict=True):
        assert abs(now - then) < 0.15


def test_an_unknown_position_is_as_the_one_before_it():
    known = Positions()
    assert known.chances(3) == [0.5, 0.5, 0.5]
    for _ in range(50):
        known = positions.judged(known, 0.0, 1, 1)
    first, second, third = known.chances(3)
    assert first > 0.9
    assert first == second == third
