"""When a draft worker that helps nobody is let rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.serving.draft_rest import REST_AFTER_S, DraftUse, RestTrend, follow_use

STEP = st.tuples(st.floats(0.1, 20.0), st.booleans(), st.integers(0, 40), st.integers(0, 5))


@given(st.lists(STEP, min_size=1, max_size=30))
def test_one_rests_only_where_nobody_was_helped_for_long_enough_and_rounds_were_run(steps):
    """`steps`: time that passes, whether the replica leaves it alone, rounds that it runs, tokens that it accepts."""
    now_s, trend, use = 0.0, RestTrend(), DraftUse("", 1)
    helped_s, rounds_then = 0.0, 0
    for passed_s, left_alone, rounds, accepted in steps:
        now_s += passed_s
        use = DraftUse("it does not pay" * left_alone, use.asks + 1, use.accepted + accepted, use.rounds + rounds)
        if accepted and not left_alone:
            helped_s, rounds_then = now_s, use.rounds
        change = follow_use(trend, [use], now_s)
        trend = change.trend
        if change.why:
            assert now_s - helped_s >= REST_AFTER_S
            assert use.rounds > rounds_then
            return


@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_it_rests_where_all_that_used_it_leave_it_alone_and_stays_where_one_is_helped(left_alone):
    def say(turn: int) -> list[DraftUse]:
        return [DraftUse("no gain" * alone, 9, turn * (not alone), 100 * turn) for alone in left_alone]

    trend = follow_use(RestTrend(), say(0), 0.0).trend
    for turn in range(1, 40):
        change = follow_use(trend, say(turn), float(turn))
        trend = change.trend
        if change.why:
            assert all(left_alone)
            assert turn == REST_AFTER_S
            assert change.why.endswith("no gain")
            return
    assert not all(left_alone)


def test_a_draft_of_which_no_token_is_ever_right_rests_whatever_the_policy_says():
    trend = follow_use(RestTrend(), [DraftUse(asks=1)], 0.0).trend
    why = follow_use(trend, [DraftUse(asks=200, rounds=200)], REST_AFTER_S).why
    assert why.endswith("none of its tokens was accepted")
    assert not follow_use(trend, [DraftUse(asks=1, rounds=200)], REST_AFTER_S).why, "no request may be drafted for"


def test_only_the_time_counts_for_which_all_left_it_alone():
    trend = follow_use(RestTrend(), [DraftUse(asks=9, rounds=9)], 0.0).trend
    change = follow_use(trend, [DraftUse("no gain", 9, 0, 500)], 29.0)
    assert change.trend.since_s == 29.0
    assert not follow_use(change.trend, [DraftUse("no gain", 9, 0, 900)], 40.0).why
    assert follow_use(change.trend, [DraftUse("no gain", 9, 0, 900)], 59.0).why


def test_without_rounds_and_before_anybody_asked_nothing_is_known():
    idle = DraftUse("no gain", 9, 0, 100)
    trend = follow_use(RestTrend(), [idle], 0.0).trend
    assert not follow_use(trend, [idle], 1000.0).why
    assert follow_use(RestTrend(), [DraftUse(rounds=500)], 0.0).trend.since_s is None


def test_a_replica_whose_counts_begin_anew_begins_the_time_anew():
    trend = follow_use(RestTrend(), [DraftUse("no gain", 9, 3, 500)], 0.0).trend
    again = follow_use(trend, [DraftUse("no gain", 1, 0, 60)], REST_AFTER_S)
    assert (again.why, again.trend.since_s) == ("", REST_AFTER_S)
