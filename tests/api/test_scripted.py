"""The API over a scripted control: what reaches it, what comes of its answers and failures, and that it is let go."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message

from orchestrator.daemon.api import wire
from orchestrator.errors import RequestError
from policies.sampling import Dry
from tests.api.support import EOS, ScriptedControl, app_over, client_of, leave_hanging, serving

ASK: dict[str, Any] = {"model": "toy", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "x"}]}


async def post(control: ScriptedControl, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with serving(app_over(control)) as url, httpx.AsyncClient() as client:
        return await client.post(f"{url}/v1/completions", json=body, headers=headers)


async def test_sampling_seed_depth_and_stops_reach_the_worker():
    control = ScriptedControl()
    extra = {"top_k": 5, "min_p": 0.25, "stop_token_ids": [7], "speculative_config": {"num_speculative_tokens": 3}}
    async with client_of(app_over(control)) as client:
        await client.completions.create(**ASK, temperature=0.5, top_p=0.75, seed=-1, max_tokens=9, extra_body=extra)
    (submit,) = control.submits
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.75, 0.25)
    assert sampling.seed == 2**64 - 1
    assert (submit.prompt, submit.max_tokens, submit.depth) == ([ord("x")], 9, 3)
    assert submit.stop_tokens == [7, EOS]


FURTHER = {
    "typical_p": 0.5,
    "xtc_probability": 0.25,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", "ab"],
}


async def test_llama_cpps_samplers_reach_the_worker_by_its_names():
    control = ScriptedControl()
    async with client_of(app_over(control)) as client:
        await client.completions.create(**ASK, extra_body=FURTHER)
        await client.completions.create(**ASK, extra_body={"dry_multiplier": 1.0})
        await client.completions.create(**ASK, extra_body={"xtc_probability": 1.0, "xtc_threshold": 0.6})
        await client.completions.create(**ASK, extra_body={"dry_multiplier": 1.0, "dry_penalty_last_n": 0})
    first, usual, *off = [submit.sampling for submit in control.submits]
    assert (first.typical_p, first.xtc_probability, first.xtc_threshold) == (0.5, 0.25, 0.2)
    assert first.dry == Dry(0.8, 2.0, 3, 64, (((10,), ()), ((97,), (98,))))
    assert usual.dry == Dry(1.0, 1.75, 2, -1, tuple(((byte,), ()) for byte in b'\n:"*'))
    assert [(sampling.narrows, sampling.dry) for sampling in off] == [(False, None)] * 2


async def test_breakers_of_too_many_tokens_are_refused(monkeypatch):
    monkeypatch.setattr(wire, "MAX_BREAKER_TOKENS", 3)
    answer = await post(ScriptedControl(), ASK | {"dry_multiplier": 1, "dry_sequence_breakers": ["ab", "cd"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dry_sequence_breakers")
    assert "stand in 4 tokens, and 3 are taken" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["typical_p", "xtc_probability"])
async def test_what_would_change_a_greedy_answer_in_no_known_way_is_refused(field):
    answer = await post(ScriptedControl(), ASK | {"temperature": 0, field: 0.5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert "needs a temperature above 0" in answer.json()["error"]["message"]


async def test_what_a_class_of_requests_has_in_common_reaches_the_worker():
    control = ScriptedControl()
    async with client_of(app_over(control)) as client:
        await client.completions.create(
            **ASK, user="ada", extra_body={"speculative_config": {"max_speculative_tokens": 3}}
        )
        await client.chat.completions.create(**CHAT)
    first, second = control.submits
    assert (first.route, first.user, first.depth, first.most_depth) == ("/v1/completions", "ada", None, 3)
    assert (second.route, second.user, second.depth, second.most_depth) == ("/v1/chat/completions", "", None, None)


@pytest.mark.parametrize(
    ("config", "depth"),
    [(None, None), ({"method": "auto"}, None), ({"method": "off"}, 0), ({"num_speculative_tokens": 0}, 0)],
)
async def test_speculation_can_be_left_alone_or_switched_off(config, depth):
    control = ScriptedControl()
    await post(control, ASK | {"speculative_config": config})
    assert control.submits[0].depth == depth


async def test_a_top_k_beyond_the_vocabulary_can_cross_to_the_worker():
    control = ScriptedControl()
    assert (await post(control, ASK | {"top_k": 10**30})).status_code == 200
    assert control.submits[0].sampling.top_k == 272  # the vocabulary: it keeps every token


@pytest.mark.parametrize("stream", [False, True])
async def test_a_character_split_over_deltas_comes_whole(stream):
    text = "a€😀é"
    control = ScriptedControl(steps=[[byte] for byte in text.encode()])
    async with client_of(app_over(control)) as client:
        answer = await client.completions.create(**ASK, stream=stream)
        if stream:
            pieces = [chunk.choices[0].text async for chunk in answer]
            assert not any("\ufffd" in piece for piece in pieces)
            assert "".join(pieces) == text
        else:
            assert answer.choices[0].text == text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_deltas_ends_the_request_at_once(stream):
    control = ScriptedControl(steps=[list(b"one EN"), list(b"D two"), list(b"never")], hang_at=2)
    async with client_of(app_over(control)) as client:
        answer = await client.completions.create(**ASK, stop="END", stream=stream)
        if stream:
            chunks = [chunk async for chunk in answer]
            assert "".join(chunk.choices[0].text for chunk in chunks) == "one "
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")
            assert answer.usage.completion_tokens == len(b"one END")
        await control.until_all_ended()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "steps", "finish", "reason"),
    [
        ({"stop": ["never", "END"]}, [list(b"one EN"), list(b"D two")], "stop", "END"),
        ({"stop_token_ids": [7]}, [[*b"hi", 7]], "stop", 7),
        ({}, [[*b"hi", EOS]], "stop", None),
        ({}, [list(b"hi")], "length", None),
        ({}, [list(b"hi"), []], "deadline", "deadline"),
    ],
)
async def test_the_stop_reason_says_what_ended_it(stream, fields, steps, finish, reason):
    control = ScriptedControl(steps=steps, finish=finish)
    async with client_of(app_over(control)) as client:
        answer = await client.completions.create(**ASK, stream=stream, extra_body=fields)
        choice = [chunk async for chunk in answer][-1].choices[0] if stream else answer.choices[0]
    assert choice.model_extra["stop_reason"] == reason
    assert choice.finish_reason == ("length" if finish == "deadline" else finish)


async def test_the_end_token_is_counted_and_not_shown():
    control = ScriptedControl(steps=[[*b"hi", EOS]], finish="stop")
    async with client_of(app_over(control)) as client:
        answer = await client.chat.completions.create(**CHAT)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hi", "stop")
    assert answer.usage.completion_tokens == 3


async def test_the_usage_chunk_carries_the_speculation_figures():
    async with client_of(app_over(ScriptedControl())) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert chunks[-1].choices == []
    figures = chunks[-1].model_extra["metrics"]["speculative_decoding"]
    assert figures == {
        "mean_acceptance_length": 1 + 3 / 4,
        "draft_acceptance_rate": 3 / 6,
        "num_spec_steps": 4,
        "num_draft_tokens": 6,
        "num_accepted_draft_tokens": 3,
        "acceptance": "coupled",
        "tolerance_delta": None,
        "num_tolerated_tokens": 0,
        "effective": None,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "retry"), [(429, 3), (503, 5), (400, None), (500, None)])
async def test_a_refusal_has_its_own_status_before_a_stream_begins(stream, status, retry):
    control = ScriptedControl(error=RequestError("no", status=status, code="because", retry_after_s=retry))
    response = await post(control, ASK | {"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == "because"
    assert response.headers.get("Retry-After") == (str(retry) if retry else None)
    await control.until_all_ended()


@pytest.mark.parametrize(
    ("error", "message"),
    [(RequestError("the worker failed", status=500), "the worker failed"), (ValueError("secret"), "its log says why")],
)
async def test_an_error_in_a_stream_is_an_event_then_done(error, message):
    control = ScriptedControl(error=error, error_at=1)
    response = await post(control, ASK | {"stream": True})
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert json.loads(events[0])["choices"][0]["text"] == "hel"
    assert message in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"
    assert "secret" not in response.text


@pytest.mark.filterwarnings("default")
async def test_a_bug_is_a_500_without_its_words():
    response = await post(ScriptedControl(error=ValueError("secret")), ASK, **{"X-Request-Id": "abc"})
    assert response.status_code == 500
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in response.text
    assert response.headers["X-Request-Id"] == "abc"


async def test_every_answer_has_a_request_id():
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        for response in (
            await client.post("/v1/completions", json=ASK),
            await client.post("/v1/completions", json={}),
            await client.get("/nothing"),
            await client.get("/v1/models"),
        ):
            assert response.headers["X-Request-Id"]
        echoed = await client.get("/nothing", headers={"X-Request-Id": "abc"})
        assert echoed.headers.get_list("X-Request-Id") == ["abc"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_the_request(stream):
    control = ScriptedControl(hang_at=1)
    async with serving(app_over(control)) as url, httpx.AsyncClient() as client:
        await leave_hanging(client, f"{url}/v1/completions", ASK | {"stream": stream}, control)
        await control.until_all_ended()


async def test_a_client_that_goes_away_while_sending_is_no_error(caplog):
    control = ScriptedControl()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    async with serving(app_over(control)) as url:
        _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(head)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert control.submits == []


async def test_a_client_that_goes_away_before_the_headers_are_out_ends_the_request():
    control = ScriptedControl(hang_at=1)
    body = json.dumps(ASK | {"stream": True}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    blocked = asyncio.Event()

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await blocked.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        blocked.set()
        await asyncio.Event().wait()  # a full send buffer

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await app_over(control)(scope, receive, send)
    assert control.ended == [control.submits[0].request_id]


@pytest.mark.parametrize("phase", ["starting", "restarting", "draining", "failed"])
async def test_probes_tell_living_from_ready(phase):
    control = ScriptedControl(phase=phase, ready=None)
    async with serving(app_over(control, tokenizer=None)) as url, httpx.AsyncClient(base_url=url) as client:
        health, ready = await client.get("/health"), await client.get("/ready")
        asked = await client.post("/v1/completions", json=ASK)
    assert health.status_code == (503 if phase == "failed" else 200)
    assert phase in health.text
    assert ready.status_code == asked.status_code == 503
    assert int(ready.headers["Retry-After"]) >= 1
    assert phase in asked.json()["error"]["message"]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": 5}, "prompt", "send a text, token ids"),
    ({"prompt": [1, "a"]}, "prompt.1", "another kind"),
    ({"stop": ["a", 3]}, "stop.1", "valid string"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage", "valid boolean"),
    ({"echo": 0}, "echo", "valid boolean"),
    ({"n": True}, "n", "valid integer"),
    ({"best_of": 2}, "best_of", "ask for 'n' choices"),
    ({"temperature": "0.5"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"a\nb": 1}, "a\nb", "unknown field 'a\\nb'"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG, ids=lambda value: str(value)[:30])
async def test_the_wrong_parameter_is_named_exactly(fields, param, says):
    control = ScriptedControl()
    error = (await post(control, ASK | fields)).json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert control.submits == []


async def test_a_part_that_is_not_text_is_named():
    picture: Any = [{"type": "image_url", "image_url": {"url": "x"}}]
    async with client_of(app_over(ScriptedControl())) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="toy", messages=[{"role": "user", "content": picture}])
    assert refused.value.param == "messages.0.content.0.type"
    assert "'text'" in refused.value.message


async def test_numbers_that_ask_for_nothing_are_accepted_in_either_spelling():
    nothing = {"temperature": 1, "top_p": 1, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logprobs": None}
    options = {"include_usage": True, "include_obfuscation": False}
    response = await post(ScriptedControl(), ASK | nothing | {"stream": True, "stream_options": options})
    assert response.status_code == 200


async def test_chat_fills_the_context_unless_told_and_never_exceeds_it():
    control = ScriptedControl()
    async with client_of(app_over(control)) as client:
        await client.chat.completions.create(**CHAT)
        submit = control.submits[0]
        assert len(submit.prompt) + submit.max_tokens == 64
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**CHAT, max_tokens=60)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("/v1/chat/completions", {"max_tokens": 100_000}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 100_000}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 80}]}, "messages"),
        ("/v1/completions", {"max_tokens": 100_000}, "max_tokens"),
        ("/v1/completions", {"prompt": "x" * 80, "max_tokens": 1}, "prompt"),
    ],
)
async def test_what_does_not_fit_is_blamed_on_what_is_too_large(route, fields, param):
    body = {"model": "toy", **({"messages": CHAT["messages"]} if "chat" in route else {"prompt": "x"}), **fields}
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(route, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    if param.startswith("max"):
        most = int(error["message"].split("which may be ")[1].split()[0])
        assert 0 < most < 64
        body[param] = most
        async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
            assert (await client.post(route, json=body)).status_code == 200


@pytest.mark.parametrize("field", ["guided_json", "guided_choice", "guided_regex", "structured_outputs"])
async def test_another_servers_ways_to_a_format_are_told_ours(field):
    response = await post(ScriptedControl(), ASK | {field: {}})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unknown_field", field)
    assert "'response_format'" in error["message"]


async def test_metrics_have_no_twin_of_each_series_that_says_when_it_was_made():
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        await client.post("/v1/completions", json=ASK)
        told = (await client.get("/metrics")).text
    assert "outrider_request_success_total" in told
    assert "_created" not in told
