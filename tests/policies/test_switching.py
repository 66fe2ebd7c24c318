"""Switching drafters that have no gate off and on, and what looking again may cost."""

from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.switching import (
    ON,
    active,
    observe_plain_rounds,
    observe_speculative_round,
    observe_start,
)
from policies.speculation.trial_account import FIRST_ROUNDS, MOST_CREDIT, SHARE, STAKE

SHARES_OF_ROUND = st.floats(0.05, 3.0)


def live_through(wins, *, switch=ON):
    """Rounds, each with what speculation would win in it. Returns the switch, whether each round speculated, and what
    all of them lost."""
    spoke, lost = [], 0.0
    for won in wins:
        spoke.append(active(switch))
        if active(switch):
            lost -= won
            switch = observe_speculative_round(switch, won)
        else:
            switch = observe_plain_rounds(switch)
    return switch, spoke, lost


@given(st.floats(0.0, 4.0), st.integers(1, 300))
def test_what_pays_stays_on(won, rounds):
    switch, spoke, _ = live_through([won] * rounds)
    assert all(spoke)
    assert active(switch)


@given(SHARES_OF_ROUND)
def test_what_does_not_pay_costs_next_to_nothing(loss):
    switch, spoke, lost = live_through([-loss] * 4000)
    assert sum(spoke[:100]) <= STAKE / loss + 1
    assert lost <= FIRST_ROUNDS + SHARE * 4000 + loss
    _, _, later = live_through([-loss] * 4000, switch=switch)
    assert later <= SHARE * 4000 + STAKE + 2 * loss


@given(st.lists(st.floats(-2.0, 4.0), max_size=400))
def test_no_more_is_lost_than_was_saved_and_one_round(wins):
    _, _, lost = live_through(wins)
    assert lost <= FIRST_ROUNDS + SHARE * len(wins) + 2.0


@given(SHARES_OF_ROUND, st.floats(0.05, 4.0), st.integers(50, 2000))
def test_what_pays_again_is_found(loss, won, before):
    switch, _, _ = live_through([-loss] * before)
    switch, spoke, _ = live_through([won] * 4000, switch=switch)
    assert active(switch)
    assert all(spoke[3000:])


@given(st.floats(0.5, 1.0), SHARES_OF_ROUND)
def test_another_request_is_a_reason_to_look_again(won, loss):
    """As long as something is left of what was won."""
    switch, _, _ = live_through([won] * 200)
    while active(switch):
        switch = observe_speculative_round(switch, -loss)
    assert not active(observe_plain_rounds(switch)), "the same text is not tried again at once"
    assert active(observe_plain_rounds(observe_start(switch)))


@given(st.floats(0.05, 4.0), st.floats(0.0, 0.5), st.integers(1, 40))
def test_a_trial_that_has_to_read_first_is_judged_by_what_comes_then(won, reading, rounds):
    switch, _, _ = live_through([-0.5] * 20)
    while not active(switch):
        switch = observe_plain_rounds(switch)
    for _ in range(rounds):
        switch = observe_speculative_round(switch, -reading, reading=True)
        assert active(switch)
    switch, _, _ = live_through([won] * 20, switch=switch)
    assert active(switch)


@given(SHARES_OF_ROUND, st.floats(0.0, 0.5), st.integers(1, 20))
def test_reading_for_trials_costs_no_more_than_other_looks(loss, reading, rounds):
    """Every trial has a text to read first, as where each request has another."""
    switch, _, _ = live_through([-0.5] * 50)
    lost, left = 0.0, rounds
    for _ in range(20_000):
        if not active(switch):
            switch, left = observe_plain_rounds(switch), rounds
            continue
        won = -reading if left else -loss
        switch = observe_speculative_round(switch, won, reading=left > 0)
        lost, left = lost - won, max(0, left - 1)
    assert lost <= SHARE * 20_000 + rounds * reading + FIRST_ROUNDS + loss


@given(st.floats(0.05, 0.5), st.integers(20, 200))
def test_bad_rounds_in_a_row_are_borne_for_a_while(won, rounds):
    switch, _, _ = live_through([won] * rounds)
    credit = min(MOST_CREDIT, STAKE + won * rounds)
    for _ in range(int(credit / 0.5) - 1):
        switch = observe_speculative_round(switch, -0.5)
        assert active(switch)
