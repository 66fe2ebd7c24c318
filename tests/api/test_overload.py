"""What must not stand in everybody's way: bodies that cannot fit, slow work, and more of everything than there is."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.keys import Keys
from orchestrator.errors import RequestError
from tests.api.support import TOKENIZER, WITHIN_S, ScriptedControl, app_over, client_of, serving
from tests.api.test_keys import key_file

MIB = 1024 * 1024
ASK: dict[str, Any] = {"model": "toy", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "x"}]}
LARGE = "a" * 40_000  # a large body: it has the lane of its own


class Watched(Tokenizer):
    """Counts what it encodes. A text that begins with "wait" is encoded once `go` is set."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER._vocabulary, TOKENIZER._template)
        self.encoded = 0
        self.begun, self.go = threading.Event(), threading.Event()

    def encode_prompt(self, text: str, *, special: bool) -> list[int]:
        self.encoded += 1
        if text.startswith("wait"):
            self.begun.set()
            self.go.wait(20.0)
        return super().encode_prompt(text[:8], special=special)

    def encode_chat(self, *arguments: Any, **named: Any) -> list[int]:
        self.encoded += 1
        return super().encode_chat(*arguments, **named)

    def count_min_tokens(self, text: str, enough: int) -> int:
        return 1 if text.startswith(("wait", LARGE[:100])) else super().count_min_tokens(text, enough)


def parts_of(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "0123456789" * (8 * MIB // 10 - 100)}),
        ("/v1/completions", {"prompt": ["0" * MIB]}),
        ("/v1/completions", {"prompt": "\u00e9" * (MIB // 2)}),
        ("/v1/completions", {"prompt": [1] * MIB}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "0" * MIB}]}),
        ("/v1/chat/completions", {"messages": parts_of("0" * MIB)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 60_000}),
    ],
)
async def test_a_prompt_that_cannot_fit_is_never_tokenised(path, body):
    control, tokenizer = ScriptedControl(), Watched()
    app = app_over(control, tokenizer=tokenizer, max_body=16 * MIB)
    async with serving(app) as url, httpx.AsyncClient(timeout=180) as client:
        answer = await client.post(url + path, json={"model": "toy"} | body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.json()["error"]["param"] == ("prompt" if "prompt" in body else "messages")
    assert (tokenizer.encoded, control.submits) == (0, [])


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property_{index}": {"type": "string"} for index in range(count)}}


def asking_for(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}


@pytest.mark.parametrize(("count", "code"), [(200_000, "parameters_too_large"), (3_000, "schema_too_large")])
async def test_too_large_a_schema_is_refused_with_the_way_out(count, code):
    control = ScriptedControl()
    body = CHAT | {"response_format": asking_for(properties(count))}
    async with serving(app_over(control, max_body=16 * MIB)) as url, httpx.AsyncClient(timeout=180) as client:
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, "response_format")
    assert "operator" in error["message"]
    assert control.submits == []


async def test_an_outline_that_cannot_be_read_is_the_clients_mistake():
    deep = b'{"model":"toy","prompt":"x","metadata":' + b"[" * MIB + b"]" * MIB + b"}"
    torn = b'{"model":"toy","prompt":"' + b"x" * MIB
    strange = json.dumps({"model": "toy", "messages": [[1]] * MIB}).encode()
    async with (
        serving(app_over(ScriptedControl(), max_body=16 * MIB)) as url,
        httpx.AsyncClient(timeout=180) as client,
    ):
        for body in (deep, torn, strange):
            answer = await client.post(f"{url}/v1/chat/completions", content=body)
            assert answer.status_code == 400
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("size", [10, MIB])
async def test_where_there_is_no_room_nothing_is_tokenised_and_the_connection_lives(size):
    control, tokenizer = ScriptedControl(), Watched()
    control.no_room = RequestError("full", status=429, code="queue_full", retry_after_s=7)
    async with client_of(app_over(control, tokenizer=tokenizer, max_body=8 * MIB)) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="toy", prompt="0" * size)
        assert refused.value.response.headers["Retry-After"] == "7"
        assert (tokenizer.encoded, control.submits) == (0, [])
        control.no_room = None
        await client.completions.create(**ASK)


