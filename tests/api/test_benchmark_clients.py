"""Streams as the field's load generators read them. Each reader follows the published logic of its namesake."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.api.support import EOS, ScriptedControl, app_over, serving

COMPLETION: dict[str, Any] = {"model": "toy", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}
ROUTES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
TEXT = "a \u20ac, a \U0001f600 and\n\ndata: [DONE] in the middle"


@dataclass
class Read:
    """What a client makes of a stream."""

    text: str = ""
    chunks: int = 0
    done: bool = False
    usage: dict[str, int] | None = None
    running: list[int] = field(default_factory=list)
    metrics: dict[str, Any] | None = None

    def take(self, data: dict[str, Any]) -> None:
        """One event as vLLM's and AIPerf's clients look at it: choices before usage."""
        assert isinstance(data["choices"], list)  # null would break strict clients
        if data["choices"]:
            choice = data["choices"][0]
            self.text += (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
            self.chunks += 1
            if data.get("usage"):
                self.running.append(data["usage"]["completion_tokens"])
        elif data.get("usage"):
            self.usage, self.metrics = data["usage"], data.get("metrics")


async def vllm_bench(source: AsyncIterator[bytes]) -> Read:
    """vllm/benchmarks/lib/endpoint_request_func.py: every network chunk is stripped of white space before it is put
    behind the last; messages end with an empty line, or where the rest is JSON already."""
    read, buffer, utf8 = Read(), "", codecs.getincrementaldecoder("utf-8")()
    async for raw in source:
        buffer += utf8.decode(raw.strip())
        messages = []
        while "\n\n" in buffer:
            message, buffer = buffer.split("\n\n", 1)
            messages.append(message.strip())
        rest = buffer.removeprefix("data: ").strip()
        try:
            complete = buffer.startswith("data: ") and (rest == "[DONE]" or json.loads(rest) is not None)
        except ValueError:
            complete = False
        if complete:
            messages.append(buffer.strip())
            buffer = ""
        for message in filter(None, messages):
            if message.removeprefix("data: ") == "[DONE]":
                read.done = True
            else:
                read.take(json.loads(message.removeprefix("data: ")))
    return read


async def guidellm(source: AsyncIterator[bytes]) -> Read:
    """guidellm/backends/openai: lines; everything behind "data:", until [DONE]; usage from any chunk that has it."""
    read, buffer = Read(), b""
    async for raw in source:
        buffer += raw
        while b"\n" in buffer and not read.done:
            line, buffer = buffer.split(b"\n", 1)
            text = line.decode().strip()
            if not text.startswith("data:"):
                continue
            if text.removeprefix("data:").strip() == "[DONE]":
                read.done = True
                continue
            data = json.loads(text.removeprefix("data:"))
            assert "error" not in data
            usage = data.get("usage", {})
            read.take(data)
            read.usage = usage or read.usage
            read.metrics = data["metrics"] if isinstance(data.get("metrics"), dict) else read.metrics
    return read


async def aiperf(source: AsyncIterator[bytes]) -> Read:
    """aiperf/transports/sse_utils.py: messages between empty lines, one field a line."""
    read, buffer = Read(), b""
    async for raw in source:
        buffer += raw
        while b"\n\n" in buffer:
            message, buffer = buffer.split(b"\n\n", 1)
            (line,) = message.decode().splitlines()  # a second line would be a field of its own
            name, value = line.split(":", 1)
            assert name == "data"
            if value.strip() == "[DONE]":
                read.done = True
            else:
                read.take(json.loads(value))
    return read


READERS = [vllm_bench, guidellm, aiperf]


async def stream(control: ScriptedControl, path: str, reader: Any, body: dict[str, Any], size: int | None) -> Read:
    """Post, and read what comes in network chunks (`size` None) or in chunks of so many bytes."""
    async with (
        serving(app_over(control)) as url,
        httpx.AsyncClient() as client,
        client.stream("POST", f"{url}{path}", json=ROUTES[path] | {"stream": True} | body, timeout=10) as response,
    ):
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        return await reader(response.aiter_raw(size))


def tokens_of(text: str, each: int) -> list[list[int]]:
    raw = list(text.encode())
    return [raw[start : start + each] for start in range(0, len(raw), each)]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("each", [1, 7])
async def test_the_text_and_the_usage_come_through(path, reader, each):
    control = ScriptedControl(steps=tokens_of(TEXT, each))
    read = await stream(control, path, reader, {"stream_options": {"include_usage": True}}, None)
    assert read.text == TEXT
    assert read.done
    assert read.usage is not None
    assert read.usage["completion_tokens"] == len(TEXT.encode())
    assert read.usage["prompt_tokens"] == len(control.submits[0].prompt)
    assert read.metrics is not None
    assert read.metrics["speculative_decoding"]["num_draft_tokens"] == 6


@pytest.mark.parametrize("reader", [guidellm, aiperf])
@pytest.mark.parametrize("path", ROUTES)
async def test_events_may_be_cut_anywhere(path, reader):
    control = ScriptedControl(steps=tokens_of(TEXT, 3))
    read = await stream(control, path, reader, {"stream_options": {"include_usage": True}}, 5)
    assert (read.text, read.done) == (TEXT, True)


async def test_what_was_remembered_of_the_prompt_is_told():
    control = ScriptedControl(reused=7)
    read = await stream(control, "/v1/completions", aiperf, {"stream_options": {"include_usage": True}}, None)
    assert read.usage is not None
    details: Any = read.usage["prompt_tokens_details"]
    assert details == {"cached_tokens": 7}


@pytest.mark.parametrize("path", ROUTES)
async def test_usage_is_only_told_when_asked_for(path):
    read = await stream(ScriptedControl(), path, aiperf, {}, None)
    assert (read.usage, read.running, read.done) == (None, [], True)


@pytest.mark.parametrize("path", ROUTES)
async def test_with_continuous_usage_every_chunk_tells_the_tokens_so_far(path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    control = ScriptedControl(steps=[list(b"abc"), list(b"de"), list(b"f")])
    read = await stream(control, path, guidellm, {"stream_options": options}, None)
    assert read.running == sorted(read.running)
    assert len(read.running) == read.chunks
    assert {3, 5, 6} <= set(read.running)
    assert read.running[-1] == 6
    assert read.usage is not None
    assert read.usage["completion_tokens"] == 6


@pytest.mark.parametrize("path", ROUTES)
async def test_what_load_generators_send_reaches_the_worker(path):
    control = ScriptedControl()
    limit = "max_tokens" if path == "/v1/completions" else "max_completion_tokens"
    vllm = {"repetition_penalty": 1.0, "logprobs": None, limit: 9, "ignore_eos": True}
    guide = {"stop": None, "ignore_eos": True, limit: 9}
    perf = {limit: 9, "min_tokens": 9}
    for body in (vllm, guide, perf):
        assert (await stream(control, path, vllm_bench, body, None)).done
    assert [submit.max_tokens for submit in control.submits] == [9, 9, 9]
    assert [EOS in submit.stop_tokens for submit in control.submits] == [False, False, True]
    assert control.submits[2].min_tokens == 9


@pytest.mark.parametrize("path", ROUTES)
async def test_the_first_chunk_is_not_sent_before_the_first_token(path):
    control = ScriptedControl(hang_at=0)
    async with serving(app_over(control)) as url, httpx.AsyncClient() as client:
        request = client.build_request("POST", f"{url}{path}", json=ROUTES[path] | {"stream": True})
        answering = asyncio.create_task(client.send(request, stream=True))
        await control.until_hung(1)
        await asyncio.wait({answering}, timeout=0.2)
        assert not answering.done(), "the time to it would be called the time to the first token"
        answering.cancel()
        await asyncio.wait({answering})
        await control.until_all_ended()
