"""A round's depths, from what was asked to what was learned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_profiles.cost import StepCost
from policies.speculation import (
    DraftComparison,
    DraftSummary,
    Rest,
    RoundContext,
    RoundSequence,
    RoundTimes,
    SpeculationState,
    decide_depths,
    decide_draft_limits,
    end_request,
    least_chance,
    observe_round,
    start_request,
)
from policies.speculation.adaptive import Adaptive
from policies.speculation.ask import MANY, REST_LOOKS, SELDOM, SELDOM_OF_MANY
from policies.speculation.cost_model import start_cost_model
from policies.speculation.policy import RoundOutcome
from policies.speculation.shape_hysteresis import ShapeHysteresis
from policies.speculation.switching import active

FIT = StepCost((1.0, 2.0, 8.0, 32.0, 128.0), (7.3, 7.7, 10.9, 27.0, 95.0), 0.25)
CONFIDENCES = st.lists(st.floats(0.0, 1.0), max_size=10).map(tuple)


def start_state(count, most=12):
    state = SpeculationState(start_cost_model(FIT))
    for number in range(count):
        state = start_request(state, str(number), most)
    return state


def one_round(state, now, proposals, right):
    """Run a round of which draft s has `right[s]` right tokens; returns the state and the depths."""
    decision = decide_depths(state, now, proposals)
    accepted = [min(depth, good) for depth, good in zip(decision.depths, right, strict=True)]
    verdicts = [
        DraftComparison(min(good, done + 1, draft.tokens), min(draft.tokens, done + 1))
        for good, done, draft in zip(right, accepted, proposals, strict=True)
    ]
    rows = now.base_rows + sum(
        max(0, depth - place.free) for depth, place in zip(decision.depths, now.places, strict=True)
    )
    times = RoundTimes(FIT.ms(rows, len(now.places)))
    tokens = len(now.places) + sum(accepted)
    return observe_round(state, now, proposals, decision, verdicts, times=times, tokens_made=tokens), decision.depths


@given(
    st.lists(st.tuples(CONFIDENCES, st.integers(0, 10), st.integers(0, 12), st.booleans()), min_size=1, max_size=20),
    st.integers(0, 40),
    st.integers(0, 1),
    st.integers(1, 4),
)
def test_depths_keep_to_bounds_drafts_and_room(drafts, room, free, rounds):
    state = start_state(len(drafts))
    places = [
        RoundSequence(str(index), most, free=free, fixed=fixed) for index, (_, _, most, fixed) in enumerate(drafts)
    ]
    now = RoundContext(places, (1 + free) * len(places), room)
    proposals = [DraftSummary(len(confidences), confidences) for confidences, _, _, _ in drafts]
    for _ in range(rounds):
        state, depths = one_round(state, now, proposals, [right for _, right, _, _ in drafts])
        for depth, place, draft in zip(depths, places, proposals, strict=True):
            assert 0 <= depth <= min(place.max_draft_tokens, draft.tokens)
            assert depth >= min(free, place.max_draft_tokens, draft.tokens)  # its row is paid for
        assert sum(max(0, depth - free) for depth in depths) <= room


@given(
    st.lists(CONFIDENCES, min_size=1, max_size=16),
    st.floats(0.25, 2.0),
    st.floats(1.0, 3.0),
    st.integers(0, 60),
)
def test_dearer_rows_are_never_more(drafts, price, factor, filling):
    state = start_state(len(drafts))
    now = RoundContext(
        [RoundSequence(str(index), 12) for index in range(len(drafts))], len(drafts), 200, filling_rows=filling
    )
    proposals = [DraftSummary(len(confidences), confidences) for confidences in drafts]
    cheap = decide_depths(state, now._replace(row_price=price), proposals).depths
    dear = decide_depths(state, now._replace(row_price=price * factor), proposals).depths
    assert all(few <= many for few, many in zip(dear, cheap, strict=True))


@given(st.integers(1, 16), st.integers(0, 12))
def test_a_fixed_depth_is_not_second_guessed(sequences, depth):
    state = start_state(sequences)
    places = [RoundSequence(str(number), depth, fixed=True) for number in range(sequences)]
    now = RoundContext(places, sequences, 500)
    proposals = [DraftSummary(12, (0.01,) * 12)] * sequences
    for _ in range(4):
        state, depths = one_round(state, now, proposals, [0] * sequences)
        assert depths == [depth] * sequences
    assert decide_draft_limits(state, now) == [depth] * sequences


@given(st.integers(1, 16))
def test_random_tokens_are_left_alone_however_sure_the_drafter_is(sequences):
    state = start_state(sequences)
    now = RoundContext([RoundSequence(str(number), 12) for number in range(sequences)], sequences, 200)
    proposals = [DraftSummary(12, (0.95,) * 12)] * sequences
    for _ in range(60):
        state, depths = one_round(state, now, proposals, [0] * sequences)
    assert depths == [0] * sequences
    for _ in range(60):  # and found again without a probe: a first token can be compared though it was not verified
        state, depths = one_round(state, now, proposals, [12] * sequences)
    assert (
        sum(depth > 0 for depth in depths) >= 0.75 * sequences
    )  # the last ones have to be surer: rows are dear by then


@given(st.integers(2, 16))
def test_rows_go_to_those_whose_drafts_are_accepted(sequences):
    state = start_state(sequences)
    now = RoundContext([RoundSequence(str(number), 12) for number in range(sequences)], sequences, 200)
    right = [12 if number % 2 else 0 for number in range(sequences)]
    for _ in range(40):
        state, depths = one_round(state, now, [DraftSummary(12, (0.7,) * 12)] * sequences, right)
    assert all(depth == 0 for depth in depths[::2])
    assert all(depth > 0 for depth in depths[1::2])


def test_a_request_begins_where_it_is_told_within_its_bound():
    state = start_state(0)._replace(first_depth=7.0)
    state = start_request(start_request(state, "new", 12), "short", 3)
    assert state.requests["new"].pid.depth == 7
    assert state.requests["short"].pid.depth == 3


def test_a_request_that_goes_on_is_as_it_was_and_one_that_is_unknown_is_ignored():
    state = start_state(2)
    assert start_request(state, "0", 3) is state
    assert end_request(state, "nobody") is state
    assert set(end_request(state, "0").requests) == {"1"}


@given(st.integers(1, 8))
def test_a_drafter_that_costs_more_than_it_saves_is_not_asked(sequences):
    state = start_state(sequences)
    now = RoundContext([RoundSequence(str(number), 8) for number in range(sequences)], sequences, 100)
    calls = 0
    for _ in range(300):
        limits = decide_draft_limits(state, now) if active(state.switch) else [0] * sequences
        calls += any(limits)
        proposals = [DraftSummary(limit, (0.5,) * limit) for limit in limits]
        decision = decide_depths(state, now, proposals)._replace(asks=sum(limit > 0 for limit in limits))
        verdicts = [DraftComparison(0, min(1, limit)) for limit in limits]
        times = RoundTimes(FIT.ms(sequences + sum(decision.depths), sequences), 5.0 if any(limits) else 0.0)
        state = observe_round(state, now, proposals, decision, verdicts, times=times, tokens_made=sequences)
    assert not active(state.switch)
    assert calls < 30


@given(st.floats(0.0, 50.0))
def test_what_a_drafter_judges_by_itself_is_not_judged_again(draft_ms):
    state = start_state(1)
    now = RoundContext([RoundSequence("0", 8)], 1, 100)
    for _ in range(100):
        decision = decide_depths(state, now, [DraftSummary()])._replace(asks=1)
        times = RoundTimes(FIT.ms(1, 1), draft_ms, gated_ms=draft_ms)
        state = observe_round(state, now, [DraftSummary()], decision, [DraftComparison()], times=times, tokens_made=1)
    assert active(state.switch)


@given(st.integers(1, 16), st.floats(0.0, 5.0))
def test_a_drafter_may_stop_where_a_token_is_not_worth_its_row(sequences, step_ms):
    state = start_state(sequences)
    now = RoundContext([RoundSequence(str(number), 8) for number in range(sequences)], sequences, 100)
    least = least_chance(state, now)
    assert 0.0 < least < 1.0
    taken = decide_depths(state, now, [DraftSummary(1, (min(0.97, least + 0.05),))] * sequences).depths
    assert sum(taken) >= 1 or sequences * 2 > 32  # rows get dearer from 32 on
    assert decide_depths(state, now, [DraftSummary(1, (least - 0.02,))] * sequences).depths == [0] * sequences


@given(st.lists(st.floats(0.5, 2.0), min_size=5, max_size=60))
def test_time_is_worth_no_less_than_plain_decoding(noise):
    """However rounds go, a row is never bought for more time than plain decoding needs for its token."""
    state = start_state(1)
    now = RoundContext([RoundSequence("0", 8)], 1, 100)
    for factor in noise:
        proposals = [DraftSummary(8, (0.6,) * 8)]
        decision = decide_depths(state, now, proposals)
        times = RoundTimes(factor * FIT.ms(1 + decision.depths[0]))
        state = observe_round(state, now, proposals, decision, [DraftComparison(0, 1)], times=times, tokens_made=1)
        assert state.cost.ms(1) > 0.0
    state = state._replace(shape=ShapeHysteresis())  # rows are kept for what a change takes, not for the token
    for confidence in (0.01, 0.02):
        assert decide_depths(state, now, [DraftSummary(1, (confidence,))]).depths == [0]


def test_static_widths_are_filled():
    state = start_state(2)
    now = RoundContext([RoundSequence("0", 12, free=0), RoundSequence("1", 12, free=0)], 2, 100, widths=(1, 4, 8))
    _, depths = one_round(state, now, [DraftSummary(12, (0.95,) * 12)] * 2, [12, 12])
    assert all(1 + depth in (1, 4, 8) for depth in depths)
    assert max(depths) == pytest.approx(3, abs=0)  # a cold request begins with few


def test_the_last_tokens_of_a_request_do_not_teach_its_controller_to_be_shallow():
    """What is left to say bounds the depth of the round, not the controller."""
    state = start_state(1)
    for left in (12,) * 20 + (1,) * 10:
        now = RoundContext([RoundSequence("0", left)], 1, 100)
        state, _ = one_round(state, now, [DraftSummary(left, (0.8,) * left)], [left])
    assert state.requests["0"].pid.integral > 6


@given(st.sampled_from([1, 4, 16]))
def test_drafters_whose_drafts_bring_nothing_are_asked_seldom_and_found_again(sequences):
    policy, places = Adaptive(start_cost_model(FIT)), [RoundSequence(str(number), 12) for number in range(sequences)]
    now = RoundContext(places, sequences, 200)
    for place in places:
        policy.begin(place.key, 12)
    rests = 0

    def rounds(count, right):
        nonlocal rests
        asks = resting = 0
        for _ in range(count):
            if resting:
                resting -= 1
                continue
            limits = policy.decide_draft_limits(now).limits
            asks += any(limits)
            proposals = [DraftSummary(limit, (0.95,) * limit) for limit in limits]
            depths = policy.decide_depths(now, proposals)
            accepted = [min(depth, right) for depth in depths]
            verdicts = [
                DraftComparison(min(right, done + 1, one.tokens), min(one.tokens, done + 1))
                for done, one in zip(accepted, proposals, strict=True)
            ]
            times = RoundTimes(FIT.ms(sequences + sum(depths), sequences), 0.3 if any(limits) else 0.0)
            done = RoundOutcome(proposals, depths, accepted, verdicts, times, sequences + sum(accepted))
            policy.observe_round(now, done)
            resting = policy.decide_pause()
            if resting:
                policy.observe_pause(resting, sequences)
            rests += resting
        assert not resting, "it has no part in a round in which it would ask"
        return asks

    every = (SELDOM if sequences < MANY else SELDOM_OF_MANY).interval
    assert str(policy.rest) == Rest.NONE.value
    rounds(20 * every, 0)
    rests = 0
    assert rounds(5 * every, 0) == 5
    assert rests == 5 * (every - REST_LOOKS)
    assert str(policy.rest) == Rest.ALL.value
    rounds(20 * every, 12)
    assert rounds(32, 12) == 32
    assert str(policy.rest) == Rest.NONE.value
