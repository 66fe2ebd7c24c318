"""Rows of a forward go to replays first, to prompts as well, and never beyond what the forward has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.prefill_shares import PrefillRows, bound_prefill_rows, share_rows, waits_for_replays
from policies.serving.replay_budget import ReplayBudget

WANTED = st.lists(st.integers(1, 300), max_size=8)
BOUNDS = st.none() | st.builds(PrefillRows, st.integers(0, 512), st.integers(0, 512))


@given(WANTED, WANTED, st.integers(0, 512), BOUNDS, st.integers(1, 4))
def test_nobody_gets_more_than_it_can_use_and_all_no_more_than_there_is(replays, prompts, rows, bound, min_rows):
    shares = share_rows(replays, prompts, rows, bound=bound, min_rows=min_rows)
    assert all(0 < count <= replays[place] for place, count in shares.replays)
    assert all(0 < count <= prompts[place] for place, count in shares.prompts)
    charged = [max(count, min_rows) for _, count in (*shares.replays, *shares.prompts)]
    most = rows if bound is None else min(rows, max(bound.every, bound.replays if not prompts else 0))
    assert sum(charged) <= most
    for places in ([place for place, _ in shares.replays], [place for place, _ in shares.prompts]):
        assert len(set(places)) == len(places)


@given(WANTED, WANTED, st.integers(0, 512), BOUNDS, st.integers(1, 4))
def test_replays_and_prompts_both_get_on(replays, prompts, rows, bound, min_rows):
    shares = share_rows(replays, prompts, rows, bound=bound, min_rows=min_rows)
    most = rows if bound is None else min(rows, bound.every)
    assert bool(shares.prompts) == bool(prompts and most >= (2 if replays else 1) * min_rows)
    if not prompts:
        most = rows if bound is None else min(rows, bound.replays)
    assert bool(shares.replays) == bool(replays and most >= min_rows)


@given(st.lists(st.floats(0.0, 100.0), max_size=6), st.lists(st.floats(0.0, 100.0), max_size=6))
def test_only_a_stream_that_decoded_before_the_first_replay_came_waits_for_it(first_token_s, came_s):
    waits = waits_for_replays(first_token_s, came_s)
    assert waits == (bool(came_s) and any(0.0 < one <= min(came_s) for one in first_token_s))


@given(st.none() | st.floats(0.0, 20.0), st.floats(0.0, 100.0), st.integers(1, 512), st.floats(0.1, 2.0))
def test_replays_rest_only_where_a_stream_waits_for_them(row_ms, decode_ms, most, share):
    rests = ReplayBudget(decode_ms=decode_ms, rests=True)
    found = [
        bound_prefill_rows(
            rests, row_ms=row_ms, decode_ms=decode_ms, bound_ms=100.0, most=most, share=share, waits=waits
        )
        for waits in (True, False)
    ]
    assert found[0].replays == 0
    assert 0 < found[0].every == found[1].every == found[1].replays <= most
