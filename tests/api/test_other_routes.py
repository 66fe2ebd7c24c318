"""Tokens and texts, fingerprints, the liveness of decoding, and what is not served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from orchestrator.daemon.api.question import system_fingerprint
from orchestrator.daemon.api.served import Liveness
from orchestrator.daemon.control.port import StateView
from orchestrator.protocol.rounds import Delta, RoundReport
from tests.api.support import CONTEXT_TOKENS, READY, TOKENIZER, HandClock, ScriptedControl, app_over, client_of, serving
from tests.support.ready import change_ready

ROUND = RoundReport([Delta("a", [1])], 1, 2, 0, 0, 0, [], 1.0, 1.0, 0.0)


async def call(path: str, body: Any = None, method: str = "POST", **options: Any) -> httpx.Response:
    control = options.pop("control", None) or ScriptedControl()
    async with serving(app_over(control)) as url, httpx.AsyncClient(base_url=url) as client:
        if body is not None:
            options["json"] = body
        return await client.request(method, path, **options)


async def test_text_to_tokens_and_back():
    answer = (await call("/tokenize", {"model": "toy", "prompt": "hi \u20ac", "return_token_strs": True})).json()
    assert answer == {
        "count": 6,
        "max_model_len": CONTEXT_TOKENS,
        "tokens": list("hi \u20ac".encode()),
        "token_strs": ["h", "i", " ", "\ufffd", "\ufffd", "\ufffd"],
    }
    assert (await call("/detokenize", {"tokens": answer["tokens"]})).json() == {"prompt": "hi \u20ac"}


@pytest.mark.parametrize("generation", [True, False])
async def test_messages_become_what_chat_completions_would_be_given(generation):
    messages = [{"role": "user", "content": "hi <|end|>"}]
    answer = (await call("/tokenize", {"messages": messages, "add_generation_prompt": generation})).json()
    assert answer["tokens"] == TOKENIZER.encode_chat(messages, add_generation_prompt=generation)
    assert answer["token_strs"] is None
    if generation:
        control = ScriptedControl()
        await call("/v1/chat/completions", {"model": "toy", "messages": messages}, control=control)
        assert control.submits[0].prompt == answer["tokens"]
    text = (await call("/detokenize", {"tokens": answer["tokens"]})).json()["prompt"]
    assert text == TOKENIZER.render_chat(messages, generation)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            400,
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [5, 272]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_tokenised_is_named(path, body, status, param):
    answer = await call(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("key", ["promt", "echos", "zzz", "best_of", "top_n_sigma"])
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_field_that_is_not_known_is_refused_in_the_words_of_the_other_routes(path, key):
    body = {"prompt": "x"} if path == "/tokenize" else {"tokens": [5]}
    here = (await call(path, body | {key: 7})).json()["error"]
    there = (await call("/v1/completions", {"model": "toy", "prompt": "x", key: 7})).json()["error"]
    assert here["param"] == there["param"] == key
    assert here["code"] == there["code"]
    assert here["message"].partition(";")[0] == there["message"].partition(";")[0]


async def test_nothing_is_tokenised_before_the_model_is_there():
    control = ScriptedControl(phase="starting", ready=None)
    answer = await call("/tokenize", {"prompt": "x"}, control=control)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    ("path", "instead"),
    [("/v1/embeddings", "embedding model"), ("/v1/complete", "/v1/messages"), ("/v1/nothing", "no route")],
)
async def test_what_is_not_served_says_so_and_what_to_use(path, instead):
    answer = await call(path, {"model": "toy", "input": "x"})
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert instead in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_a_body_declared_as_something_else_is_415(kind):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = await call(path, content=b'{"model": "toy"}', headers={"Content-Type": kind})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["", "application/json; charset=utf-8", "Application/JSON"])
async def test_json_is_taken_under_its_names_and_without_one(kind):
    headers = {"Content-Type": kind} if kind else {}
    answer = await call("/v1/completions", content=b'{"model": "toy", "prompt": "x"}', headers=headers)
    assert answer.status_code == 200


async def test_the_default_limit_of_a_completion_gives_way_to_the_context():
    control = ScriptedControl()
    for length in (CONTEXT_TOKENS - 16, CONTEXT_TOKENS - 5, CONTEXT_TOKENS - 1):
        assert (await call("/v1/completions", {"model": "toy", "prompt": "x" * length}, control=control)).is_success
    assert [submit.max_tokens for submit in control.submits] == [16, 5, 1]
    full = await call("/v1/completions", {"model": "toy", "prompt": "x" * CONTEXT_TOKENS})
    assert full.json()["error"]["code"] == "context_length_exceeded"
    asked = await call("/v1/completions", {"model": "toy", "prompt": "x" * (CONTEXT_TOKENS - 5), "max_tokens": 16})
    assert asked.status_code == 400


def test_the_fingerprint_follows_what_decides_the_bits_and_nothing_else():
    before = system_fingerprint(READY)
    assert before is not None
    assert before.startswith("fp_")
    for name, value in {
        "weights": "q8_0",
        "activations": "bf16",
        "kv_cache": "u8",
        "exactness": "kernel",
        "adapter": "other",
        "device_name": "other",
        "model_digest": "abc",
        "model": "other",
    }.items():
        assert system_fingerprint(change_ready(READY, **{name: value})) != before, name
    indifferent: dict[str, Any] = {
        "pid": 7,
        "load_s": 9.0,
        "max_depth": 1,
        "drafters": ["suffix"],
        "slots": 1,
        "device": "GPU.1",
    }
    for name, value in indifferent.items():
        assert system_fingerprint(change_ready(READY, **{name: value})) == before, name
    assert system_fingerprint(None) is None


@pytest.mark.parametrize("field", ["adapter", "device_name", "weights"])
def test_measured_bits_decide_the_fingerprint_alone(field: str):
    measured = change_ready(READY, class_fingerprint="abc")
    assert system_fingerprint(change_ready(measured, **{field: "other"})) == system_fingerprint(measured)


async def test_every_answer_and_every_chunk_has_the_fingerprint():
    expected = system_fingerprint(READY)
    messages: Any = [{"role": "user", "content": "x"}]
    async with client_of(app_over(ScriptedControl())) as client:
        whole = await client.chat.completions.create(model="toy", messages=messages)
        assert whole.system_fingerprint == expected
        assert (await client.completions.create(model="toy", prompt="x")).system_fingerprint == expected
        options: Any = {"include_usage": True}
        chunks = await client.chat.completions.create(
            model="toy", messages=messages, stream=True, stream_options=options
        )
        assert {chunk.system_fingerprint async for chunk in chunks} == {expected}
        texts = await client.completions.create(model="toy", prompt="x", stream=True)
        assert {chunk.system_fingerprint async for chunk in texts} == {expected}


class Changing(ScriptedControl):
    """Its second delta is of another group than its first."""

    async def generate(self, submit):
        groups = iter(("one", "other"))
        async for delta in super().generate(submit):
            yield msgspec.structs.replace(delta, group=next(groups, ""))


async def test_a_whole_answer_names_the_group_that_it_began_in_and_where_it_changed() -> None:
    first, other = (system_fingerprint(READY, group=group) for group in ("one", "other"))
    async with client_of(app_over(Changing())) as client:
        answer = await client.completions.create(model="toy", prompt="x")
    assert answer.system_fingerprint == first
    assert answer.usage is not None
    marks = answer.usage.model_dump()["system_fingerprints"]
    assert [(mark["from_token"], mark["system_fingerprint"]) for mark in marks] == [(3, other)]


class Streaming(ScriptedControl):
    """A control with so many live streams."""

    live = 0

    def view(self) -> StateView:
        return replace(super().view(), streams=self.live)


def test_decoding_is_idle_ok_or_stalled():
    clock, control = HandClock(), Streaming()
    liveness = Liveness(control, clock, stalled_after_s=30.0)
    assert liveness.describe_liveness() == {"status": "idle", "phase": "ready", "last_token_age_s": None, "streams": 0}
    clock.now_s += 1000.0
    liveness.observe_request()
    control.live = 1
    assert liveness.verdict() == "ok"  # the first request after a long rest is not late
    clock.now_s += 20.0
    liveness.observe_round(msgspec.structs.replace(ROUND, deltas=[]))  # prefill
    clock.now_s += 20.0
    assert liveness.verdict() == "ok"
    assert liveness.describe_liveness()["last_token_age_s"] is None
    liveness.observe_round(ROUND)
    clock.now_s += 31.0
    assert liveness.describe_liveness() == {
        "status": "stalled",
        "phase": "ready",
        "last_token_age_s": 31.0,
        "streams": 1,
    }
    liveness.observe_request()  # more requests do not hide it
    assert liveness.verdict() == "stalled"
    control.live = 0
    assert liveness.verdict() == "idle"


async def test_health_tells_of_decoding_and_a_stall_is_503_on_its_own_route():
    clock = HandClock()
    app = app_over(control := ScriptedControl(hang_at=1), clock=clock, stalled_after_s=30.0)
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).json()["decode"]["status"] == "idle"
        async with client.stream("POST", "/v1/completions", json={"model": "toy", "prompt": "x", "stream": True}):
            assert (await client.get("/health/decode")).json()["status"] == "ok"
            clock.now_s += 31.0
            stalled = await client.get("/health/decode")
            assert stalled.status_code == 503
            assert stalled.json()["error"]["code"] == "decode_stalled"
            assert "Retry-After" in stalled.headers
            assert (await client.get("/health")).json()["decode"]["status"] == "stalled"
        await control.until_all_ended()
        assert (await client.get("/health/decode")).json()["status"] == "idle"
