"""Waiting for drafts never costs more than they are worth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.draft_wait import (
    RETRY,
    DraftWait,
    count_draft_request,
    observe_accepted_tokens,
    observe_draft_answer,
    patience_ms,
)

milliseconds = st.floats(0.01, 10_000.0)


@given(st.floats(0.0, 20.0), milliseconds, milliseconds, st.floats(0.0, 2.0), st.integers(0, 1000), st.floats(0.0, 1e4))
def test_it_waits_no_longer_than_bound_and_worth(accepted, token_ms, answer_ms, row_share, asks, bound_ms):
    row_ms = row_share * token_ms
    waited = patience_ms(DraftWait(accepted, answer_ms, asks), token_ms, row_ms, bound_ms)
    assert 0.0 <= waited <= bound_ms
    # a tokens are no fewer than decoding makes in the wait and the time of a rows, or nothing is waited for
    assert waited == 0.0 or (waited + accepted * row_ms) / token_ms <= accepted * (1.0 + 1e-9)


@given(st.floats(0.1, 20.0), milliseconds)
def test_what_comes_in_time_on_average_is_waited_for(accepted, round_ms):
    pace = DraftWait(accepted, 0.9 * accepted * round_ms, 1)
    assert patience_ms(pace, round_ms, 0.0, 1e9) >= pace.answer_ms


@given(st.floats(0.1, 5.0), st.floats(1.0, 100.0))
def test_what_comes_too_late_is_waited_for_once_in_a_while(accepted, round_ms):
    pace = DraftWait(accepted, 1.1 * accepted * round_ms + 1.0)
    waits = []
    for _ in range(4 * RETRY.interval):
        pace = count_draft_request(pace)
        waits.append(patience_ms(pace, round_ms, 0.0, 1e9) > 0.0)
    assert sum(waits) == 4


@given(st.lists(st.integers(0, 12), min_size=1), milliseconds)
def test_means_stay_among_what_was_seen(counts, answer_ms):
    pace = observe_draft_answer(DraftWait(), answer_ms)
    assert pace.answer_ms == answer_ms
    for count in counts:
        pace = observe_accepted_tokens(pace, count)
    assert min([1.0, *counts]) - 1e-9 <= pace.accepted <= max([1.0, *counts]) + 1e-9
