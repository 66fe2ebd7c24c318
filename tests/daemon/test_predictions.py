"""Predicted outputs through a real daemon: the answer is the same, the usage counts, and a lost worker loses none."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIStatusError

from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.waiting import until

TOKENS = 100
CHAT: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "return the file"}],
    "max_tokens": TOKENS,
    "extra_body": {"ignore_eos": True},
}
OWN_TEXT = "drafts: [{method: suffix, memory: 0 B}]"
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = configuration(tmp_path_factory.mktemp("predicted"), script="base_ms=5", extra=OWN_TEXT)
    with running(config) as started:
        yield started


def content(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


def text_of(daemon: Daemon, **fields: Any) -> str:
    return str(daemon.client.chat.completions.create(**CHAT | fields).choices[0].message.content)


def edit(text: str) -> str:
    return f"{text[:30]}another{text[34:]}"


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("change", [str, edit, lambda _: "nothing of it " * 5, lambda _: ""])
def test_no_prediction_changes_an_answer_whole_or_streamed(plain, daemon, sampling, change):
    expected = text_of(plain, **sampling)
    prediction = content(change(expected))
    assert text_of(daemon, **sampling, prediction=prediction) == expected
    stream = daemon.client.chat.completions.create(**CHAT | sampling, prediction=prediction, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_parts_stops_formats_and_several_choices_go_with_a_prediction(plain, daemon):
    expected = text_of(plain, **GREEDY)
    parts = {"type": "content", "content": [{"type": "text", "text": piece} for piece in (expected[:9], expected[9:])]}
    for fields in (
        {"stop": expected[40:43]},
        {"n": 2, **SEEDED},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}},
        {"logprobs": True, "presence_penalty": 0.5},
    ):
        asked = CHAT | GREEDY | fields
        plainly = plain.client.chat.completions.create(**asked)
        found = daemon.client.chat.completions.create(**asked, prediction=parts)
        assert [one.message.content for one in found.choices] == [one.message.content for one in plainly.choices]


def test_usage_explain_and_status_say_what_a_prediction_brought(plain, daemon):
    expected = text_of(plain, **GREEDY)
    stream = daemon.client.chat.completions.create(
        **CHAT | GREEDY, prediction=content(expected), stream=True, stream_options={"include_usage": True}
    )
    *_, last = stream
    assert last.usage is not None
    details = last.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert 0.8 * TOKENS < details.accepted_prediction_tokens <= TOKENS
    assert details.rejected_prediction_tokens == 0
    assert last.usage.completion_tokens == TOKENS
    wrong = daemon.client.chat.completions.create(**CHAT | GREEDY, prediction=content("~" * 60))
    assert wrong.usage is not None
    assert wrong.usage.completion_tokens_details is not None
    assert wrong.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 0
    without = daemon.client.chat.completions.create(**CHAT | GREEDY)
    assert without.usage is not None
    assert without.usage.completion_tokens_details is None
    explained = outrider_process("explain", last.id, "--socket", str(daemon.admin)).stdout
    assert f"prediction: {len(expected.encode())} tokens" in explained
    assert f"{details.accepted_prediction_tokens} accepted" in explained
    told = json.loads(outrider_process("explain", last.id, "--socket", str(daemon.admin), "--json").stdout)
    assert told["requests"][0]["predicted_right"] == details.accepted_prediction_tokens
    assert "prediction" in [one["name"] for one in daemon.status()["replicas"][0]["gauges"]["drafters"]]


def test_the_bound_of_predictions_is_told_and_overrides_hold(daemon):
    def effective(**fields: Any) -> dict[str, Any]:
        answer: Any = daemon.client.chat.completions.create(**CHAT | GREEDY | fields)
        return dict(answer.metrics["speculative_decoding"]["effective"])

    assert effective()["max_speculative_tokens"] == 12
    assert effective(prediction=content("abc"))["max_speculative_tokens"] == 64
    extra = {"extra_body": {"speculative_config": {"max_speculative_tokens": 5}}}
    assert effective(prediction=content("abc"), **extra)["max_speculative_tokens"] == 5
    off = {"extra_body": {"speculative_config": {"method": "off"}}}
    assert effective(prediction=content("abc"), **off)["method"] == "off"


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("the text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": 5}, "prediction.content"),
        (
            {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "prediction.content.0.type",
        ),
        ({"type": "content", "content": "a", "more": 1}, "prediction.more"),
        ({"type": "content", "content": "word " * 4000}, "prediction"),
        ({"type": "content", "content": "word " * 40_000}, "prediction"),
    ],
)
def test_a_prediction_that_is_none_is_named(daemon, prediction, param):
    with pytest.raises(APIStatusError) as refused:
        daemon.client.chat.completions.create(**CHAT, prediction=prediction)
    assert refused.value.status_code == 400
    assert refused.value.body is not None
    assert refused.value.param == param


def test_a_stream_whose_worker_is_killed_goes_on_in_its_prediction(plain, tmp_path):
    asked: dict[str, Any] = CHAT | SEEDED | {"max_tokens": 400}
    expected = str(plain.client.chat.completions.create(**asked).choices[0].message.content)
    config = configuration(tmp_path, script="base_ms=40&load_ms=5000", replicas="2", extra=OWN_TEXT)
    with running(config) as daemon:
        until(lambda: {one["phase"] for one in daemon.status()["replicas"]} == {"ready"})
        predicted = {"prediction": content(edit(expected)), "stream_options": {"include_usage": True}}
        stream: Any = daemon.client.chat.completions.create(**asked | predicted, stream=True)
        pieces: list[str] = []
        chunks = iter(stream)
        while len("".join(pieces)) < 20:
            pieces.append(next(chunks).choices[0].delta.content or "")
        serving = next(one for one in daemon.status()["replicas"] if one["gauges"] and one["gauges"]["running"])
        os.kill(serving["ready"]["pid"], signal.SIGKILL)
        usage = None
        for chunk in chunks:
            usage = chunk.usage or usage
            pieces += [one.delta.content or "" for one in chunk.choices]
        assert "".join(pieces) == expected
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.accepted_prediction_tokens > 200
