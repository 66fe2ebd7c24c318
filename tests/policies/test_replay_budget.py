"""Properties of the budget of replays beside streams that decode."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.replay_budget import (
    REPLAY_SHARE,
    ReplayBudget,
    bound_replay_rows,
    observe_decoding,
    observe_replay,
    share_replay_rows,
)

MS = st.floats(0.1, 1000.0)
BUDGETS = st.builds(ReplayBudget, MS, st.none() | st.floats(0.0, 50.0), st.floats(0.0, 1000.0), st.booleans())


def run(decode_ms: float, row_ms: float, chunk_ms: float, forwards: int = 400) -> tuple[float, list[int]]:
    """Return the time that replays took, as a share of what decoding took, and the rows of each forward. A chunk costs
    `chunk_ms` and `row_ms` a row."""
    rows, extra_ms = [0], 0.0
    budget = observe_decoding(ReplayBudget(), decode_ms)
    for _ in range(forwards):
        rows.append(bound_replay_rows(budget, bound_ms=200.0, most=256))
        cost_ms = chunk_ms + rows[-1] * row_ms if rows[-1] else 0.0
        extra_ms += cost_ms
        if rows[-1]:
            budget = observe_replay(budget, decode_ms + cost_ms, rows=rows[-1])
        else:
            budget = observe_decoding(budget, decode_ms)
    return extra_ms / (forwards * decode_ms), rows


@given(MS, st.floats(0.01, 5.0), st.floats(0.0, 100.0))
def test_the_share_is_kept_whatever_a_chunk_costs(decode_ms, row_ms, chunk_ms):
    share, rows = run(decode_ms, row_ms, chunk_ms)
    if chunk_ms + max(rows) * row_ms <= 4.0 * decode_ms:  # else it is more debt than is kept, so that replays get on
        assert share <= 1.3 * REPLAY_SHARE
    assert not any(before and after for before, after in itertools.pairwise(rows))


@given(MS, st.floats(0.01, 50.0), st.floats(0.0, 1000.0))
def test_replays_always_get_on(decode_ms, row_ms, chunk_ms):
    _, rows = run(decode_ms, row_ms, chunk_ms, forwards=60)
    pause = 0
    for one in rows[1:]:
        pause = 0 if one else pause + 1
        assert pause <= 9
    assert min(one for one in rows if one) >= 16


@given(MS, st.floats(0.01, 50.0), st.floats(0.0, 100.0))
def test_a_forward_with_a_replay_keeps_the_bound_where_decoding_leaves_room_for_the_least(decode_ms, row_ms, chunk_ms):
    _, rows = run(decode_ms, row_ms, chunk_ms)
    settled = rows[-1] or rows[-2] or max(rows[200:])
    if settled > 16:
        assert settled * row_ms <= max(2.0 * REPLAY_SHARE * decode_ms, 200.0 - decode_ms) * (1 + 1e-9)


@given(BUDGETS, st.floats(0.0, 50.0), st.floats(0.0, 50.0), st.integers(16, 512), st.floats(1.0, 1000.0))
def test_rows_are_within_what_may_be_and_dear_ones_are_never_more(budget, row_ms, more_ms, most, bound_ms):
    assert 0 <= bound_replay_rows(budget, bound_ms=bound_ms, most=most) <= most
    cheap, dear = (budget._replace(row_ms=ms) for ms in (row_ms, row_ms + more_ms))
    rows = [bound_replay_rows(cost, bound_ms=bound_ms, most=most) for cost in (cheap, dear)]
    if budget.debt_ms > REPLAY_SHARE * budget.decode_ms or budget.rests:
        assert rows == [0, 0]
    else:
        assert rows[1] <= max(rows[0], 32)


def test_cheap_rows_use_the_share():
    share, _ = run(decode_ms=50.0, row_ms=1.0, chunk_ms=10.0)
    assert 0.7 * REPLAY_SHARE < share < 1.1 * REPLAY_SHARE


@given(st.lists(st.integers(1, 300), max_size=12), st.integers(0, 512), st.integers(1, 4))
def test_rows_go_to_the_first_that_wait(wanted, rows, min_rows):
    given_rows = share_replay_rows(wanted, rows, min_rows=min_rows)
    assert sum(max(one, min_rows) for one in given_rows if one) <= rows
    short = [index for index, given in enumerate(given_rows) if given < wanted[index]]
    assert all(given_rows[index] == 0 for index in short[1:])
    if wanted and rows >= min_rows:
        assert given_rows[0]
