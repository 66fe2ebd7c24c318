"""Draft models over the simulated model: whatever they say, and however they fail, the target's tokens come out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import pytest

from adapters.contract import LoadOptions
from adapters.simulated.model import ToyModel
from adapters.simulated.script import Script
from adapters.tokenizer import Tokenizer
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.guard import FailedDrafter
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import Draft
from policies.sampling import Dry, Sampling
from tests.support.loops import alone, decode, grammars_over, loop_over, requests, suffix, toy

STATE = DrafterState("model", "model", adapter="simulated", device="SIM")


def drafter_over(model: ToyModel, *, vocabulary: int = 272, prefill_ms: float = 50.0) -> ModelDrafter:
    return ModelDrafter(model, STATE, SystemClock(), vocabulary=vocabulary, prefill_ms=prefill_ms)


def asking(count: int, **fields: Any) -> list[Submit]:
    """Requests that fix their depth: whether drafts are worth their time is not asked."""
    return requests(count, depth=12, **fields)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Target-only decoding, one request at a time."""
    return alone(asking(10))


@pytest.mark.parametrize("running", [1, 3, 8])
@pytest.mark.parametrize("depth", [0, 1, 4, 12])
def test_the_same_model_as_draft_is_right_almost_always_and_changes_nothing(expected, running, depth):
    draft = toy()
    drafter = drafter_over(draft)
    loop = loop_over(toy(), drafter, running=running, depth=depth)
    out, rounds = decode(loop, asking(10))
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
    out, rounds = decode(loop, asking(10))
    assert out == expected
    assert sum(done.accepted for done in rounds) > 0
    assert loop.gauges(0).drafters[0].state == "ok"
    assert draft.free_blocks() == draft.capabilities.total_blocks


@pytest.mark.parametrize("fault", ["device_lost", "out_of_memory", "nan"])
@pytest.mark.parametrize("at", [1, 7, 40])
def test_a_draft_that_fails_half_way_costs_no_token(expected, fault, at):
    loop = loop_over(toy(), drafter_over(toy(script=f"fault={fault}&at={at}")), running=4)
    out, rounds = decode(loop, asking(10))
    assert out == expected
    state = loop.gauges(0).drafters[0]
    assert state.state == "failed"
    assert state.reason
    failed = next((i for i, done in enumerate(rounds) if done.drafts == 0 and i > at), 0)
    assert sum(done.drafted for done in rounds[failed:]) == 0


@pytest.mark.parametrize("at", [1, 7, 40])
def test_a_draft_that_finds_no_room_where_it_counted_on_some_goes_on_with_the_others(expected, at):
    draft = toy(script=f"fault=capacity&at={at}")
    loop = loop_over(toy(), drafter_over(draft), running=4)
    out, rounds = decode(loop, asking(10))
    assert out == expected
    assert loop.gauges(0).drafters[0].state == "ok"
    assert sum(done.accepted for done in rounds) > 0
    assert draft.free_blocks() == draft.capabilities.total_blocks


class Proposed(ModelDrafter):
    """Keeps every token that it proposed."""

    tokens: ClassVar[set[int]] = set()

    def propose(self, asks):
        drafts = super().propose(asks)
        self.tokens.update(token for draft in drafts for token in draft.tokens)
        return drafts


def test_a_draft_that_is_padded_wider_than_the_target_proposes_the_targets_tokens_only(expected):
    drafter = Proposed(toy(), STATE, SystemClock(), vocabulary=101, prefill_ms=50.0)
    drafter.tokens.clear()
    loop = loop_over(toy(), drafter)
    assert decode(loop, asking(4))[0] == {key: expected[key] for key in ("r0", "r1", "r2", "r3")}
    assert loop.gauges(0).drafters[0].state == "ok"
    assert drafter.tokens
    assert max(drafter.tokens) < 101


class Narrow(ToyModel):
    """A model without the target's last rows: those from "t" on."""

    def __init__(self) -> None:
        super().__init__(Script.parse(""), LoadOptions(device="SIM", kv_cache_bytes=1 << 22, max_batch_rows=256))
        self.spec = replace(self.spec, vocabulary_size=ord("t"))

    def forward(self, batch):
        assert all(token < ord("t") for segment in batch for token in segment.tokens)
        result = super().forward(batch)
        return replace(result, logits=result.logits[:, : ord("t")])


@pytest.mark.parametrize("bias", [(), ((200, -1.0), (101, 0.5))])
def test_a_draft_without_some_of_the_targets_rows_drafts_until_it_meets_one(bias):
    submits = [
        msgspec.structs.replace(submit, sampling=replace(submit.sampling, logit_bias=bias)) for submit in asking(6)
    ]
    alone = {s.request_id: decode(loop_over(toy(), None, running=1), [s])[0][s.request_id] for s in submits}
    narrow = Narrow()
    loop = loop_over(toy(), drafter_over(narrow))
    out, rounds = decode(loop, submits)
    assert out == alone
    assert any(ord("t") in tokens for tokens in alone.values())
    assert sum(done.drafted for done in rounds) > 0
    assert loop.gauges(0).drafters[0].state == "ok"
    assert narrow.free_blocks() == narrow.capabilities.total_blocks


