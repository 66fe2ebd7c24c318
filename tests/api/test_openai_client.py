"""The public API as the real `openai` client sees it, over a real daemon with the simulated model."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.daemon import Daemon, configuration, running

ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 60, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    "max_tokens": 40,
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    extra = "limits: {max_running: 4, max_waiting: 4, max_body: 64 KiB}"
    with running(configuration(tmp_path_factory.mktemp("api"), script="base_ms=2", extra=extra)) as started:
        yield started
        assert started.stop() == 0


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_models_are_listed_and_found(daemon):
    listed = daemon.client.models.list().data
    assert [model.id for model in listed] == ["toy"]
    assert daemon.client.models.retrieve("toy").owned_by == "outrider"
    with pytest.raises(openai.NotFoundError):
        daemon.client.models.retrieve("other")


def test_streamed_and_whole_answers_are_the_same(daemon):
    whole = daemon.client.completions.create(**ASK)
    assert whole.choices[0].text == text_of(daemon.client.completions.create(**ASK, stream=True))
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(b"the sea is")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}])
def test_speculation_on_off_and_fixed_give_the_same_text(daemon, sampling):
    texts = set()
    for config in (
        None,
        {"method": "off"},
        {"method": "auto"},
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 7},
    ):
        extra = {"speculative_config": config} if config else {}
        answer = daemon.client.completions.create(**(ASK | sampling), extra_body=extra)
        texts.add(answer.choices[0].text)
        figures = answer.model_extra["metrics"]["speculative_decoding"]
        if config == {"method": "off"}:
            assert figures["num_draft_tokens"] == 0
        if config == {"num_speculative_tokens": 7}:
            assert figures["num_draft_tokens"] > 0
    assert len(texts) == 1


def test_seeds_are_reproducible_and_differ(daemon):
    def sample(**fields: Any) -> str:
        return daemon.client.completions.create(**(ASK | {"temperature": 1.0} | fields)).choices[0].text

    assert sample(seed=1) == sample(seed=1)
    assert sample(seed=1) != sample(seed=2)
    assert sample(seed=-1) == sample(seed=2**64 - 1)
    assert sample() != sample()


def test_chat_stream_has_a_role_one_id_a_finish_and_usage_without_choices(daemon):
    chunks = list(daemon.client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens <= 40
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    without = list(daemon.client.chat.completions.create(**CHAT, stream=True))
    assert all(chunk.choices for chunk in without)


def test_the_stream_ends_with_done_on_the_wire(daemon):
    with httpx.stream("POST", f"{daemon.url}/v1/completions", json=ASK | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = "".join(response.iter_text())
    assert raw.endswith("data: [DONE]\n\n")
    assert all(line.startswith("data: ") for line in raw.split("\n\n") if line)


def test_max_tokens_and_its_two_names(daemon):
    for name in ("max_tokens", "max_completion_tokens"):
        body = {key: value for key, value in CHAT.items() if key != "max_tokens"} | {name: 3}
        answer = daemon.client.chat.completions.create(**body, temperature=0)
        assert answer.usage.completion_tokens == 3
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_frees_the_request(daemon, stream):
    whole = daemon.client.completions.create(**ASK).choices[0].text
    stop = whole[20:23]
    cut = whole[: whole.index(stop)]
    answer = daemon.client.completions.create(**ASK, stop=["never there", stop], stream=stream)
    if stream:
        chunks = list(answer)
        assert "".join(chunk.choices[0].text for chunk in chunks) == cut
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert answer.choices[0].text == cut
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 60
    daemon.wait_for("gauges", running=0, waiting=0)


def test_stop_token_ids_and_ignore_eos(daemon):
    first = daemon.client.completions.create(**ASK, logprobs=None).choices[0].text[0]
    stopped = daemon.client.completions.create(**ASK, extra_body={"stop_token_ids": [ord(first)]})
    assert stopped.choices[0].text == ""
    assert stopped.usage.completion_tokens == 1
    endless = daemon.client.completions.create(**(ASK | {"max_tokens": 300}), extra_body={"ignore_eos": True})
    assert endless.usage.completion_tokens == 300


def test_prompts_as_tokens_equal_prompts_as_text(daemon):
    tokens = daemon.client.completions.create(**(ASK | {"prompt": list(b"the sea is")}))
    assert tokens.choices[0].text == daemon.client.completions.create(**ASK).choices[0].text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(daemon, stream):
    body = ASK | {"max_tokens": 3000, "ignore_eos": True, "stream": stream}
    with httpx.Client() as client:
        if stream:
            with client.stream("POST", f"{daemon.url}/v1/completions", json=body) as response:
                next(response.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{daemon.url}/v1/completions", json=body, timeout=0.3)
    daemon.wait_for("gauges", seconds=6.0, running=0, waiting=0)
    gauges = daemon.status()["gauges"]
    assert gauges["free_blocks"] == gauges["total_blocks"]


REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "gpt-4"}, 404, "model"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [1, 9999]}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"max_tokens": 99999}, 400, "max_tokens"),
    ({"temperature": 3}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"stop": ""}, 400, "stop"),
    ({"stop_token_ids": [272]}, 400, "stop_token_ids"),
    ({"n": 0}, 400, "n"),
    ({"n": 17}, 400, "n"),
    ({"best_of": 2}, 400, "best_of"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"logit_bias": {"272": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"five": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias.5"),
    ({"logit_bias": {str(key): 1 for key in range(1025)}}, 400, "logit_bias"),
    ({"presence_penalty": 2.5}, 400, "presence_penalty"),
    ({"frequency_penalty": -2.5}, 400, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"min_tokens": 61}, 400, "min_tokens"),
    ({"max_tokens": -1, "echo": True}, 400, "max_tokens"),
    ({"response_format": {"type": "yaml"}}, 400, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, 400, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}, 400, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "colour"}}}},
        400,
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        400,
        "response_format",
    ),
    ({"temprature": 1}, 400, "temprature"),
    ({"speculative_config": {"method": "of"}}, 400, "speculative_config.method"),
    ({"speculative_config": {"depth": 3}}, 400, "speculative_config.depth"),
    (
        {"speculative_config": {"num_speculative_tokens": -1}},
        400,
        "speculative_config.num_speculative_tokens",
    ),
    (
        {"speculative_config": {"max_speculative_tokens": 65}},
        400,
        "speculative_config.max_speculative_tokens",
    ),
    (
        {"speculative_config": {"num_speculative_tokens": 2, "max_speculative_tokens": 3}},
        400,
        "speculative_config.max_speculative_tokens",
    ),
    ({"user": 5}, 400, "user"),
    ({"user": "x" * 513}, 400, "user"),
]


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_refused_in_openai_s_shape(daemon, fields, status, param):
    body = ASK | fields
    with pytest.raises(openai.APIStatusError) as caught:
        daemon.client.post("/completions", body=body, cast_to=httpx.Response)
    assert caught.value.status_code == status
    error = caught.value.response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"] or "").startswith(param or "")
    assert "\n" not in error["message"]


def test_a_misspelt_field_names_the_nearest(daemon):
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        daemon.client.completions.create(**(ASK | {"extra_body": {"temprature": 1}}))


def test_harmless_fields_are_accepted(daemon):
    answer = daemon.client.completions.create(
        **ASK, user="me", n=1, presence_penalty=0, logit_bias={}, extra_body={"metadata": {"a": "b"}}
    )
    assert answer.choices[0].text


def test_too_long_a_prompt_states_limit_and_count(daemon):
    with pytest.raises(openai.BadRequestError, match=r"4096.*5000") as caught:
        daemon.client.completions.create(**(ASK | {"prompt": "x" * 5000}))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[1]", 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b"x" * 70_000, 413),
        ("POST", "/v1/chat/completions", b'{"model": "toy", "messages": []}', 400),
        (
            "POST",
            "/v1/chat/completions",
            b'{"model": "toy", "messages": [{"role": "pope", "content": ""}]}',
            400,
        ),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/v1/nothing", b"", 404),
    ],
)
def test_bad_http_is_answered_in_openai_s_shape(daemon, method, path, content, status):
    response = httpx.request(method, f"{daemon.url}{path}", content=content)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_without_a_length_is_bounded_too(daemon):
    response = httpx.post(f"{daemon.url}/v1/completions", content=(b"y" * 10_000 for _ in range(9)))
    assert response.status_code == 413


def test_a_full_queue_is_429_with_retry_after_and_the_others_are_served(daemon):
    body = ASK | {"max_tokens": 900, "ignore_eos": True}
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=180))
        )
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [answer for answer in answers if answer.status_code == 429]
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(served) == 16
    assert len(served) >= 8
    assert refused
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    assert len({answer.json()["choices"][0]["text"] for answer in served}) == 1


def test_probes_and_metrics(daemon):
    assert httpx.get(f"{daemon.url}/health").json()["status"] == "ok"
    assert httpx.get(f"{daemon.url}/ready").status_code == 200
    daemon.client.completions.create(**ASK)
    text = httpx.get(f"{daemon.url}/metrics").text

    def value(name: str) -> float:
        found = re.search(rf'^outrider_{name}{{[^}}]*model_name="toy"[^}}]*}} (\S+)$', text, re.MULTILINE)
        assert found, name
        return float(found[1])

    drafted, accepted = (
        value("spec_decode_num_draft_tokens_total"),
        value("spec_decode_num_accepted_tokens_total"),
    )
    assert drafted >= accepted > 0
    assert value("spec_decode_num_drafts_total") > 0
    assert 0 < value("acceptance_rate") <= 1
    assert value("generation_tokens_total") > 0
    assert value("time_to_first_token_seconds_count") > 0
    assert value("num_requests_running") == 0


def test_the_request_id_is_echoed(daemon):
    response = httpx.post(f"{daemon.url}/v1/completions", json=ASK, headers={"X-Request-Id": "abc"})
    assert response.headers["X-Request-Id"] == "abc"
