"""Drafts that cost more time than they save are left alone, and looked at again ever more rarely."""

from hypothesis import given
from hypothesis import strategies as st

from policies.worth import (
    FIRST_PAUSE_ROUNDS,
    LONGEST_PAUSE_ROUNDS,
    TRIAL_ROUNDS,
    Worth,
    decided,
    drafted,
    judged,
    pays,
    token_price,
)

TIMES_MS = st.floats(0.01, 1000.0)


def lived(accepted: int, draft_ms: float, round_ms: float, rounds: int) -> list[bool]:
    """The decisions of so many rounds in which every draft goes alike."""
    worth, asked = Worth(), []
    for _ in range(rounds):
        worth, goes = decided(worth, round_ms)
        asked.append(goes)
        if goes:
            worth = judged(drafted(worth, draft_ms), accepted)
    return asked


@given(st.integers(0, 16), TIMES_MS, TIMES_MS)
def test_what_pays_is_asked_in_every_round_and_what_does_not_hardly_ever(accepted, draft_ms, round_ms):
    asked = lived(accepted, draft_ms, round_ms, 3000)
    assert all(asked[:TRIAL_ROUNDS])
    if draft_ms < 0.999 * accepted * round_ms:
        assert all(asked)
    if draft_ms > 1.001 * accepted * round_ms:
        assert sum(asked) <= 7 * TRIAL_ROUNDS
        assert not any(asked[TRIAL_ROUNDS : TRIAL_ROUNDS + FIRST_PAUSE_ROUNDS])


@given(TIMES_MS, TIMES_MS)
def test_a_draft_that_becomes_good_is_found_again(draft_ms, round_ms):
    worth = Worth(accepted=0.0, draft_ms=draft_ms, verdicts=TRIAL_ROUNDS)
    waited = 0
    worth, goes = decided(worth, round_ms)
    while not goes:
        waited += 1
        worth, goes = decided(worth, round_ms)
    assert waited == FIRST_PAUSE_ROUNDS
    for _ in range(200):
        worth = judged(drafted(worth, round_ms / 2), 3)
        worth, goes = decided(worth, round_ms)
    assert goes
    assert worth.pause == 0


@given(st.integers(1, 9))
def test_pauses_double_up_to_a_bound(trials):
    worth = Worth(accepted=0.0, draft_ms=1.0, verdicts=TRIAL_ROUNDS)
    longest = 0
    for _ in range(trials):
        worth, goes = decided(worth, 1.0)
        waited = 0
        while not goes:
            waited += 1
            worth, goes = decided(worth, 1.0)
        longest = max(longest, waited)
        for _ in range(TRIAL_ROUNDS - 1):
            worth, goes = decided(worth, 1.0)
            assert goes
    assert longest == min(FIRST_PAUSE_ROUNDS << (trials - 1), LONGEST_PAUSE_ROUNDS)


def test_nothing_is_held_back_while_a_round_is_not_measured():
    assert pays(Worth(accepted=0.0, draft_ms=50.0), 0.0)
    assert token_price(3.0, 0.0) == 0.0
    assert token_price(3.0, 12.0) == 0.25
