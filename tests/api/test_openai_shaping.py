"""What shapes and what scores the choice, as the real `openai` client sees it, over the simulated model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.support.daemon import Daemon, configuration, running

ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 40, "temperature": 0}
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "seed": 3}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["tide", "storm"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
OFF = {"speculative_config": {"method": "off"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "tide", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    extra = "limits: {max_running: 4, max_waiting: 8}"
    with running(configuration(tmp_path_factory.mktemp("shaping"), script="base_ms=1", extra=extra)) as started:
        yield started
        assert started.stop() == 0


def complete(daemon: Daemon, **fields: Any) -> Any:
    return daemon.client.completions.create(**(ASK | fields))


def chat(daemon: Daemon, **fields: Any) -> Any:
    return daemon.client.chat.completions.create(**(CHAT | fields))


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize(
    "rule",
    [
        {"logit_bias": {"101": 3, "256": -100}},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"extra_body": {"repetition_penalty": 1.4}},
    ],
    ids=str,
)
def test_what_shapes_the_choice_works_and_does_not_depend_on_speculation(daemon, rule, temperature):
    extra = rule.get("extra_body", {})
    asked = {"temperature": temperature, "seed": 1} | rule
    shaped = complete(daemon, **(asked | {"extra_body": extra}))
    plain = complete(daemon, **(asked | {"extra_body": extra | OFF}))
    assert shaped.choices[0].text == plain.choices[0].text
    assert plain.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    without = complete(daemon, temperature=temperature, seed=1)
    assert shaped.choices[0].text != without.choices[0].text


def test_min_tokens_holds_the_end_and_stop_strings_back(daemon):
    at_once = {"logit_bias": {"256": 100}}
    assert complete(daemon, **at_once).usage.completion_tokens == 1
    answer = complete(daemon, **at_once, extra_body={"min_tokens": 20})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (21, "stop")
    first = complete(daemon).choices[0].text[0]
    assert complete(daemon, stop=first).choices[0].text == ""
    assert len(complete(daemon, stop=first, extra_body={"min_tokens": 20}).choices[0].text) >= 20


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_openai_s_shape_and_do_not_depend_on_speculation(daemon, stream, temperature):
    def content(**extra: Any) -> tuple[str, list[Any]]:
        answer = chat(daemon, logprobs=True, top_logprobs=3, temperature=temperature, stream=stream, extra_body=extra)
        if not stream:
            return answer.choices[0].message.content, answer.choices[0].logprobs.content
        chunks = [chunk.choices[0] for chunk in answer]
        scored = [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content]
        return "".join(chunk.delta.content or "" for chunk in chunks), scored

    text, tokens = content()
    assert (text, tokens) == content(**OFF)
    assert bytes(value for each in tokens for value in each.bytes).decode(errors="replace") == text
    for each in tokens:
        assert each.logprob <= 0.0
        assert len(each.top_logprobs) == 3
        assert [top.logprob for top in each.top_logprobs] == sorted(
            (t.logprob for t in each.top_logprobs), reverse=True
        )
        if temperature == 0:
            assert each.top_logprobs[0].token == each.token
            assert each.top_logprobs[0].logprob == each.logprob
    assert chat(daemon, stream=False).choices[0].logprobs is None


def test_chat_logprobs_without_top(daemon):
    tokens = chat(daemon, logprobs=True).choices[0].logprobs.content
    assert tokens
    assert all(each.top_logprobs == [] for each in tokens)
    with pytest.raises(openai.BadRequestError, match="needs 'logprobs'"):
        chat(daemon, top_logprobs=3)
    with pytest.raises(openai.BadRequestError, match="20"):
        chat(daemon, logprobs=True, top_logprobs=21)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_completion_logprobs_have_openai_s_shape(daemon, stream, echo):
    answer = complete(daemon, logprobs=2, temperature=0.4, seed=5, echo=echo, stream=stream, stop="e")
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text = "".join(chunk.text for chunk in chunks)
        parts = [chunk.logprobs for chunk in chunks if chunk.logprobs]
        lists = {name: [x for part in parts for x in getattr(part, name)] for name in type(parts[0]).model_fields}
    else:
        text = answer.choices[0].text
        lists = answer.choices[0].logprobs.model_dump()
    assert text.startswith("the sea is") == echo
    assert "".join(lists["tokens"]) == text
    assert {len(values) for values in lists.values()} == {len(lists["tokens"])}
    assert [text[offset] for offset in lists["text_offset"]] == lists["tokens"]  # a byte a token, all of them ASCII
    first = 1 if echo else 0
    if echo:
        assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
    for token, logprob, top in zip(
        *(lists[name][first:] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
        assert math.fsum(map(math.exp, top.values())) <= 1.0 + 1e-9


def test_a_prompt_is_scored_without_generating(daemon):
    answer = complete(daemon, max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "the sea is"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    scores = answer.choices[0].logprobs.token_logprobs
    assert scores[0] is None
    assert (
        scores[1:] == complete(daemon, echo=True, logprobs=0, extra_body=OFF).choices[0].logprobs.token_logprobs[1:10]
    )
    assert complete(daemon, max_tokens=0, echo=True, prompt=list(b"the sea")).choices[0].text == "the sea"
    with pytest.raises(openai.BadRequestError, match="without 'echo'"):
        complete(daemon, max_tokens=0)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_seeds_of_their_own_and_the_first_is_that_of_one(daemon, stream):
    def answers(**fields: Any) -> dict[int, str]:
        answer = chat(daemon, stream=stream, temperature=1.0, **fields)
        if not stream:
            return {choice.index: choice.message.content for choice in answer.choices}
        texts: dict[int, str] = {}
        ended = []
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                ended += [choice.index] if choice.finish_reason else []
        assert sorted(ended) == sorted(texts)
        return texts

    several = answers(n=4)
    assert sorted(several) == [0, 1, 2, 3]
    assert len(set(several.values())) == 4
    for index in range(4):
        assert answers(n=1, seed=3 + index) == {0: several[index]}
    assert answers(n=4) == several


def test_choices_share_a_prompt_and_add_up(daemon):
    several = chat(daemon, n=3, temperature=1.0)
    alone = [chat(daemon, seed=3 + index, temperature=1.0) for index in range(3)]
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert several.usage.completion_tokens == sum(answer.usage.completion_tokens for answer in alone)
    assert several.usage.total_tokens == several.usage.prompt_tokens + several.usage.completion_tokens
    chunks = list(chat(daemon, n=3, temperature=1.0, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == several.usage
    assert [chunk.choices[0].delta.role for chunk in chunks[:3]] == ["assistant"] * 3
    steps = [answer.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] for answer in (several, *alone)]
    assert steps[0] > max(steps[1:])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_every_choice(daemon, stream):
    body = ASK | {"max_tokens": 3000, "ignore_eos": True, "stream": stream, "n": 6}
    with httpx.Client() as client:
        if stream:
            with client.stream("POST", f"{daemon.url}/v1/completions", json=body) as response:
                next(response.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{daemon.url}/v1/completions", json=body, timeout=0.3)
    daemon.wait_for("gauges", seconds=6.0, running=0, waiting=0)


def test_more_choices_than_there_are_places_are_refused_as_a_whole(daemon):
    for stream in (False, True):  # waiting would not help
        with pytest.raises(openai.BadRequestError, match="16 choices") as refused:
            complete(daemon, n=16, stream=stream)
        assert refused.value.code == "too_many_choices"
    daemon.wait_for("gauges", seconds=10.0, running=0, waiting=0)


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_kept_to(daemon, temperature, stream):
    always = {"speculative_config": {"num_speculative_tokens": 8}}  # whatever it costs: the policy may find it dear
    asked = {"response_format": FORMAT, "temperature": temperature, "max_tokens": 60}
    answer = chat(daemon, **asked, stream=stream, extra_body=always)
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        figures = answer.model_extra["metrics"]["speculative_decoding"]
        assert figures["num_accepted_draft_tokens"] > 10  # what the schema forces is drafted
    jsonschema.validate(json.loads(text), SCHEMA)
    assert finish == "stop"
    plain = chat(daemon, **asked, extra_body=OFF)
    assert plain.choices[0].message.content == text


def test_the_client_s_own_parsing_of_a_schema_works(daemon):
    from pydantic import BaseModel

    class Tide(BaseModel):
        high: bool
        metres: int

    answer = daemon.client.chat.completions.parse(**CHAT, response_format=Tide)
    assert isinstance(answer.choices[0].message.parsed, Tide)


def test_json_object_and_text(daemon):
    bias = {str(ord("}")): 30}  # the toy model would go on and on
    answer = chat(daemon, response_format={"type": "json_object"}, temperature=0, max_tokens=80, logit_bias=bias)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    plain = chat(daemon, response_format={"type": "text"}).choices[0].message.content
    assert plain == chat(daemon).choices[0].message.content


def test_a_schema_that_cannot_be_used_names_why(daemon):
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(?=a)"}}}
    with pytest.raises(openai.BadRequestError, match="look-around") as refused:
        chat(daemon, response_format=format_)
    assert refused.value.param == "response_format"
    assert refused.value.code == "unsupported_schema"


def test_a_worker_that_dies_half_way_changes_nothing(tmp_path):
    """Grammar, penalties' counts, choices and scores are made again from the committed tokens."""
    script = f"base_ms=2&fault=abort&arm=64&at=9&once={tmp_path}/struck"
    asked = CHAT | {
        "messages": [{"role": "user", "content": "@ the sea"}],
        "response_format": FORMAT,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "temperature": 1.0,
        "max_tokens": 60,
        "frequency_penalty": 0.4,
    }
    with running(configuration(tmp_path, script=script)) as fragile:
        struck = fragile.client.chat.completions.create(**asked, extra_body=OFF)
        assert (tmp_path / "struck").exists()
        assert fragile.status()["totals"]["restarts"] == 1
        again = fragile.client.chat.completions.create(**asked)
    for one, other in zip(struck.choices, again.choices, strict=True):
        jsonschema.validate(json.loads(one.message.content), SCHEMA)
        assert one == other
