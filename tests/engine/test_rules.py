"""Penalties, bans, scores and grammars in the loop: the same tokens and figures at every depth, also after a loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.tokenizer import Tokenizer
from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Dry, Sampling
from tests.engine.test_loop import WildDrafter
from tests.support.loops import END, decode, grammars_over, loop_over, suffix, toy

TOKENIZER = Tokenizer.bytes_only()
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["tide", "tidal", "storm"]},
        "note": {"type": "string", "maxLength": 9, "pattern": "^[a-z ]*$"},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "inner": {
            "type": "object",
            "properties": {"there": {"type": "boolean"}},
            "required": ["there"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "note", "sizes", "inner"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "frequency and presence": {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    "bias": {"logit_bias": ((101, 2.5), (32, -1.0), (END, 3.0))},
    "all": {
        "repetition_penalty": 1.1,
        "frequency_penalty": -0.1,
        "presence_penalty": 0.3,
        "logit_bias": ((END, 1.0),),
    },
}
FEW = ((101, 5.0), (116, 5.0), (32, 5.0))
"""A bias by which few tokens are chosen, so that they repeat themselves."""
FURTHER: dict[str, tuple[float, dict[str, Any]]] = {
    "typical": (1.2, {"typical_p": 0.3}),
    "top excluded": (1.2, {"xtc_probability": 0.5, "xtc_threshold": 0.05}),
    "repetitions": (0.9, {"dry": Dry(3.0, 1.75, 2, -1, (((101,), (32,)),))}),
    "repetitions, greedily": (0.0, {"dry": Dry(3.0, 1.75, 2, 20, ())}),
}


def loop(drafter: Drafter | None, **fields: Any) -> DecodeLoop:
    model = fields.pop("model", None) or toy()
    return loop_over(model, drafter, grammars=grammars_over(TOKENIZER, model), **fields)


def submit(**fields: Any) -> Submit:
    prompt = list(b"the sea is the sea and the land is the land. ")
    own: dict[str, Any] = {"request_id": "r", "prompt": prompt, "max_tokens": 50, "stop_tokens": [END]}
    return Submit(**(own | fields))


def check_depths_and_losses(request: Submit, plain: list[int], cuts: Sequence[int]) -> None:
    """With drafts of any depth, and by another worker from any of these tokens on, the output is the plain one."""
    for depth in (1, 4, 8):
        out, rounds = decode(loop(suffix(), depth=depth), [request])
        assert out["r"] == plain
        assert sum(done.drafted for done in rounds) > 0
    for cut in cuts:
        moved = msgspec.structs.replace(request, committed=plain[:cut])
        assert plain[:cut] + decode(loop(suffix()), [moved])[0]["r"] == plain


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", RULES)
def test_penalised_output_is_the_same_at_every_depth_and_after_a_loss(rule, temperature):
    asked = submit(sampling=Sampling(temperature, seed=4, **RULES[rule]), min_tokens=12)
    plain = decode(loop(None), [asked])[0]["r"]
    assert plain != decode(loop(None), [submit(sampling=Sampling(temperature, seed=4))])[0]["r"]
    assert END not in plain[:12]
    check_depths_and_losses(asked, plain, (1, 11, 13))


@pytest.mark.parametrize("name", FURTHER)
def test_further_samplers_leave_the_same_tokens_at_every_depth_and_after_a_loss(name):
    temperature, fields = FURTHER[name]
    usual = Sampling(temperature, seed=4, logit_bias=FEW)
    asked = submit(sampling=replace(usual, **fields))
    plain = decode(loop(None), [asked])[0]["r"]
    assert plain != decode(loop(None), [submit(sampling=usual)])[0]["r"]
    check_depths_and_losses(asked, plain, (1, 13))


def test_min_tokens_holds_every_stop_token_back():
    wanted = submit(sampling=Sampling(logit_bias=((END, 100.0),)))
    assert decode(loop(suffix()), [wanted])[0]["r"] == [END]
    out = decode(loop(suffix()), [submit(sampling=wanted.sampling, min_tokens=9)])[0]["r"]
    assert len(out) == 10
    assert out.index(END) == 9


@given(st.lists(st.lists(st.integers(0, 271), max_size=6), max_size=8), st.sampled_from([0.0, 0.9]))
@settings(max_examples=30)
def test_wild_drafts_change_nothing_under_penalties_and_grammar(guesses, temperature):
    asked = [
        submit(request_id="p", sampling=Sampling(temperature, seed=1, **RULES["all"])),
        submit(request_id="g", sampling=Sampling(temperature, seed=1), grammar=GRAMMAR, max_tokens=150),
    ]
    expected = {each.request_id: decode(loop(None), [each])[0][each.request_id] for each in asked}
    assert decode(loop(WildDrafter(guesses), model=toy(kv_blocks=20)), asked)[0] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_grammar_is_kept_to_at_every_depth_and_after_a_loss(temperature):
    asked = submit(sampling=Sampling(temperature, seed=2), grammar=GRAMMAR, max_tokens=200)
    out, rounds = decode(loop(None), [asked])
    plain = out["r"]
    jsonschema.validate(json.loads(TOKENIZER.decode(plain)), SCHEMA)
    assert rounds[-1].deltas[0].finish == "stop"
    for depth in (1, 4, 8):
        out, drafted = decode(loop(suffix(), depth=depth), [asked])
        assert out["r"] == plain
        assert len(drafted) < len(rounds)
    for cut in range(1, len(plain), 7):
        moved = submit(sampling=asked.sampling, grammar=GRAMMAR, max_tokens=200, committed=plain[:cut])
        assert plain[:cut] + decode(loop(suffix()), [moved])[0]["r"] == plain


def test_what_the_grammar_forces_is_drafted_and_always_accepted():
    _, rounds = decode(loop(WildDrafter([()])), [submit(grammar=GRAMMAR, max_tokens=200)])
    accepted, drafted = sum(done.accepted for done in rounds), sum(done.drafted for done in rounds)
    generated = sum(len(delta.tokens) for done in rounds for delta in done.deltas)
    assert accepted > 0.4 * generated
    assert accepted == drafted


@pytest.mark.parametrize("kind", ["regex", "lark"])
def test_a_grammar_can_be_a_regular_expression_or_lark(kind):
    text = r"[ab]{3}-x" if kind == "regex" else 'start: /[ab]{3}/ "-x"'
    for temperature in (0.0, 1.0):
        out = decode(loop(suffix()), [submit(sampling=Sampling(temperature), grammar=Grammar(kind, text))])[0]["r"]
        assert len(out) == 5
        assert TOKENIZER.decode(out).endswith("-x")


def test_a_grammar_wins_over_min_tokens_where_nothing_else_may_follow():
    out = decode(loop(suffix()), [submit(grammar=Grammar("regex", "ab?"), min_tokens=20)])[0]["r"]
    assert TOKENIZER.decode(out) in ("a", "ab")


@pytest.mark.parametrize("text", ['{"type": "nonsense"}', '{"not": {}}', "5", "{"])
def test_a_grammar_that_cannot_be_used_is_refused(text):
    refused = loop(suffix()).submit(submit(grammar=Grammar("json_schema", text)))
    assert refused is not None
    assert refused.kind == "invalid"
    assert "\n" not in refused.message


def test_a_grammar_that_gets_too_complex_is_the_clients_and_others_go_on():
    """It compiles, but behind the first brace there are more ways to go on than the library follows."""
    wide = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(1_000)}}
    engine = loop(suffix())
    text = json.dumps(wide | {"additionalProperties": False})
    assert engine.submit(submit(request_id="wide", grammar=Grammar("json_schema", text))) is None
    assert engine.submit(submit(request_id="plain", max_tokens=20)) is None
    failures, generated = [], 0
    while not engine.idle:
        generated += sum(len(d.tokens) for d in engine.run_round().deltas if d.request_id == "plain")
        failures += engine.failures()
    assert [(one.request_id, one.kind) for one in failures] == [("wide", "invalid")]
    assert "<state>" not in failures[0].message
    assert generated == 20


def test_committed_tokens_that_a_grammar_forbids_are_refused():
    refused = loop(suffix()).submit(submit(grammar=Grammar("regex", "a+"), committed=list(b"ab")))
    assert refused is not None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_the_same_to_the_bit_at_every_depth_and_chunking(temperature):
    """A running neighbour makes prefills small; the prompt is scored in chunks then."""
    asked = submit(sampling=Sampling(temperature, seed=4), logprobs=3, prompt_logprobs=True, prompt=[97, 98] * 200)

    def scores(loop: DecodeLoop, *others: Submit) -> tuple[list[Any], list[Any]]:
        deltas = [d for done in decode(loop, [*others, asked])[1] for d in done.deltas if d.request_id == "r"]
        assert all(len(delta.logprobs or []) == len(delta.tokens) for delta in deltas)
        assert all(delta.prompt_logprobs is None for delta in deltas[1:])
        return deltas[0].prompt_logprobs or [], [score for delta in deltas for score in delta.logprobs or []]

    prompt, plain = scores(loop(None))
    assert len(prompt) == 399
    assert len(plain) == len(decode(loop(None), [asked])[0]["r"])
    other = submit(request_id="o", max_tokens=400, stop_tokens=[])
    for depth in (1, 4, 8):
        assert scores(loop(suffix(), depth=depth), other) == (prompt, plain)
    assert scores(loop(suffix(), model=toy(kv_blocks=32, rows=64)), other) == (prompt, plain)


def test_scores_go_with_tokens_also_where_a_stop_cuts_the_verdict():
    text = decode(loop(None), [submit()])[0]["r"]
    stop = text[20]
    asked = submit(logprobs=1, stop_tokens=[stop])
    deltas = [delta for done in decode(loop(suffix()), [asked])[1] for delta in done.deltas]
    assert [len(delta.tokens) for delta in deltas] == [len(delta.logprobs or []) for delta in deltas]


def test_reading_a_prompt_generates_nothing():
    deltas = [
        d
        for done in decode(loop(suffix()), [submit(max_tokens=0, logprobs=0, prompt_logprobs=True)])[1]
        for d in done.deltas
    ]
    (delta,) = deltas
    assert (delta.tokens, delta.finish) == ([], "length")
    assert len(delta.prompt_logprobs or []) == len(submit().prompt) - 1
