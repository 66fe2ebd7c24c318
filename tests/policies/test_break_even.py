"""Drafting loses no more than was saved for it, whatever it costs and brings; what pays is used."""

import math

from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.gate import (
    TRIAL_ROUNDS,
    DraftCost,
    GateState,
    decide_drafting,
    observe_drafted_round,
    reads,
    token_price,
    worth_ms,
)
from policies.speculation.trial_account import FIRST_ROUNDS, SHARE, STAKE, TrialAccount

TIMES_MS = st.floats(0.01, 1000.0)
ROUNDS = 3000


def live_through(accepted: float, price: DraftCost, rounds: int, cost_ms: float | None = None) -> list[bool]:
    """The decisions of so many rounds in which every draft goes alike. The text is read in a trial's first round, and
    its missing part grows by a token in every round without drafts."""
    worth, asked, missing = GateState(), [], True
    for _ in range(rounds):
        price_now = price if missing else DraftCost(price.round_ms, price.step_ms)
        worth = decide_drafting(worth, price_now)
        asked.append(worth.drafting)
        if worth.drafting:
            took_ms = price.reading_ms if missing else (price.step_ms if cost_ms is None else cost_ms)
            worth = observe_drafted_round(
                worth, round_ms=price.round_ms, accepted=accepted * (not missing), cost_ms=took_ms, reading=missing
            )
        missing = not worth.drafting
    return asked


@given(
    st.lists(st.tuples(st.floats(0.0, 8.0), st.floats(0.0, 20.0), st.booleans()), min_size=1, max_size=300),
    st.floats(0.0, 2.0),
    st.floats(0.0, 20.0),
)
def test_it_never_loses_more_than_was_saved_and_one_round(rounds, step, reading):
    """Whatever outcomes and costs (in rounds) an adversary chooses."""
    worth, won, dearest, goes = GateState(), 0.0, 0.0, 0
    for accepted, cost, fresh in rounds:
        worth = decide_drafting(worth, DraftCost(1.0, step, reading * fresh))
        if worth.drafting:
            goes += 1
            won += accepted - cost
            dearest = max(dearest, cost - accepted)
            worth = observe_drafted_round(worth, round_ms=1.0, accepted=accepted, cost_ms=cost, reading=fresh)
    assert won >= -(FIRST_ROUNDS + SHARE * len(rounds) + dearest) - 1e-6


@given(st.floats(0.5, 16.0), TIMES_MS, st.floats(0.01, 0.5), st.floats(0.0, 1.0))
def test_what_pays_is_asked_from_the_first_round_on(accepted, round_ms, step, reading):
    price = DraftCost(round_ms, step * round_ms, reading * FIRST_ROUNDS / 2 * round_ms)
    if step < 0.9 * accepted:
        assert all(live_through(accepted, price, 100))


@given(st.floats(0.0, 2.0), TIMES_MS, st.floats(0.05, 1.5), st.floats(0.0, 30.0))
def test_what_does_not_pay_takes_next_to_nothing(accepted, round_ms, step, reading):
    if step > 1.1 * accepted:
        asked = live_through(accepted, DraftCost(round_ms, step * round_ms, reading * round_ms), ROUNDS)
        assert sum(asked) * (step - accepted) <= FIRST_ROUNDS + SHARE * ROUNDS + 2 * step


@given(TIMES_MS, st.floats(0.81, 1.5))
def test_a_step_of_nearly_a_round_is_not_tried_early(round_ms, step):
    assert not any(live_through(1.0, DraftCost(round_ms, step * round_ms, FIRST_ROUNDS / 2 * round_ms), 100))


@given(TIMES_MS, st.floats(0.05, 0.5))
def test_a_draft_that_becomes_good_is_found_again(round_ms, step):
    price = DraftCost(round_ms, step * round_ms)
    worth = GateState(TrialAccount(saved=0.0))
    waited = 0
    while not (worth := decide_drafting(worth, price)).drafting:
        waited += 1
    assert waited <= math.ceil((STAKE + price.trial_rounds) / SHARE)
    for _ in range(200):
        worth = observe_drafted_round(worth, round_ms=round_ms, accepted=3.0, cost_ms=price.step_ms, reading=False)
        worth = decide_drafting(worth, price)
        assert worth.drafting


@given(st.floats(0.0, 8.0), TIMES_MS, TIMES_MS, TIMES_MS, st.floats(0.0, 500.0))
def test_a_text_is_read_for_what_it_can_win_and_what_was_saved(accepted, cost_ms, round_ms, reading_ms, left):
    worth = GateState(TrialAccount(100.0, trusted=True), TRIAL_ROUNDS, accepted, cost_ms)
    if reads(worth, DraftCost(round_ms, cost_ms, reading_ms), left):
        assert reading_ms <= 100.0 * round_ms
        assert reading_ms <= max(100.0 / 4 * round_ms, left * max(0.0, accepted * round_ms - cost_ms)) + 1e-9
        assert reads(worth, DraftCost(round_ms, cost_ms, reading_ms / 2), left)
        assert reads(worth, DraftCost(round_ms, cost_ms, reading_ms), left + 1.0)


def test_nothing_is_risked_while_a_round_is_not_measured():
    assert not decide_drafting(GateState(), DraftCost(0.0, 1.0)).drafting
    assert token_price(3.0, 0.0) == 0.0
    assert token_price(3.0, 12.0) == 0.25


@given(st.floats(0.0, 8.0), TIMES_MS)
def test_worth_is_where_tokens_a_second_stay_the_same(accepted, round_ms):
    assert math.isclose((round_ms + worth_ms(accepted, round_ms)) / (1.0 + accepted), round_ms)
