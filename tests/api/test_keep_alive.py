"""Streams are never silent for long: not before the first token, not between tokens, and no more often than that."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.types import Message

from orchestrator.clock import SystemClock
from orchestrator.config.model import JournalSection
from orchestrator.daemon.api.answer_stream import KeepAlive
from orchestrator.daemon.api.question import COMMENT
from orchestrator.daemon.journal.book import AnswerBook
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta
from policies.serving.overrides import EffectiveBound, Scope
from tests.api.support import ScriptedControl, app_over, client_of, serving

SOON: dict[str, Any] = {"headers_after_s": 0.05, "keep_alive_s": 0.05}
LATE_S = 600.0
PINGS_IN_A_PAUSE = 3
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "toy", "prompt": "x", "max_tokens": 5},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "toy", "input": "x"},
    "/v1/messages": CHAT,
}
PINGS = dict.fromkeys(ROUTES, COMMENT.decode().strip()) | {
    "/v1/messages": 'event: ping\ndata: {"type":"ping"}',
}
routes = pytest.mark.parametrize("path", ROUTES)


@dataclass
class SlowControl(ScriptedControl):
    """Waits before the steps that `pauses` names: so many seconds, or until its client has `heard` enough pings."""

    pauses: dict[int, float | None] = field(default_factory=lambda: {0: None})
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, submit: Submit) -> AsyncIterator[Delta]:
        number = 0
        async for delta in super().generate(submit):
            pause_s = self.pauses.get(number, 0.0)
            await (self.heard.wait() if pause_s is None else asyncio.sleep(pause_s))
            number += 1
            yield delta


def blocks(text: str) -> list[str]:
    """The blocks of a stream between empty lines."""
    assert text.endswith("\n\n")
    return text.removesuffix("\n\n").split("\n\n")


async def stream(path: str, control: ScriptedControl, **settings: Any) -> httpx.Response:
    async with serving(app_over(control, **SOON | settings)) as url, httpx.AsyncClient(base_url=url) as client:
        return await read_over_pings(client, path, ROUTES[path] | {"stream": True}, control)


async def read_over_pings(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], control: ScriptedControl, pings: int = PINGS_IN_A_PAUSE
) -> httpx.Response:
    """Return a whole answer. A slow control is told once so many pings have come."""
    text = ""
    async with client.stream("POST", path, json=body) as response:
        async for part in response.aiter_text():
            text += part
            if isinstance(control, SlowControl) and text.count(PINGS[path]) >= pings:
                control.heard.set()
    return httpx.Response(response.status_code, headers=response.headers, text=text)


@routes
@pytest.mark.parametrize("before", [0, 1], ids=["the-first-token", "a-later-token"])
async def test_silences_are_filled_and_the_events_are_the_same(path: str, before: int):
    quick = blocks((await stream(path, SlowControl(pauses={}))).text)
    began_s = time.monotonic()
    headers_after_s = LATE_S if before else SOON["headers_after_s"]  # they wait for the first token, or do not
    answer = await stream(path, SlowControl(pauses={before: None}), headers_after_s=headers_after_s)
    took_s = time.monotonic() - began_s
    slow = blocks(answer.text)
    pings = [place for place, block in enumerate(slow) if block == PINGS[path]]
    assert PINGS_IN_A_PAUSE <= len(pings) <= took_s / SOON["keep_alive_s"] + 2
    assert (pings[0] == 0) == (before == 0)
    assert kinds(slow) == kinds(quick)
    assert texts(slow) == texts(quick) != ""


@routes
async def test_headers_go_before_the_first_token(path: str):
    bound = EffectiveBound(6, fixed=True, by=Scope.REQUEST, cut=True)
    control = SlowControl(hang_at=0, speculation=bound)
    async with serving(app_over(control, **SOON)) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", path, json=ROUTES[path] | {"stream": True}, timeout=5) as answer:
            assert answer.status_code == 200
            assert answer.headers["X-Accel-Buffering"] == "no"
            assert answer.headers["Cache-Control"] == "no-cache"
            assert answer.headers["X-Outrider-Acceptance"]
            assert answer.headers["X-Outrider-Speculation"] == "num_speculative_tokens=6; by=request; cut"
            assert (await anext(answer.aiter_text())).startswith(PINGS[path])
        await control.until_all_ended()  # it went away in a silence: its place is free


@routes
@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_refusal_that_comes_soon_has_its_own_status(path: str, status: int):
    refused = RequestError("not now", status=status, code="because", retry_after_s=7)
    answer = await stream(path, SlowControl(error=refused, pauses={}), headers_after_s=LATE_S)
    assert answer.status_code == status
    assert answer.headers["Retry-After"] == "7"


@routes
@pytest.mark.parametrize("error", [RequestError("too late", status=504, code="timeout"), ValueError("a bug")])
async def test_a_refusal_behind_the_headers_is_an_event(path: str, error: Exception):
    @dataclass
    class Failing(SlowControl):
        async def generate(self, submit: Submit) -> AsyncIterator[Delta]:
            async for delta in super().generate(submit):
                if delta.tokens:
                    raise error
                yield delta

    answer = await stream(path, Failing())
    assert answer.status_code == 200
    found = blocks(answer.text)
    assert found[0] == PINGS[path]
    said = "too late" if isinstance(error, RequestError) else "the server failed"
    assert said in answer.text
    first = kinds(found)[0]
    assert first == {"/v1/responses": "response.created", "/v1/messages": "message_start"}.get(path, "error")


@routes
async def test_the_real_clients_read_over_pings(path: str):
    control = SlowControl(finish="stop", pauses={0: 0.2, 1: 0.2})
    async with client_of(app_over(control, **SOON)) as client:
        base = str(client.base_url)
        if path == "/v1/completions":
            found = [chunk async for chunk in await client.completions.create(**ROUTES[path], stream=True)]
            assert "".join(chunk.choices[0].text for chunk in found) == "hello"
        elif path == "/v1/chat/completions":
            chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
        elif path == "/v1/responses":
            async with client.responses.stream(model="toy", input="x") as events:
                async for _ in events:
                    pass
                assert (await events.get_final_response()).output_text == "hello"
        else:
            root = base.removesuffix("/v1/")
            other = anthropic.AsyncAnthropic(base_url=root, api_key="x", max_retries=0)
            async with other, other.messages.stream(**CHAT) as events:
                assert "".join([text async for text in events.text_stream]) == "hello"
                assert (await events.get_final_message()).usage.output_tokens == 5


async def test_a_late_failure_raises_in_the_real_client():
    control = SlowControl(error=RequestError("gone", status=503, code="interrupted"), error_at=1, pauses={0: 0.2})
    async with client_of(app_over(control, **SOON)) as client:
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in await client.chat.completions.create(**CHAT, stream=True):
                pass


async def test_nothing_is_said_where_the_operator_wants_none():
    answer = await stream("/v1/completions", SlowControl(pauses={0: 0.4}), keep_alive_s=0.0)
    assert answer.status_code == 200
    assert COMMENT.decode() not in answer.text


async def test_a_stream_that_is_never_silent_has_no_pings():
    answer = await stream(
        "/v1/completions", ScriptedControl(steps=[[97]] * 50), headers_after_s=LATE_S, keep_alive_s=LATE_S
    )
    assert COMMENT.decode() not in answer.text


async def test_a_stream_goes_on_behind_an_event_over_pings():
    book = AnswerBook(JournalSection(detached_s=60.0), SystemClock())
    headers = {"Accept": "text/event-stream", "Idempotency-Key": "k"}
    body = ROUTES["/v1/completions"] | {"stream": True}
    control = SlowControl(pauses={0: 0.0, 1: None})
    async with (
        serving(app_over(control, book=book, **SOON)) as url,
        httpx.AsyncClient(base_url=url, headers=headers) as client,
    ):
        whole = blocks((await read_over_pings(client, "/v1/completions", body, control, 1)).text)
        ping = PINGS["/v1/completions"]
        events = [block for block in whole if block != ping]
        assert len(events) < len(whole)
        assert all(block.startswith(("id: ", "data: [DONE]")) for block in events)
        name = events[0].split("\n")[0].removeprefix("id: ")
        rest = await client.post("/v1/completions", json=body, headers={"Last-Event-ID": name})
        assert [block for block in blocks(rest.text) if block != ping] == events[1:]


async def test_a_slow_reader_gets_no_pile_of_pings():
    sending, sent = 0, []
    taken = asyncio.Event()

    async def send(message: Message) -> None:
        nonlocal sending
        sending += 1
        assert sending == 1, "two writes at once"
        await taken.wait()
        sent.append(message["body"])
        sending -= 1

    async with KeepAlive(b"ping", 0.01).beside(send) as send_event:
        await asyncio.sleep(0.1)  # the first ping hangs
        message = {"type": "http.response.body", "body": b"event", "more_body": True}
        event = asyncio.ensure_future(send_event(message))
        await asyncio.sleep(0.1)
        assert sent == []
        taken.set()
        await event
        assert sent[:2] == [b"ping", b"event"]
        began_s = time.monotonic()
        await asyncio.sleep(0.1)
    count = len(sent)
    assert 2 < count <= 2 + (time.monotonic() - began_s) / 0.01 + 1
    await asyncio.sleep(0.05)
    assert len(sent) == count, "it ends with the stream"


def kinds(found: list[str]) -> list[str]:
    """What the events are, pings left out."""
    names = []
    for block in found:
        if block.startswith("event: "):
            names.append(block.split("\n")[0].removeprefix("event: "))
        elif block.startswith("data: {"):
            names.append("error" if "error" in json.loads(block[6:]) else "data")
        elif not block.startswith(":"):
            names.append(block)
    return [name for name in names if name != "ping"]


def texts(found: list[str]) -> str:
    """All deltas of text."""
    text = ""
    for block in found:
        data = block.rpartition("data: ")[2]
        if not data.startswith("{"):
            continue
        event = json.loads(data)
        if choices := event.get("choices"):
            text += choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
        elif isinstance(delta := event.get("delta"), str):
            text += delta
        elif isinstance(delta, dict):
            text += delta.get("text", "")
    return text