async def test_small_requests_do_not_wait_behind_a_large_one():
    control, tokenizer = ScriptedControl(), Watched()
    async with client_of(app_over(control, tokenizer=tokenizer, max_body=8 * MIB)) as client:
        large = asyncio.create_task(client.completions.create(model="toy", prompt="wait" + LARGE))
        while not tokenizer.begun.is_set():  # noqa: ASYNC110 -- another thread sets it
            await asyncio.sleep(0.005)
        for _ in range(5):
            await client.completions.create(**ASK)
            await client.chat.completions.create(**CHAT)
        assert not large.done()
        tokenizer.go.set()
        await large


async def test_work_that_takes_too_long_is_refused_and_the_next_one_is_done():
    tokenizer = Watched()
    app = app_over(ScriptedControl(), tokenizer=tokenizer, max_body=8 * MIB, translation_timeout_s=0.3)
    async with client_of(app) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="toy", prompt="wait" + LARGE)
        assert refused.value.code == "body_too_slow"
        async with asyncio.timeout(WITHIN_S):
            while not await is_read_in_time(client, LARGE):  # another thread took over; the machine may stand still
                pass
        tokenizer.go.set()


async def is_read_in_time(client: AsyncOpenAI, prompt: str) -> bool:
    try:
        await client.completions.create(model="toy", prompt=prompt)
    except openai.BadRequestError as refused:
        if refused.code != "body_too_slow":
            raise
        return False
    return True


async def test_bodies_beyond_the_budget_are_refused_until_there_is_room_again():
    control, tokenizer = ScriptedControl(), Watched()
    app = app_over(control, tokenizer=tokenizer, max_body=8 * MIB, max_bodies=60_000)
    async with client_of(app) as client:
        large = asyncio.create_task(client.completions.create(model="toy", prompt="wait" + LARGE))
        while not tokenizer.begun.is_set():  # noqa: ASYNC110 -- another thread sets it
            await asyncio.sleep(0.005)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="toy", prompt=LARGE)
        assert refused.value.code == "bodies_full"
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        await client.completions.create(**ASK)
        tokenizer.go.set()
        await large
        await client.completions.create(model="toy", prompt=LARGE)


async def test_a_key_has_so_many_requests_at_a_time_and_others_have_theirs(tmp_path):
    control = ScriptedControl(hang_at=1)
    app = app_over(control, keys=Keys(key_file(tmp_path)), max_requests_per_key=2)
    async with serving(app) as url:
        one = AsyncOpenAI(base_url=f"{url}/v1", api_key="alpha-1", max_retries=0)
        other = AsyncOpenAI(base_url=f"{url}/v1", api_key="beta-2", max_retries=0)
        async with one, other:
            streams = [await one.completions.create(**ASK, stream=True) for _ in range(2)]
            with pytest.raises(openai.RateLimitError) as refused:
                await one.completions.create(**ASK)
            assert refused.value.code == "key_requests"
            assert int(refused.value.response.headers["Retry-After"]) >= 1
            streams.append(await other.completions.create(**ASK, stream=True))
            assert len({submit.owner for submit in control.submits}) == 2
            assert not any("alpha" in submit.owner or "beta" in submit.owner for submit in control.submits)
            for stream in streams:
                await stream.close()
            await control.until_all_ended()
            control.hang_at = None
            for _ in range(3):
                await one.completions.create(**ASK)


async def test_a_key_that_has_used_its_tokens_waits_for_more(tmp_path):
    app = app_over(ScriptedControl(), keys=Keys(key_file(tmp_path)), max_tokens_per_minute_per_key=8)
    async with serving(app) as url:
        one = AsyncOpenAI(base_url=f"{url}/v1", api_key="alpha-1", max_retries=0)
        other = AsyncOpenAI(base_url=f"{url}/v1", api_key="beta-2", max_retries=0)
        async with one, other:
            await one.completions.create(**ASK)  # one token of the prompt, five of the answer
            await one.completions.create(**ASK)
            with pytest.raises(openai.RateLimitError) as refused:
                await one.completions.create(**ASK)
            assert refused.value.code == "key_tokens"
            assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 60
            await other.completions.create(**ASK)


async def test_tokenizing_is_bounded_and_off_the_loop_too():
    tokenizer = Watched()
    app = app_over(ScriptedControl(), tokenizer=tokenizer, max_body=8 * MIB)
    async with serving(app) as url, httpx.AsyncClient(timeout=180) as client:
        answer = await client.post(f"{url}/tokenize", json={"prompt": "0" * MIB})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        answer = await client.post(f"{url}/detokenize", json={"tokens": [48] * MIB})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await client.post(f"{url}/tokenize", json={"prompt": "ab"})).json()["tokens"] == [97, 98]
