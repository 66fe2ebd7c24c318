"""Which replica a request goes to."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.replica_load import PairPaces, ReplicaPace, SeenRound, expect_pace, predict_prefill_ms
from policies.serving.routing import ReplicaState, RoutedRequest, route
from tests.support.paces import predict_tpot_ms

counts = st.integers(0, 40)


@st.composite
def replicas(draw: st.DrawFn) -> list[ReplicaState]:
    places = draw(st.integers(1, 16))
    return [
        ReplicaState(
            name=f"target-{number}",
            running=draw(st.integers(0, places)),
            waiting=draw(counts),
            places=places,
            kv_tokens=4096,
            kv_free_tokens=draw(st.integers(0, 4096)),
            cached_prompt_tokens=draw(st.integers(0, 2000)),
            tpot_ms=draw(st.floats(0.5, 200.0)),
            prefill_ms_per_token=draw(st.floats(0.0, 5.0)),
            serving=draw(st.booleans()),
            why_not="restarting",
        )
        for number in range(draw(st.integers(0, 6)))
    ]


requests = st.builds(RoutedRequest, st.integers(1, 4000), st.integers(1, 2000))


@given(replicas(), requests, st.randoms(use_true_random=False))
def test_the_same_choice_whatever_the_order(states: list[ReplicaState], request: RoutedRequest, order: random.Random):
    shuffled = order.sample(states, len(states))
    assert route(states, request) == route(shuffled, request)


@given(replicas(), requests)
def test_only_a_replica_that_serves_is_chosen_and_every_other_has_its_reason(
    states: list[ReplicaState], request: RoutedRequest
):
    chosen = route(states, request)
    serving = {one.name for one in states if one.serving}
    assert (chosen.replica in serving) if serving else chosen.replica is None
    assert {rated.name for rated in chosen.rated} == {rated.name for rated in states}
    assert all((rated.why_not == "") == (rated.name == chosen.replica) for rated in chosen.rated)


@given(replicas().filter(bool), requests)
def test_an_idle_replica_beats_an_equal_busy_one(states: list[ReplicaState], request: RoutedRequest):
    busy = dataclasses.replace(states[0], name="a", running=states[0].places, waiting=1, serving=True)
    idle = dataclasses.replace(busy, name="z", running=0, waiting=0)
    assert route([busy, idle], request).replica == "z"


@given(replicas().filter(bool), requests, st.integers(1, 2000))
def test_a_cached_beginning_wins_among_equals(states: list[ReplicaState], request: RoutedRequest, cached: int):
    cold = dataclasses.replace(states[0], name="a", cached_prompt_tokens=0, prefill_ms_per_token=0.5, serving=True)
    warm = dataclasses.replace(cold, name="z", cached_prompt_tokens=cached)
    assert route([cold, warm], request).replica == "z"


def observe_all(tpot_ms: dict[int, float], rounds: int = 40) -> ReplicaPace:
    """The pace of a replica that decoded so many sequences at a time, at these times for a token."""
    pace = ReplicaPace()
    for _ in range(rounds):
        for sequences, ms in tpot_ms.items():
            pace = observe_plain_round(pace, SeenRound(sequences, sequences, 2 * sequences, 0, ms))
    return pace


def observe_plain_round(pace: ReplicaPace, seen: SeenRound) -> ReplicaPace:
    return PairPaces(pace).observe(seen).plain


def test_the_pace_is_read_off_the_rounds_also_between_and_beyond_them():
    pace = observe_all({1: 8.0, 4: 14.0})
    assert [round(pace.tpot_ms(n), 6) for n in (1, 2, 4, 8)] == [8.0, 10.0, 14.0, 22.0]


@given(st.floats(2.0, 60.0), st.floats(1.0, 3.9), st.integers(50, 300))
def test_what_a_lone_sequence_takes_is_known_after_many_rounds_with_others(lone_ms: float, grown: float, rounds: int):
    pace = observe_all({1: lone_ms})
    for _ in range(rounds):
        pace = observe_plain_round(pace, SeenRound(4, 4, 8, 0, grown * lone_ms))
    assert pace.tpot_ms(1) == pytest.approx(lone_ms)
    assert pace.tpot_ms(4) == pytest.approx(grown * lone_ms)


@given(st.floats(2.0, 60.0), st.floats(1.0, 16.0), st.sampled_from([2, 4, 16]), st.integers(1, 16))
def test_a_profile_says_what_more_sequences_take_until_rounds_do(lone_ms: float, full: float, seen: int, ask: int):
    expected = expect_pace(places=16, alone_ms=lone_ms, full_ms=full * lone_ms, prefill_ms=1.0)
    rise = expected.rise / expected.weight
    times = 1.5  # what the device is slower than its profile
    pace = PairPaces().observe(SeenRound(seen, seen, 2 * seen, 0, times * expected.tpot_ms(seen)), 1.0, rise).plain
    assert pace.tpot_ms(ask) == pytest.approx(times * expected.tpot_ms(ask))


@given(st.floats(2.0, 60.0), st.floats(1.0, 3.0), st.integers(60, 200))
def test_rounds_beside_others_say_what_these_cost_and_leave_what_is_known_alone(
    lone_ms: float, company: float, rounds: int
):
    paces = PairPaces()
    for _ in range(rounds):
        paces = paces.observe(SeenRound(1, 1, 2, 0, lone_ms))
    for _ in range(rounds):
        paces = paces.observe(SeenRound(1, 1, 2, 0, company * lone_ms, beside=True))
    assert paces.plain.tpot_ms(1) * paces.company == pytest.approx(company * lone_ms, rel=0.05)
    assert paces.plain.tpot_ms(1) == pytest.approx(lone_ms), "however many rounds others slow down"
    never_alone = PairPaces()
    for _ in range(rounds):
        never_alone = never_alone.observe(SeenRound(1, 1, 2, 0, company * lone_ms, beside=True))
    assert never_alone.company == pytest.approx(1.0)


def test_rounds_that_commit_drafts_count_by_their_tokens():
    paces = PairPaces().observe(SeenRound(2, 6, 8, 6, 12.0, draft="toy"))
    assert paces.drafted["toy"].tpot_ms(2) == 4.0


@given(st.integers(1, 64))
def test_more_sequences_are_never_predicted_to_be_faster(sequences: int):
    for pace in (observe_all({3: 9.0}), observe_all({1: 10.0, 8: 5.0}), observe_all({1: 5.0, 8: 10.0})):
        assert pace.tpot_ms(sequences + 1) >= pace.tpot_ms(sequences) > 0.0


def test_alike_replicas_share_what_they_measured_and_a_slower_one_keeps_its_own():
    fast, same, slow = observe_all({1: 8.0}), observe_all({1: 8.4}), observe_all({1: 30.0})
    assert predict_tpot_ms(fast, [fast, same], 1) == predict_tpot_ms(same, [fast, same], 1)
    assert predict_tpot_ms(slow, [fast, same, slow], 1) > 2 * predict_tpot_ms(fast, [fast, same, slow], 1)
    assert predict_tpot_ms(ReplicaPace(), [], 2) > predict_tpot_ms(ReplicaPace(), [], 1) > 0.0


def test_what_prefill_takes_is_read_off_rounds_that_had_some():
    pace = observe_all({1: 8.0})
    assert predict_prefill_ms([pace]) == 0.8
    with_prompt = observe_plain_round(pace, SeenRound(2, 2, 104, 0, 8.8 + 50.0))
    assert round(predict_prefill_ms([with_prompt, pace]), 6) == 0.5
    assert with_prompt.tpot_ms(1) == pace.tpot_ms(1)
