"""Bias, penalties, scores and grammars on the real model's first layers and runtime: the same at every depth, alone and
in company."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling, ToleranceGoal
from tests.support.loops import decode, grammars_over, loop_over, suffix

pytestmark = pytest.mark.model
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "topic": {"enum": ["science", "travel", "cooking", "history", "other"]},
        "title": {"type": "string", "maxLength": 30},
        "scores": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 100},
            "minItems": 2,
            "maxItems": 3,
        },
        "source": {
            "type": "object",
            "properties": {"known": {"type": "boolean"}, "year": {"type": "integer", "minimum": 1900, "maximum": 2030}},
            "required": ["known", "year"],
            "additionalProperties": False,
        },
    },
    "required": ["topic", "title", "scores", "source"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
CASES: dict[str, dict[str, Any]] = {
    "penalties": {
        "sampling": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        "min_tokens": 30,
    },
    "bias and scores": {"sampling": {"logit_bias": ((28, 2.0), (2, -5.0))}, "logprobs": 5, "prompt_logprobs": True},
    "schema": {"sampling": {}, "grammar": GRAMMAR, "logprobs": 2, "max_tokens": 100},
}
TEMPERATURES = (0.0, 0.8)


@pytest.fixture(scope="module")
def model(layers_model):
    return layers_model


@pytest.fixture(scope="module")
def grammars(tokenizer, model):
    return grammars_over(tokenizer, model)


def submits(prompts: list[list[int]], case: dict[str, Any], temperature: float) -> list[Submit]:
    own = {key: value for key, value in case.items() if key != "sampling"}
    fields: dict[str, Any] = {"max_tokens": 32, "stop_tokens": [0, 2]} | own
    return [
        Submit(str(index), prompt, sampling=Sampling(temperature, seed=index, **case["sampling"]), **fields)
        for index, prompt in enumerate(sorted(prompts, key=len)[:2])
    ]


def outcome(loop: DecodeLoop, asked: list[Submit]) -> dict[str, tuple[list[int], list[Any], list[Any]]]:
    """Tokens, their scores and the prompt's, of each request."""
    found: dict[str, tuple[list[int], list[Any], list[Any]]] = {each.request_id: ([], [], []) for each in asked}
    for done in decode(loop, asked)[1]:
        for delta in done.deltas:
            tokens, scores, prompt = found[delta.request_id]
            tokens += delta.tokens
            scores += delta.logprobs or []
            prompt += delta.prompt_logprobs or []
    return found


@pytest.fixture(scope="module", params=[(case, t) for case in CASES for t in TEMPERATURES], ids=str)
def expected(request, model, prompts, grammars):
    """What target-only decoding makes of each request alone."""
    case, temperature = request.param
    asked = submits(prompts, CASES[case], temperature)
    found: dict[str, tuple[list[int], list[Any], list[Any]]] = {}
    for each in asked:
        found |= outcome(loop_over(model, None, running=1, grammars=grammars), [each])
    return case, asked, found


@pytest.mark.parametrize("depth", [0, 1, 8])
def test_nothing_changes_at_any_depth_in_company(model, expected, grammars, depth):
    case, asked, found = expected
    loop = loop_over(model, suffix(), running=4, depth=depth, grammars=grammars)
    assert outcome(loop, asked) == found
    if case == "bias and scores":
        assert all(
            len(prompt) == len(each.prompt) - 1 for each, (_, _, prompt) in zip(asked, found.values(), strict=True)
        )


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_answers_are_valid_and_change_nothing_after_a_loss(model, prompts, grammars, tokenizer, temperature):
    asked = submits(prompts, CASES["schema"], temperature)
    found = outcome(loop_over(model, suffix(), grammars=grammars), asked)
    for each in asked:
        tokens, scores, _ = found[each.request_id]
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), SCHEMA)
        cut = len(tokens) // 2
        moved = Submit(
            each.request_id,
            each.prompt,
            each.max_tokens,
            each.sampling,
            tokens[:cut],
            each.stop_tokens,
            grammar=GRAMMAR,
            logprobs=2,
        )
        rest = outcome(loop_over(model, suffix(), grammars=grammars), [moved])[each.request_id]
        assert (tokens[:cut] + rest[0], scores[:cut] + rest[1]) == (tokens, scores)


def test_tokens_that_only_the_tolerance_accepted_are_those_that_the_target_would_not_choose(model, prompts):
    """Fed with its own output, the model chooses another token exactly where the loop says that one was tolerated."""
    goal = ToleranceGoal(acceptance_rate=0.9, warmup_tokens=64, max_delta=2.0, fixed_delta=3.0)
    asked = [
        Submit(str(index), prompt, 48, sampling=Sampling(acceptance="tolerance"), stop_tokens=[0, 2], depth=4)
        for index, prompt in enumerate(sorted(prompts, key=len)[:3])
    ]
    out, rounds = decode(loop_over(model, suffix(), tolerance=goal), asked)
    counted = 0
    for one in asked:
        tokens = out[one.request_id]
        scored = Submit(one.request_id, [*one.prompt, *tokens], 1, prompt_logprobs=True, logprobs=1)
        _, read = decode(loop_over(model, None), [scored])
        scores = next(delta.prompt_logprobs for done in read for delta in done.deltas if delta.prompt_logprobs)
        first = [score.top[0][0] for score in scores[len(one.prompt) - 1 :]]
        told = [delta.stats for done in rounds for delta in done.deltas if delta.request_id == one.request_id][-1]
        assert told is not None
        assert told.tolerated == sum(a != b for a, b in zip(tokens, first, strict=True))
        counted += told.tolerated
    assert counted > 0, "with three nats some drafts are tolerated"
    assert counted == sum(done.tolerated for done in rounds)
