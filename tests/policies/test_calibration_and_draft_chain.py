"""Calibration of a draft model's probabilities, and whom a chain asks: properties, no mocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.calibration import (
    EDGES,
    MEMORY,
    Calibration,
    chance,
    observe_draft_outcome,
    observe_token_outcome,
    usual_chance,
)
from policies.speculation.chain import WORTH_TOKENS, asks_on, estimate_accepted_tokens, usual_after

chances = st.floats(0.0, 1.0)
outcomes = st.lists(st.tuples(chances, st.booleans()), max_size=60)


def after(history) -> Calibration:
    calibration = Calibration()
    for probability, accepted in history:
        calibration = observe_token_outcome(calibration, probability, accepted)
    return calibration


@given(outcomes, chances)
def test_a_chance_is_a_chance_and_an_outcome_moves_it_its_way(history, probability):
    calibration = after(history)
    before = chance(calibration, probability)
    assert 0.0 <= before <= 1.0
    assert chance(observe_token_outcome(calibration, probability, True), probability) >= before
    assert chance(observe_token_outcome(calibration, probability, False), probability) <= before


@given(outcomes, chances)
def test_what_is_usual_is_hoped_for_at_first_and_follows_every_outcome(history, probability):
    calibration = after(history)
    assert usual_chance(Calibration()) == 1.0
    assert 0.0 < usual_chance(calibration) <= 1.0
    assert usual_chance(observe_token_outcome(calibration, probability, False)) < usual_chance(calibration)
    assert usual_chance(observe_token_outcome(calibration, probability, True)) >= usual_chance(calibration) - 1e-9


@given(chances)
def test_without_outcomes_the_draft_is_believed(probability):
    assert chance(Calibration(), probability) == pytest.approx(probability)


@given(outcomes, chances, chances)
def test_outcomes_of_one_bucket_say_nothing_of_another(history, probability, other):
    calibration = after(history)
    if any(min(probability, other) < edge <= max(probability, other) for edge in EDGES):
        assert chance(observe_token_outcome(calibration, other, True), probability) == chance(calibration, probability)


@given(st.integers(1, 9), chances, outcomes)
def test_the_rate_is_learned_and_an_old_one_forgotten(tenths, probability, history):
    calibration = after(history)
    for index in range(int(MEMORY) * 6):
        calibration = observe_token_outcome(calibration, probability, index % 10 < tenths)
    assert chance(calibration, probability) == pytest.approx(tenths / 10, abs=0.06)
    assert max(calibration.seen) <= MEMORY


tokens = st.lists(st.integers(0, 2), max_size=6)


@given(tokens, tokens, st.data())
def test_a_verdict_says_nothing_of_what_stands_behind_the_first_wrong_token(proposed, committed, data):
    probabilities = data.draw(st.lists(chances, min_size=len(proposed), max_size=len(proposed)))
    right = next((i for i, (a, b) in enumerate(zip(proposed, committed, strict=False)) if a != b), None)
    count = min(len(proposed), len(committed)) if right is None else right + 1
    expected = after([(p, i != right) for i, p in enumerate(probabilities[:count])])
    assert observe_draft_outcome(Calibration(), proposed, probabilities, committed) == expected


@given(st.lists(chances, max_size=12), chances)
def test_expected_tokens_is_what_simulation_by_hand_gives(confidences, more):
    total = estimate_accepted_tokens(confidences)
    assert 0.0 <= total <= len(confidences)
    assert estimate_accepted_tokens([*confidences, more]) >= total
    assert estimate_accepted_tokens([more, *confidences]) == pytest.approx(more * (1.0 + total))


@given(st.lists(chances, max_size=12), st.integers(0, 12), st.floats(0.0, 12.0))
def test_the_next_drafter_is_asked_where_it_can_bring_more(confidences, limit, usual):
    asked = asks_on(confidences, limit=limit, usual=usual)
    if not confidences:
        assert asked == (limit > 0)
    elif asked:
        assert min(usual, limit) - estimate_accepted_tokens(confidences) > WORTH_TOKENS
    assert not (asked and limit == 0)


@given(st.lists(chances, max_size=12), st.floats(0.0, 12.0))
def test_what_is_usual_moves_towards_the_newest(confidences, usual):
    tokens = estimate_accepted_tokens(confidences)
    assert min(usual, tokens) - 1e-9 <= usual_after(usual, confidences) <= max(usual, tokens) + 1e-9
