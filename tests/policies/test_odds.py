"""What verdicts teach about the chances of drafts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.speculation import odds


def believe(known, confidence):
    return confidence * known.factor / (1.0 - confidence + confidence * known.factor)


def teach_odds(known, confidence, outcomes):
    for outcome in outcomes:
        chance = believe(known, confidence)
        known = odds.observe_acceptance_gap(known, outcome - chance, chance * (1.0 - chance))
    return known


@given(st.floats(0.02, 0.98), st.lists(st.booleans(), max_size=200))
def test_beliefs_stay_chances_and_follow_outcomes(confidence, outcomes):
    known = teach_odds(odds.Odds(), confidence, outcomes)
    assert 0.0 < believe(known, confidence) < 1.0
    assert abs(known.log_factor) <= odds.MOST
    chance = believe(known, confidence)
    assert odds.observe_acceptance_gap(known, 1.0 - chance, chance * (1.0 - chance)).log_factor >= known.log_factor
    assert odds.observe_acceptance_gap(known, -chance, chance * (1.0 - chance)).log_factor <= known.log_factor


@given(st.floats(0.1, 0.9), st.integers(1, 19))
def test_a_drafter_that_is_wrong_about_itself_is_corrected(confidence, right_of_20):
    """Outcomes in an even rhythm, so that every stretch has the same share of right ones."""
    outcomes = [(index * right_of_20) % 20 < right_of_20 for index in range(400)]
    known = teach_odds(odds.Odds(), confidence, outcomes)
    assert believe(known, confidence) == pytest.approx(right_of_20 / 20, abs=0.12)


@given(st.integers(20, 500))
def test_a_text_that_turns_is_believed_within_a_few_verdicts(before):
    known = teach_odds(odds.Odds(), 0.9, [index % 10 != 9 for index in range(before)])
    assert believe(known, 0.9) > 0.6
    known = teach_odds(known, 0.9, [False] * 6)
    assert believe(known, 0.9) < 0.35
    known = teach_odds(known, 0.9, [False] * before)
    known = teach_odds(known, 0.9, [True] * 10)
    assert believe(known, 0.9) > 0.6
