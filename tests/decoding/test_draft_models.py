"""Draft models over the simulated model: whatever they say, and however they fail, the target's tokens come out."""

from __future__ import annotations

import pytest

from adapters.simulated.model import ToyModel
from orchestrator.clock import SystemClock
from orchestrator.cluster.port import DrafterState, Sampling, Submit
from orchestrator.drafting.chain import ChainDrafter
from orchestrator.drafting.model import ModelDrafter
from tests.support.loops import decode, loop_over, suffix, toy

END = 256
STATE = DrafterState("model", "model", adapter="simulated", device="SIM")


def drafter_over(model: ToyModel, *, vocabulary: int = 272, prefill_ms: float = 50.0) -> ModelDrafter:
    return ModelDrafter(model, STATE, SystemClock(), vocabulary=vocabulary, prefill_ms=prefill_ms)


def requests(count: int, *, max_tokens: int = 60, **fields) -> list[Submit]:
    return [
        Submit(
            request_id=f"r{index}",
            prompt=[60 + index, 32, 101] * (1 + index * 5),
            max_tokens=max_tokens,
            sampling=Sampling(0.9 if index % 2 else 0.0, top_p=0.95, seed=index),
            stop_tokens=[END],
            **fields,
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Target-only decoding, one request at a time."""
    return {s.request_id: decode(loop_over(toy(), None, running=1), [s])[0][s.request_id] for s in requests(10)}


@pytest.mark.parametrize("running", [1, 3, 8])
@pytest.mark.parametrize("depth", [0, 1, 4, 12])
def test_the_same_model_as_draft_is_right_almost_always_and_changes_nothing(expected, running, depth):
    draft = toy()
    drafter = drafter_over(draft)
    loop = loop_over(toy(), drafter, running=running, depth=depth)
    out, rounds = decode(loop, requests(10))
    assert out == expected
    drafted, accepted = sum(done.drafted for done in rounds), sum(done.accepted for done in rounds)
    state = loop.gauges(0).drafters[0]
    if depth == 0:
        assert (drafted, state.rounds) == (0, 0)
    else:
        assert accepted > 0.6 * drafted > 0
        assert (state.drafted, state.accepted, state.state) == (drafted, accepted, "ok")
        assert state.draft_ms > 0.0
    assert draft.free_blocks() == draft.capabilities.total_blocks
    drafter.close()


@pytest.mark.parametrize(
    "small",
    [{"kv_blocks": 6}, {"kv_blocks": 20}, {"slots": 1}, {"slots": 3}, {"rows": 16}],
    ids=lambda small: "-".join(f"{key}{value}" for key, value in small.items()),
)
def test_a_draft_with_too_little_room_drafts_for_whom_it_can(expected, small):
    draft = toy(**small)
    loop = loop_over(toy(), drafter_over(draft), running=6)
    out, rounds = decode(loop, requests(10))
    assert out == expected
    assert sum(done.accepted for done in rounds) > 0
    assert loop.gauges(0).drafters[0].state == "ok"
    assert draft.free_blocks() == draft.capabilities.total_blocks


@pytest.mark.parametrize("fault", ["device_lost", "out_of_memory", "nan"])
@pytest.mark.parametrize("at", [1, 7, 40])
def test_a_draft_that_fails_half_way_costs_no_token(expected, fault, at):
    loop = loop_over(toy(), drafter_over(toy(script=f"fault={fault}&at={at}")), running=4)
    out, rounds = decode(loop, requests(10))
    assert out == expected
    state = loop.gauges(0).drafters[0]
    assert state.state == "failed"
    assert state.reason
    failed = next((i for i, done in enumerate(rounds) if done.drafts == 0 and i > at), 0)
    assert sum(done.drafted for done in rounds[failed:]) == 0


def test_preemption_of_the_target_keeps_what_the_draft_knows(expected):
    model = toy(kv_blocks=24)
    draft = toy()
    loop = loop_over(model, drafter_over(draft), running=6)
    out, rounds = decode(loop, requests(10))
    assert out == expected
    assert loop.gauges(0).preemptions > 0
    assert sum(done.accepted for done in rounds) > 0
    assert draft.free_blocks() == draft.capabilities.total_blocks


@pytest.mark.parametrize("running", [1, 4])
def test_a_chain_asks_the_model_where_the_text_has_nothing(expected, running):
    drafter = ChainDrafter([suffix(), drafter_over(toy())])
    loop = loop_over(toy(), drafter, running=running)
    out, rounds = decode(loop, requests(10))
    assert out == expected
    of_suffix, of_model = loop.gauges(0).drafters
    assert (of_suffix.name, of_model.name) == ("suffix", "model")
    assert of_suffix.drafted + of_model.drafted == sum(done.drafted for done in rounds)
    assert of_suffix.accepted + of_model.accepted == sum(done.accepted for done in rounds)
    assert of_model.accepted > 0.6 * of_model.drafted > 0
    assert of_model.rounds < of_suffix.rounds  # it was not needed everywhere


def test_a_chain_goes_on_without_a_drafter_that_failed(expected):
    drafter = ChainDrafter([drafter_over(toy(script="fault=device_lost&at=20")), suffix()])
    loop = loop_over(toy(), drafter, running=4)
    out, _ = decode(loop, requests(10))
    assert out == expected
    of_model, of_suffix = loop.gauges(0).drafters
    assert (of_model.state, of_suffix.state) == ("failed", "ok")
    assert of_suffix.accepted > 0
