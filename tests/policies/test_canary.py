"""A share of requests served another way: who is in it, what is known of it, when it ends."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.serving.canary import (
    CanaryMove,
    CanaryVariant,
    Figures,
    Moments,
    PromotionRule,
    arm_of,
    decide_canary,
    difference,
    looks,
    observe_request_figures,
)

IDS = st.lists(st.uuids().map(str), min_size=1, max_size=50, unique=True)
VALUES = st.lists(st.floats(0.1, 1000.0), min_size=2, max_size=60)


def moments(values):
    sums = Moments()
    for value in values:
        sums = sums.with_value(value)
    return sums


@given(IDS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_larger_share_takes_in_all_of_a_smaller_one(ids, one, other):
    small, large = sorted((one, other))
    for request_id in ids:
        if arm_of(request_id, share=small) == CanaryVariant.CANARY:
            assert arm_of(request_id, share=large) == CanaryVariant.CANARY
        assert arm_of(request_id, share=0.0) == CanaryVariant.CONTROL
        assert arm_of(request_id, share=1.0) == CanaryVariant.CANARY


def test_the_share_is_kept_and_another_salt_draws_anew():
    ids = [f"request-{number}" for number in range(4000)]
    first = [arm_of(one, share=0.1, salt="a") == CanaryVariant.CANARY for one in ids]
    second = [arm_of(one, share=0.1, salt="b") == CanaryVariant.CANARY for one in ids]
    assert 300 < sum(first) < 500
    assert sum(a and b for a, b in zip(first, second, strict=True)) < 100


@given(VALUES)
def test_running_sums_are_the_samples(values):
    sums = moments(values)
    assert sums.mean == pytest.approx(statistics.fmean(values))
    assert sums.error_squared * len(values) == pytest.approx(statistics.variance(values), abs=1e-6)


@settings(max_examples=40)
@given(VALUES, VALUES)
def test_the_interval_is_welchs(ours, theirs):
    from scipy import stats  # here: whoever only collects tests needs no second for it

    gap = difference(moments(ours), moments(theirs))
    if min(statistics.pvariance(ours), statistics.pvariance(theirs)) < 1e-6:
        return  # where all values are equal there is nothing to compare with
    wanted = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    width = wanted.high - wanted.low
    assert gap.low <= wanted.low + 1e-3 * width  # degrees of freedom are rounded down: never narrower
    assert gap.high >= wanted.high - 1e-3 * width
    freedom = stats.ttest_ind(ours, theirs, equal_var=False).df
    if freedom > 3:
        assert gap.high - gap.low <= 1.35 * width


@pytest.mark.parametrize("freedom", [*range(1, 32), 40, 100, 10_000])
def test_a_mean_has_the_interval_of_students_t(freedom):
    from scipy import stats

    values = [float(number % 2) for number in range(freedom + 1)]
    interval = moments(values).interval
    low, high = stats.t.interval(0.95, freedom, statistics.fmean(values), stats.sem(values))
    assert interval.high - interval.low == pytest.approx(high - low, rel=5e-4)
    assert (interval.low + interval.high) / 2 == pytest.approx(statistics.fmean(values))


def test_one_value_leaves_everything_open():
    assert moments([5.0]).interval == (-math.inf, math.inf)
    assert moments([5.0, 5.0]).interval == (5.0, 5.0)


def arms(canary_tpot, control_tpot, requests, *, canary_ttft=100.0, spread=1.0):
    """Both arms after so many requests, alike but for their means."""
    found = {}
    for arm, tpot_ms, ttft_ms in (
        (CanaryVariant.CANARY, canary_tpot, canary_ttft),
        (CanaryVariant.CONTROL, control_tpot, 100.0),
    ):
        figures = Figures()
        for index in range(requests):
            off = spread * (index % 5 - 2)
            figures = observe_request_figures(
                figures, ttft_ms=ttft_ms + off, tpot_ms=tpot_ms + 0.2 * off, acceptance=0.5
            )
        found[arm] = figures
    return found


@given(st.floats(5.0, 50.0), st.floats(0.5, 2.0))
def test_better_is_promoted_and_worse_rolled_back(tpot_ms, factor):
    known = arms(factor * tpot_ms, tpot_ms, 400)
    decision = decide_canary(known, PromotionRule())
    if factor < 0.9:
        assert decision.move == CanaryMove.PROMOTE
    if factor > 1.15:
        assert decision.move == CanaryMove.ROLL_BACK
    assert decision.interval.low <= decision.interval.high


@given(st.floats(0.1, 10.0), st.integers(0, 49))
def test_nothing_is_decided_on_few_requests(factor, requests):
    assert decide_canary(arms(10.0 * factor, 10.0, requests), PromotionRule()).move == CanaryMove.GO_ON


@given(st.integers(2, 500), st.integers(1, 40))
def test_promotion_is_looked_for_at_doublings(least, factor):
    rule = PromotionRule(least_requests=least)
    asked = [number for number in range(1, factor * least + 1) if looks(number, rule)]
    assert asked == [n for n in (least * 2**power for power in range(6)) if n <= factor * least]


def test_a_late_first_token_outweighs_fast_ones():
    decision = decide_canary(arms(5.0, 10.0, 400, canary_ttft=120.0), PromotionRule())
    assert (decision.move, decision.figure) == (CanaryMove.ROLL_BACK, "ttft_ms")


def test_what_is_no_better_after_long_goes():
    rule = PromotionRule(most_requests=300)
    assert decide_canary(arms(10.0, 10.0, 299), rule).move == CanaryMove.GO_ON
    assert decide_canary(arms(10.0, 10.0, 300), rule).move == CanaryMove.ROLL_BACK


def test_figures_that_do_not_exist_are_left_out():
    figures = observe_request_figures(Figures(), ttft_ms=5.0, tpot_ms=None, acceptance=None)
    assert (figures.ttft_ms.seen, figures.tpot_ms.seen, figures.acceptance.seen) == (1, 0, 0)
    assert decide_canary({}, PromotionRule()).move == CanaryMove.GO_ON


def agreeing(share, *, seen=80, tpot_ms=10.0):
    figures = Figures()
    for number in range(seen):
        noise = 0.01 * (number % 3)
        figures = observe_request_figures(
            figures, ttft_ms=50.0 + noise, tpot_ms=tpot_ms + noise, acceptance=None, agreement=share - noise / 4
        )
    return figures


def test_a_fast_canary_whose_output_is_too_often_not_the_targets_is_rolled_back():
    rule = PromotionRule(least_agreement=0.95)
    fast = agreeing(0.9, tpot_ms=5.0)
    decision = decide_canary({CanaryVariant.CANARY: fast, CanaryVariant.CONTROL: agreeing(1.0)}, rule)
    assert (decision.move, decision.figure) == (CanaryMove.ROLL_BACK, "agreement")
    assert decision.interval.high < 0.95
    allowed = PromotionRule(least_agreement=0.85)
    decision = decide_canary({CanaryVariant.CANARY: fast, CanaryVariant.CONTROL: agreeing(1.0)}, allowed)
    assert (decision.move, decision.figure) == (CanaryMove.PROMOTE, "tpot_ms")


def test_a_canary_that_may_agree_too_rarely_is_not_promoted_and_not_tried_for_ever():
    rule = PromotionRule(least_agreement=0.95, most_requests=200)
    wide = Figures()
    for number in range(60):
        wide = observe_request_figures(
            wide, ttft_ms=50.0, tpot_ms=5.0 + 0.01 * (number % 3), acceptance=None, agreement=1.0 - 0.1 * (number % 2)
        )
    control = agreeing(1.0)
    assert wide.agreement.interval.low < 0.95 < wide.agreement.interval.high
    assert decide_canary({CanaryVariant.CANARY: wide, CanaryVariant.CONTROL: control}, rule).move is CanaryMove.GO_ON
    late = PromotionRule(least_agreement=0.95, most_requests=60)
    decision = decide_canary({CanaryVariant.CANARY: wide, CanaryVariant.CONTROL: control}, late)
    assert (decision.move, decision.figure) == (CanaryMove.ROLL_BACK, "agreement")
