"""Rounds in flight over a target in stages: every token is what one loop over the whole target chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.contract import DeviceLost
from adapters.pipeline import PipelineModel
from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.protocol.rounds import Refused
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.variants import VariantDrafter
from orchestrator.worker.engine.flights import Flights
from orchestrator.worker.engine.loop import LoopTuning
from policies.sampling import Sampling
from policies.serving.slo import NO_OBJECTIVES
from tests.support.flights import cut_toy, flights_over
from tests.support.loops import END, GOAL, alone, loop_over, requests, suffix, toy

Outputs = dict[str, list[int]]


@pytest.fixture(scope="module")
def expected() -> Outputs:
    """Target-only decoding, one request at a time."""
    return alone(requests(8))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[PipelineModel]:
    made = cut_toy(tmp_path)
    yield made
    made.close()


def run_out(loop: Flights, out: Outputs) -> tuple[list[Refused], int]:
    """Run to the end; returns what was refused, and the most rounds that were under way at a time."""
    refused: list[Refused] = []
    most = 0
    while not loop.idle:
        done = loop.run_round()
        most = max(most, done.in_flight)
        for delta in done.deltas:
            out[delta.request_id].extend(delta.tokens)
        refused += loop.failures()
    return refused, most


def start(loop: Flights, submits: Sequence[Submit]) -> Outputs:
    for submit in submits:
        assert loop.submit(submit) is None
    return {submit.request_id: [] for submit in submits}


@pytest.mark.parametrize("cuts", [(2, 2), (1, 2, 1)])
@pytest.mark.parametrize("drafting", [False, True])
def test_tokens_are_those_of_the_whole_target_while_all_stages_work(tmp_path, expected, cuts, drafting):
    model = cut_toy(tmp_path, cuts=cuts)
    loop = flights_over(model, [suffix() if drafting else None for _ in cuts])
    out = start(loop, requests(8))
    refused, most = run_out(loop, out)
    assert (out, refused, most) == (expected, [], len(cuts))
    assert model.free_blocks() == model.capabilities.total_blocks
    gauges = loop.gauges(0)
    assert (gauges.running, gauges.waiting, gauges.total_blocks) == (0, 0, model.capabilities.total_blocks)
    assert [state.name for state in gauges.drafters] == ["suffix"] * drafting
    model.close()


def test_a_request_alone_has_one_round_under_way(model):
    submits = requests(1)
    loop = flights_over(model, [suffix(), suffix()])
    out = start(loop, submits)
    assert run_out(loop, out) == ([], 1)
    assert out == alone(submits)
    assert [one.gauges(0).rounds > 0 for one in loop.loops] == [True, False]


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 40), st.sampled_from([0.0, 0.9]), st.integers(0, 6)),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([(2, 2), (3, 1), (1, 1, 2), (1, 1, 1, 1)]),
    st.booleans(),
    st.integers(10, 40),
    st.integers(1, 6),
)
def test_any_mix_of_requests_gets_its_tokens_with_few_blocks_and_slots(
    tmp_path_factory, mix, cuts, drafting, kv_blocks, running
):
    submits = [
        Submit(f"r{n}", [60 + n, 32, 101, *range(40, 40 + length)], most, Sampling(heat, seed=n), stop_tokens=[END])
        for n, (length, most, heat, _) in enumerate(mix)
    ]
    comes = [after for *_, after in mix]
    expected = alone(submits)
    model = cut_toy(tmp_path_factory.mktemp("toy"), cuts=cuts, kv_blocks=kv_blocks)
    loop = flights_over(model, [suffix() if drafting else None for _ in cuts], running=running)
    out: Outputs = {submit.request_id: [] for submit in submits}
    left = sorted(zip(comes, submits, strict=True), key=lambda one: one[0])
    rounds = 0
    while left or not loop.idle:
        while left and (left[0][0] <= rounds or loop.idle):
            assert loop.submit(left.pop(0)[1]) is None
        for delta in loop.run_round().deltas:
            out[delta.request_id].extend(delta.tokens)
        assert loop.gauges(0).running <= running
        rounds += 1
    assert out == expected
    assert model.free_blocks() == model.capabilities.total_blocks
    model.close()


@pytest.mark.parametrize("drafting", [False, True])
def test_a_request_that_is_cancelled_while_its_round_is_under_way_gets_no_more(model, expected, drafting):
    loop = flights_over(model, [suffix() if drafting else None for _ in range(2)], running=4)
    out = start(loop, requests(8))
    gone: dict[str, int] = {}
    for number in range(200):
        for delta in loop.run_round().deltas:
            assert delta.request_id not in gone
            out[delta.request_id].extend(delta.tokens)
        if number in (5, 6, 9):
            victim = next(key for key, tokens in out.items() if key not in gone and 0 < len(tokens) < 40)
            loop.cancel(victim)
            gone[victim] = len(out[victim])
        if loop.idle:
            break
    assert loop.idle
    assert len(gone) == 3
    for key, tokens in out.items():
        assert tokens == expected[key][: gone.get(key, 1000)]
    assert model.free_blocks() == model.capabilities.total_blocks


def test_all_cancelled_with_rounds_under_way_leave_an_idle_loop(model):
    loop = flights_over(model, [None, None])
    start(loop, requests(4))
    loop.run_round()
    for submit in requests(4):
        loop.cancel(submit.request_id)
    under_way = 0
    while not loop.idle:
        assert loop.run_round().deltas == []
        under_way += 1
    assert under_way == 1
    out = start(loop, requests(4))
    run_out(loop, out)
    assert out == alone(requests(4))


@pytest.mark.parametrize("at", [3, 10, 17])
def test_a_lost_stage_costs_no_token_that_was_told(tmp_path, expected, at):
    model = cut_toy(tmp_path, f"fault=device_lost&at={at}")
    loop = flights_over(model, [suffix(), suffix()])
    out = start(loop, requests(8))
    with pytest.raises(DeviceLost):
        run_out(loop, out)
    assert all(tokens == expected[key][: len(tokens)] for key, tokens in out.items())
    again = cut_toy(tmp_path)
    second = flights_over(again, [suffix(), suffix()])
    left = [msgspec.structs.replace(one, committed=list(out[one.request_id])) for one in requests(8)]
    for submit in left:
        if len(out[submit.request_id]) < len(expected[submit.request_id]):
            assert second.submit(submit) is None
    run_out(second, out)
    assert out == expected
    again.close()


def test_forwards_without_memory_are_run_again_in_smaller_ones(tmp_path, expected):
    model = cut_toy(tmp_path, "memory_rows=5")
    loop = flights_over(model, [suffix(), suffix()])
    out = start(loop, requests(8))
    assert run_out(loop, out)[0] == []
    assert out == expected
    gauges = loop.gauges(0)
    assert gauges.out_of_memory > 0
    assert gauges.memory_bound is not None
    assert gauges.memory_bound.rows <= 5
    model.close()


def test_garbage_ends_its_request_alone_and_grammars_hold(tmp_path):
    model = cut_toy(tmp_path, "garbage=250")
    submits = [
        *requests(4),
        Submit("bad", [61, 250, 32], 20),
        Submit("json", [62, 32], 30, grammar=Grammar("regex", "[a-z]{1,9}")),
    ]
    loop = flights_over(model, [suffix(), suffix()])
    out = start(loop, submits)
    refused, most = run_out(loop, out)
    assert [(one.request_id, one.kind) for one in refused] == [("bad", "not_finite")]
    assert most == 2
    assert out.pop("bad") == []
    whole = loop_over(toy(), None)
    told: Outputs = {"json": []}
    assert whole.submit(submits[-1]) is None
    while not whole.idle:
        for delta in whole.run_round().deltas:
            told["json"].extend(delta.tokens)
    assert out == alone(requests(4)) | told
    assert loop.gauges(0).not_finite == 1
    model.close()


def test_requests_that_are_left_in_one_flight_are_shared_out_and_keep_their_variant(model):
    joined: dict[str, str] = {}
    own = [suffix(), suffix()]
    drafters = [VariantDrafter(ChainDrafter([]), {"canary": ChainDrafter([one])}, joined) for one in own]
    loop = flights_over(model, drafters, running=4)
    loop.joins = lambda request: drafters[0].join(request.request_id, request.variant)
    submits = [
        Submit(f"r{n}", [60 + n, 32, 101] * 4, 200 if n % 2 == 0 else 8, depth=3, variant="canary" if n == 2 else "")
        for n in range(4)
    ]
    expected = alone(submits)
    out: Outputs = {submit.request_id: [] for submit in submits}
    for submit in submits:
        assert loop.submit(submit) is None
        loop.joins(submit)
    together = [[one.holds(f"r{n}") for n in (0, 2)] for one in loop.loops]
    assert together == [[True, True], [False, False]]
    run_out(loop, out)
    assert out == expected
    rounds = [one.gauges(0).rounds for one in loop.loops]
    assert min(rounds) > 30, "those that were left were split"
    assert own[1].states()[0].rounds > 10, "the younger one moved, and is drafted for as before"
    assert joined == {}


def test_every_place_is_used_and_no_more(model):
    loop = flights_over(model, [None, None], running=5)
    assert loop.max_running == 5
    out = start(loop, requests(8, max_tokens=30))
    seen = set()
    while not loop.idle:
        for delta in loop.run_round().deltas:
            out[delta.request_id].extend(delta.tokens)
        seen.add(loop.gauges(0).running)
    assert max(seen) == 5
    assert out == alone(requests(8, max_tokens=30))


def test_settings_change_between_rounds_and_nothing_that_was_under_way_is_lost(model, expected):
    loop = flights_over(model, [suffix(), suffix()])
    out = start(loop, requests(8))
    for number in range(12):
        for delta in loop.run_round().deltas:
            out[delta.request_id].extend(delta.tokens)
        if number in (4, 7):
            loop.settle()
            for one in loop.loops:
                one.exchange(suffix() if number == 7 else None).close()
                tuning = LoopTuning(one.policy, 6, 0.1, True, GOAL, 0.1, NO_OBJECTIVES)
                one.retune(tuning, drafts=number == 7)
    run_out(loop, out)
    assert out == expected
