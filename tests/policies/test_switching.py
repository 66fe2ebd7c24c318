"""Switching speculation off and on, and what looking again may cost."""

from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.switching import (
    LEAST_ROUNDS,
    ON,
    PROBE_SHARE,
    TRIAL_ROUNDS,
    active,
    observe_plain_round,
    observe_speculative_round,
)


def live_through(gains, *, plain_ms=10.0, switch=ON):
    """Rounds, each with the gain that speculation would have; a round with speculation takes what its gain says, for
    as many tokens as a plain one. Returns the switch, whether each round speculated, and the time lost."""
    spoke, lost_ms, plain = [], 0.0, 0.0
    for gain in gains:
        spoke.append(active(switch))
        plain += plain_ms
        if active(switch):
            lost_ms += plain_ms / gain - plain_ms
            switch = observe_speculative_round(switch, gain, plain_ms / gain)
        else:
            switch = observe_plain_round(switch, plain_ms)
    return switch, spoke, lost_ms / plain if plain else 0.0


@given(st.floats(1.0, 4.0), st.integers(1, 300))
def test_what_pays_stays_on(gain, rounds):
    switch, spoke, _ = live_through([gain] * rounds)
    assert all(spoke)
    assert switch.on


@given(st.floats(0.2, 0.98))
def test_what_does_not_pay_costs_next_to_nothing(gain):
    switch, spoke, lost = live_through([gain] * 2000)
    assert not switch.on
    assert sum(spoke[: LEAST_ROUNDS + 1]) == LEAST_ROUNDS
    _, _, later = live_through([gain] * 4000, switch=switch)
    assert later <= 1.5 * PROBE_SHARE
    assert lost <= 0.02 + LEAST_ROUNDS * (1 / gain - 1) / 2000


@given(st.floats(0.3, 0.9), st.floats(1.05, 4.0), st.integers(50, 2000))
def test_what_pays_again_is_found(bad, good, before):
    switch, _, _ = live_through([bad] * before)
    switch, spoke, _ = live_through([good] * 3000, switch=switch)
    assert switch.on
    assert spoke[-1]
    assert all(spoke[2500:])  # the first trial may have begun while it was bad


@given(st.floats(1.05, 4.0), st.floats(0.3, 1.0), st.integers(1, 40))
def test_a_trial_that_has_to_read_first_is_judged_by_what_comes_then(good, reading, rounds):
    switch, _, _ = live_through([0.5] * 50)
    while not active(switch):
        switch = observe_plain_round(switch, 10.0)
    for _ in range(rounds):
        switch = observe_speculative_round(switch, reading, 10.0 / reading, reading=True)
        assert active(switch)
    for _ in range(TRIAL_ROUNDS):
        switch = observe_speculative_round(switch, good, 10.0)
    assert switch.on


@given(st.floats(0.3, 0.95), st.floats(0.5, 0.95), st.integers(1, 20))
def test_reading_for_trials_costs_no_more_than_other_looks(bad, reading, rounds):
    """Every trial has a text to read first, as where each request has another."""
    switch, _, _ = live_through([0.5] * 50)
    lost_ms = plain_ms = 0.0
    left = rounds
    for _ in range(20_000):
        plain_ms += 10.0
        if not active(switch):
            switch, left = observe_plain_round(switch, 10.0), rounds
            continue
        gain = reading if left else bad
        switch = observe_speculative_round(switch, gain, 10.0 / gain, reading=left > 0)
        lost_ms, left = lost_ms + 10.0 / gain - 10.0, max(0, left - 1)
    first_ms = rounds * (10.0 / reading - 10.0)  # what nobody could know of
    assert lost_ms <= 1.5 * PROBE_SHARE * plain_ms + first_ms + TRIAL_ROUNDS * (10.0 / bad)


@given(st.lists(st.floats(0.995, 1.015), min_size=50, max_size=300))
def test_about_even_does_not_flutter(gains):
    """Within the margins the switch stays as it is: on where it was on, off where it was off."""
    _, spoke, _ = live_through(gains)
    assert all(spoke)
    switch, _, _ = live_through([0.5] * 50)
    assert not switch.on
    switch, _, _ = live_through(gains, switch=switch)
    assert not switch.on


@given(st.floats(1.05, 3.0), st.integers(20, 200))
def test_a_few_bad_rounds_do_not_switch_it_off(gain, rounds):
    switch, _, _ = live_through([gain] * rounds)
    for _ in range(2):
        switch = observe_speculative_round(switch, gain - 0.25, 10.0)
    assert switch.on or gain < 1.1