@pytest.mark.parametrize("token", [-1, 272, 1 << 40])
def test_tokens_that_the_target_does_not_have_never_reach_it(expected, token):
    class Broken(FailedDrafter):
        def propose(self, asks):
            return [Draft((101, token, 32), (0.9, 0.9, 0.9), "broken") for _ in asks]

    out, rounds = decode(loop_over(toy(), Broken(STATE)), asking(4))
    assert out == {key: expected[key] for key in out}
    assert sum(done.drafted for done in rounds) > 0


def test_a_long_prompt_is_prefilled_in_bounded_pieces_and_others_draft_meanwhile(monkeypatch):
    """A row costs 1 ms here, so that 40 ms are some thirty rows: 1500 take many rounds."""
    draft = toy(script="row_ms=1", rows=512)
    drafter, fed = drafter_over(draft, prefill_ms=40.0), [0]
    forward, propose = draft.forward, drafter.propose

    def count_rows(batch):
        fed[-1] += sum(len(segment.tokens) for segment in batch)
        return forward(batch)

    def begin_round(asks):
        fed.append(0)
        return propose(asks)

    monkeypatch.setattr(draft, "forward", count_rows)
    monkeypatch.setattr(drafter, "propose", begin_round)
    loop = loop_over(toy(rows=2048), drafter, max_itl_ms=60_000.0)
    short, long = requests(1, max_tokens=70, depth=1)[0], Submit("long", [60, 32, 101] * 170, 70, Sampling(), depth=12)
    out, rounds = decode(loop, [short, long])
    alone = decode(loop_over(toy(), None), [short, long])[0]
    assert out == alone
    drafting = [done for done in rounds if done.draft_ms > 1.0]
    assert max(fed) < 250, "rows of a round, of a millisecond each"
    assert sum(done.drafts == 1 for done in drafting) > 5  # while the long one is behind
    assert any(done.drafts == 2 for done in drafting)  # and in the end it is not


def test_prompts_that_begin_alike_are_computed_once_by_the_draft_too():
    draft = toy()
    drafter = drafter_over(draft)
    loop = loop_over(toy(), drafter)
    prompt = [60, 32, 101] * 40
    decode(loop, [Submit("first", prompt, 20, depth=12)])
    fed: list[int] = []
    forward = draft.forward
    draft.forward = lambda batch: fed.append(sum(len(s.tokens) for s in batch)) or forward(batch)  # type: ignore[method-assign,func-returns-value]
    decode(loop, [Submit("second", [*prompt, 99], 20, depth=12)])
    assert max(fed) < 20


@pytest.mark.parametrize("grammar", [Grammar("regex", "[a-f ]{40}"), Grammar("json_schema", '{"enum": ["abcdef"]}')])
def test_requests_with_a_grammar_keep_to_it(grammar):
    asked = [
        Submit(f"r{i}", [97 + i, 32] * 5, 40, Sampling(0.7 * i, seed=i), grammar=grammar, depth=12) for i in range(2)
    ]
    found = []
    for drafter in (None, drafter_over(toy())):
        model = toy()
        loop = loop_over(model, drafter, grammars=grammars_over(Tokenizer.bytes_only(), model))
        found.append(decode(loop, asked)[0])
        if drafter is not None:
            state = loop.gauges(0).drafters[0]
            assert state.state == "ok"
            assert state.accepted <= state.drafted
    assert found[0] == found[1]


def test_penalties_and_bias_are_the_drafts_too():
    sampling = Sampling(0.8, seed=5, frequency_penalty=0.6, presence_penalty=0.4, repetition_penalty=1.3)
    asked = [
        Submit("penalties", [60, 32, 101] * 20, 60, sampling, depth=12),
        Submit("repetitions", [60, 32, 101] * 20, 60, Sampling(dry=Dry(2.0, 1.75, 2, -1, (((32,), ()),))), depth=12),
        Submit("typical", [60, 32] * 20, 60, Sampling(0.8, seed=5, typical_p=0.6, xtc_probability=0.5), depth=12),
        Submit("bias", [61, 32, 101] * 20, 60, Sampling(logit_bias=((113, 9.0), (97, -20.0))), depth=12),
    ]
    expected = decode(loop_over(toy(), None), asked)[0]
    out, rounds = decode(loop_over(toy(), drafter_over(toy())), asked)
    assert out == expected
    assert sum(done.accepted for done in rounds) > 0.6 * sum(done.drafted for done in rounds) > 0


def test_preemption_of_the_target_keeps_what_the_draft_knows(expected):
    model = toy(kv_blocks=24)
    draft = toy()
    loop = loop_over(model, drafter_over(draft), running=6)
    out, rounds = decode(loop, asking(10))
    assert out == expected
    assert loop.gauges(0).preemptions > 0
    assert sum(done.accepted for done in rounds) > 0
    assert draft.free_blocks() == draft.capabilities.total_blocks


@pytest.mark.parametrize("running", [1, 4])
def test_a_chain_asks_the_model_where_the_text_has_nothing(expected, running):
    drafter = ChainDrafter([suffix(), drafter_over(toy())])
    loop = loop_over(toy(), drafter, running=running)
    out, rounds = decode(loop, asking(10))
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
    out, _ = decode(loop, asking(10))
    assert out == expected
    of_model, of_suffix = loop.gauges(0).drafters
    assert (of_model.state, of_suffix.state) == ("failed", "ok")
    assert of_suffix.accepted > 0
