"""Answers that outlive their connection: told again from any event, to whoever asked, and decoded once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import pytest

from orchestrator.clock import SystemClock
from orchestrator.config.model import JournalSection
from orchestrator.daemon.journal.book import AnswerBook
from orchestrator.errors import RequestError
from tests.api.support import EOS, READY, ScriptedControl, app_over, serving
from tests.support.ready import change_ready

COMPLETION: dict[str, Any] = {"model": "toy", "prompt": "x", "max_tokens": 20}
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 40}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SSE = {"Accept": "text/event-stream"}


class Event(NamedTuple):
    name: str
    data: Any


def book_of(detached_s: float = 600.0) -> AnswerBook:
    return AnswerBook(JournalSection(detached_s=detached_s), SystemClock())


@asynccontextmanager
async def client_over(control: ScriptedControl, book: AnswerBook, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(app_over(control, book=book, **settings)) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


async def events_of(lines: AsyncIterator[str], most: int | None = None) -> list[Event]:
    found: list[Event] = []
    name = ""
    async for line in lines:
        if line.startswith("id: "):
            name = line.removeprefix("id: ")
        elif line.startswith("data: "):
            text = line.removeprefix("data: ")
            found.append(Event(name, text if text == "[DONE]" else json.loads(text)))
            name = ""
            if most is not None and len(found) == most:
                break
    return found


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str], most: int | None = None
) -> list[Event]:
    """All events, or so many: then the connection is closed."""
    async with client.stream("POST", path, json=body | {"stream": True}, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        return await events_of(response.aiter_lines(), most)


def of_choice(events: list[Event], index: int) -> list[Any]:
    return [
        event.data
        for event in events
        if event.data != "[DONE]" and event.data["choices"] and event.data["choices"][0]["index"] == index
    ]


ANSWERS: dict[str, tuple[str, dict[str, Any], list[list[int]], str]] = {
    "text": ("/v1/completions", COMPLETION, [list(b"hel"), [0xE2, 0x82], [0xAC], list(b"lo"), [EOS]], "stop"),
    "two choices": ("/v1/chat/completions", CHAT | {"n": 2}, [list(b"hel"), list(b"lo")], "length"),
    "echo": ("/v1/completions", COMPLETION | {"echo": True}, [list(b"hel"), list(b"lo")], "length"),
    "a stop string": ("/v1/completions", COMPLETION | {"stop": ["l~"]}, [list(b"hel"), list(b"l~never")], "length"),
    "calls": (
        "/v1/chat/completions",
        CHAT | {"tools": TOOLS},
        [list(b"so "), list(b'<tool_call>{"name": "look", '), list(b'"arguments": {"a": 1}}</tool_call>'), [EOS]],
        "stop",
    ),
    "a deadline": ("/v1/completions", COMPLETION, [list(b"hel"), []], "deadline"),
}


@pytest.mark.parametrize("which", ANSWERS)
async def test_behind_each_event_an_answer_goes_on_with_the_next(which):
    path, body, steps, finish = ANSWERS[which]
    body = body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    control = ScriptedControl(steps=steps, finish=finish, ready=change_ready(READY, context_tokens=2000))
    async with client_over(control, book_of()) as client:
        whole = await stream(client, path, body, SSE)
        names = [event.name for event in whole[:-1]]
        assert whole[-1] == Event("", "[DONE]")
        assert all(names)
        assert len(set(names)) == len(names)
        deltas = [data["choices"][0].get("delta", {}) for _, data in whole[:-1] if data["choices"]]
        assert any("tool_calls" in delta for delta in deltas) == (which == "calls")
        decoded = len(control.submits)
        for count, name in enumerate(names, 1):
            rest = await stream(client, path, body, SSE | {"Last-Event-ID": name})
            assert rest[-1].data == "[DONE]"
            for index in range(body.get("n", 1)):
                assert of_choice(whole[:count], index) + of_choice(rest, index) == of_choice(whole, index)
            if body.get("n", 1) == 1:
                assert [event.name for event in rest] == [*names[count:], ""]
        assert len(control.submits) == decoded


async def test_only_who_can_take_them_gets_names():
    async with client_over(ScriptedControl(), book_of()) as client:
        for headers, named in (({}, False), (SSE, True), ({"Idempotency-Key": "k"}, True)):
            events = await stream(client, "/v1/completions", COMPLETION, headers)
            assert {bool(event.name) for event in events[:-1]} == {named}


async def test_a_key_asks_for_one_answer_however_often_it_is_sent():
    control = ScriptedControl()
    async with client_over(control, book_of()) as client:
        key = {"Idempotency-Key": "k"}
        first, second = await asyncio.gather(
            *(client.post("/v1/completions", json=COMPLETION, headers=key) for _ in range(2))
        )
        third = await client.post("/v1/completions", json=dict(reversed(COMPLETION.items())), headers=key)
        told = [{**one.json(), "metrics": None} for one in (first, second, third)]
        assert told[0]["choices"][0]["text"] == "hello"
        assert told[0] == told[1] == told[2]
        assert len(control.submits) == 1
        other = await client.post("/v1/completions", json=COMPLETION, headers={"Idempotency-Key": "l"})
        assert other.json()["id"] != told[0]["id"]


async def test_a_key_is_its_owners_and_its_bodys():
    control = ScriptedControl()
    async with client_over(control, book_of()) as client:
        key = {"Idempotency-Key": "k", "Authorization": "Bearer one"}
        first = (await client.post("/v1/completions", json=COMPLETION, headers=key)).json()["id"]
        refused = await client.post("/v1/completions", json=COMPLETION | {"max_tokens": 9}, headers=key)
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
        theirs = key | {"Authorization": "Bearer two"}
        assert (await client.post("/v1/completions", json=COMPLETION, headers=theirs)).json()["id"] != first
        event = {"Last-Event-ID": f"{first}:1.1", "Authorization": "Bearer two"}
        assert (await client.post("/v1/completions", json=COMPLETION, headers=event)).status_code == 404


@pytest.mark.parametrize(
    ("event", "status"),
    [("cmpl-0:3.1", 404), ("nonsense", 400), ("cmpl-0:x", 400), ("cmpl-0:1.1,,", 400), ("a:9999999999.1", 400)],
)
async def test_an_event_that_is_not_known_is_refused(event, status):
    async with client_over(ScriptedControl(), book_of()) as client:
        answer = await client.post("/v1/completions", json=COMPLETION, headers={"Last-Event-ID": event})
        assert answer.status_code == status
        assert answer.json()["error"]["param"] == "Last-Event-ID"


@pytest.mark.parametrize("key", ["a b", "x" * 256])
async def test_a_key_that_is_none_is_refused(key):
    async with client_over(ScriptedControl(), book_of()) as client:
        answer = await client.post("/v1/completions", json=COMPLETION, headers={"Idempotency-Key": key})
        assert answer.status_code == 400


async def test_a_stream_with_a_key_goes_on_while_its_client_is_away():
    control = ScriptedControl(steps=[list(b"a"), list(b"b"), list(b"c")], hang_at=2)
    async with client_over(control, book_of()) as client:
        key = SSE | {"Idempotency-Key": "k"}
        begun = await stream(client, "/v1/completions", COMPLETION, key, most=2)
        await asyncio.sleep(0.1)
        assert control.ended == []
        again = asyncio.create_task(
            stream(client, "/v1/completions", COMPLETION, key | {"Last-Event-ID": begun[0].name}, most=1)
        )
        assert (await again)[0] == begun[1]
        assert len(control.submits) == 1


async def test_a_stream_with_a_key_does_not_wait_for_ever():
    control = ScriptedControl(hang_at=1)
    book = book_of(detached_s=0.2)
    async with client_over(control, book) as client:
        key = SSE | {"Idempotency-Key": "k"}
        begun = await stream(client, "/v1/completions", COMPLETION, key, most=1)
        await control.until_all_ended()
        control.hang_at = None
        # Its tokens are there yet: another stream goes on behind them.
        control.steps = [list(b"lo")]
        rest = await stream(client, "/v1/completions", COMPLETION, key | {"Last-Event-ID": begun[0].name})
        assert rest[0].data["choices"][0]["text"] == "lo"
        assert control.submits[1].committed == list(b"hel")
        assert control.submits[1].sampling == control.submits[0].sampling
        assert control.submits[1].request_id != control.submits[0].request_id


async def test_a_stream_without_a_key_is_cancelled_at_once_and_can_be_resumed():
    control = ScriptedControl(hang_at=1)
    async with client_over(control, book_of()) as client:
        begun = await stream(client, "/v1/completions", COMPLETION, SSE, most=1)
        await control.until_all_ended()
        control.hang_at, control.steps = None, [list(b"lo")]
        rest = await stream(client, "/v1/completions", COMPLETION, SSE | {"Last-Event-ID": begun[0].name})
        assert "".join(event.data["choices"][0]["text"] for event in rest[:-1]) == "lo"


async def test_a_refused_request_leaves_its_key_free():
    busy = RequestError("the queue is full", status=429, code="queue_full", retry_after_s=1)
    control = ScriptedControl(error=busy)
    async with client_over(control, book_of()) as client:
        key = {"Idempotency-Key": "k"}
        assert (await client.post("/v1/completions", json=COMPLETION, headers=key)).status_code == 429
        control.error = None
        assert (await client.post("/v1/completions", json=COMPLETION, headers=key)).status_code == 200


async def test_a_stream_that_failed_half_way_goes_on_when_it_is_asked_for_again():
    lost = RequestError("the server is shutting down", status=503, code="interrupted")
    control = ScriptedControl(error=lost, error_at=1)
    async with client_over(control, book_of()) as client:
        key = SSE | {"Idempotency-Key": "k"}
        begun = await stream(client, "/v1/completions", COMPLETION, key)
        assert begun[-2].data["error"]["code"] == "interrupted"
        control.error, control.steps = None, [list(b"lo")]
        rest = await stream(client, "/v1/completions", COMPLETION, key | {"Last-Event-ID": begun[0].name})
        assert rest[0].data["choices"][0]["text"] == "lo"
        assert control.submits[1].committed == list(b"hel")
