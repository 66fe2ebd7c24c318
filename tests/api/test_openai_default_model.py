"""The `openai` client on a daemon with the default model's first layers: schemas, log-probabilities and choices, with
and without speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.support.daemon import Daemon, running

pytestmark = pytest.mark.model
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["village", "town", "capital"]},
        "founded": {"type": "integer", "minimum": 1, "maximum": 2000},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["city", "kind", "founded", "rivers"],
    "additionalProperties": False,
}
ASK: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Tell me about Paris as JSON."}],
    "max_tokens": 90,
    "seed": 11,
    "logprobs": True,
    "top_logprobs": 2,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, first_layers_path, shared_store) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("default")
    config = directory / "cluster.yaml"
    config.write_text(
        f"model: {{source: '{first_layers_path}', name: default}}\ncluster: {{runtime: local}}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{shared_store}'}}\n"
        "limits: {kv_cache: 256 MiB}\n",
        encoding="utf-8",
    )
    with running(config) as started:
        yield started
        assert started.stop() == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_schema_scores_and_choices_are_the_same_at_every_depth(daemon, temperature):
    answers = []
    for config in ({"method": "off"}, {"num_speculative_tokens": 8}, {"method": "auto"}):
        answer = daemon.client.chat.completions.create(
            **ASK, temperature=temperature, n=2, response_format=FORMAT, extra_body={"speculative_config": config}
        )
        answers.append([choice.model_dump() for choice in answer.choices])
        drafted = answer.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        assert drafted == 0 if config == {"method": "off"} else drafted > 10
    assert all(choices == answers[0] for choices in answers[1:])
    for choice in answers[0]:
        text = choice["message"]["content"]
        jsonschema.validate(json.loads(text), SCHEMA)
        tokens = choice["logprobs"]["content"]
        assert bytes(value for each in tokens for value in each["bytes"]).decode() == text
    streamed = daemon.client.chat.completions.create(
        **ASK, temperature=temperature, n=2, response_format=FORMAT, stream=True
    )
    texts = {0: "", 1: ""}
    for chunk in streamed:
        for piece in chunk.choices:
            texts[piece.index] += piece.delta.content or ""
    assert texts == {choice["index"]: choice["message"]["content"] for choice in answers[0]}


def raw(token: str) -> bytes:
    """The bytes of a completion's token."""
    escaped = token.removeprefix("bytes:")
    return token.encode() if escaped == token else bytes.fromhex(escaped.replace("\\x", ""))


def test_penalties_bias_and_the_prompt_s_scores(daemon):
    def complete(method: str) -> dict[str, Any]:
        answer = daemon.client.completions.create(
            model="default",
            prompt="The sea is wide 😀 and",
            max_tokens=24,
            temperature=0.7,
            seed=2,
            logprobs=3,
            echo=True,
            frequency_penalty=0.4,
            presence_penalty=0.2,
            logit_bias={"28": 1.5},
            extra_body={"repetition_penalty": 1.1, "min_tokens": 10, "speculative_config": {"method": method}},
        )
        return dict(answer.choices[0].model_dump())

    plain = complete("off")
    assert complete("auto") == plain
    assert plain["text"].startswith("The sea is wide 😀 and")
    scores = plain["logprobs"]
    assert scores["token_logprobs"][0] is None
    assert any(token.startswith("bytes:") for token in scores["tokens"])  # the emoji is several tokens
    assert scores["text_offset"] == sorted(scores["text_offset"])
    assert b"".join(map(raw, scores["tokens"])).decode() == plain["text"]
