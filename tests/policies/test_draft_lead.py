"""How many tokens a link's round trip is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.draft_wait import MOST_LEAD, DraftWait, count_lead_tokens, gain_ms


@pytest.mark.parametrize(
    ("rtt_ms", "round_ms", "accepted", "lead"),
    [(0.0, 24.0, 3.0, 0), (0.3, 24.0, 3.0, 0), (12.0, 24.0, 3.0, 2), (48.0, 24.0, 3.0, 8), (12.0, 0.0, 3.0, 0)],
)
def test_a_line_runs_ahead_by_the_rounds_of_a_round_trip(rtt_ms, round_ms, accepted, lead) -> None:
    assert count_lead_tokens(rtt_ms, round_ms, accepted) == lead


@given(st.floats(0, 1e4), st.floats(0.1, 1e3), st.floats(0, 12))
def test_a_longer_way_never_needs_a_shorter_lead(rtt_ms, round_ms, accepted) -> None:
    lead = count_lead_tokens(rtt_ms, round_ms, accepted)
    assert 0 <= lead <= count_lead_tokens(2.0 * rtt_ms, round_ms, accepted) <= MOST_LEAD


def test_waiting_gains_what_is_not_there_yet() -> None:
    assert gain_ms(DraftWait(accepted=3.0), 10.0, 0.0, 1.0) == 20.0
    assert gain_ms(DraftWait(accepted=3.0), 10.0, 0.0, 4.0) == 0.0
    assert gain_ms(DraftWait(accepted=3.0), 10.0, 2.5, 1.0) == 15.0
    assert gain_ms(DraftWait(accepted=3.0), 10.0, 20.0, 1.0) == 0.0
