"""The requests of `python -m outrider_lab.soak`: good, cancelled, malformed and slow ones, and what
became of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from orchestrator.errors import OutriderError
from orchestrator.worker.measuring.prompts import read_texts
from outrider_lab.bench.traffic.client import Endpoint, EndpointKind, open_client, send_request
from outrider_lab.bench.traffic.outcome import Outcome

REQUEST_TIMEOUT_S = 300.0
FILL_TIMEOUT_S = 1200.0
SHARES = {"stream": 0.4, "whole": 0.2, "cancelled": 0.22, "malformed": 0.13, "slow": 0.05}
RECEIVE_BUFFER_BYTES = 2048
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Mix:
    """How requests are sent. A slow reader rests `rest_s` after each piece; who cancels does so within
    `cancel_within_s`."""

    concurrency: int
    rest_s: float
    cancel_within_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Case:
    """A request that can be answered; `body` is without its streaming fields."""

    kind: EndpointKind
    body: dict[str, Any]

    def payload(self, *, stream: bool, **more: Any) -> bytes:
        """Return the request's body."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return json.dumps({**self.body, **streamed, **more}).encode()


@dataclass(slots=True)
class Seen:
    """What became of the requests: how many of each kind ended how, and what is against a bar."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    server_errors: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def note_status(self, kind: str, status: int, expected: int, text: str) -> None:
        """Count a response whose status is known."""
        self.ends[kind, f"status {status}"] += 1
        if status >= httpx.codes.INTERNAL_SERVER_ERROR:
            self.server_errors.append(f"{kind}: {status} {text[:200]}")
        elif status != expected:
            self.unexpected.append(f"{kind}: {status} instead of {expected}: {text[:200]}")

    def note_text(self, kind: str, case: Case, found: tuple[str, int], reference: tuple[str, int]) -> None:
        """Compare an answer's text and number of tokens with those of the reference."""
        self.compared += 1
        if found != reference:
            self.wrong.append(f"{kind} {json.dumps(case.body)[:120]}: {found} instead of {reference}")


Malformed = tuple[str, str, bytes, int]


class SlowBytes(httpx.AsyncByteStream):
    """A response whose reader rests after each piece."""

    def __init__(self, inner: httpx.AsyncByteStream, rest_s: float) -> None:
        self._inner = inner
        self._rest_s = rest_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            yield piece
            await asyncio.sleep(self._rest_s)

    async def aclose(self) -> None:
        await self._inner.aclose()


class SlowTransport(httpx.AsyncHTTPTransport):
    """Connections with a small receive buffer, read slowly: the server feels it soon."""

    def __init__(self, rest_s: float) -> None:
        super().__init__(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)])
        self._rest_s = rest_s

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101  # an async transport has no other
        return httpx.Response(
            response.status_code, headers=response.headers, stream=SlowBytes(response.stream, self._rest_s)
        )


class Soak:
    """The requests of one soak against one daemon; `url` is its base."""

    def __init__(self, url: str, model: str, cases: Sequence[Case], bad: Sequence[Malformed], mix: Mix) -> None:
        self.url = url
        self.seen = Seen()
        self._model = model
        self._cases = cases
        self._bad = bad
        self._mix = mix
        self._random = random.Random(mix.seed)  # noqa: S311  # which request comes when is no secret
        self._references: dict[int, tuple[str, int]] = {}

    async def take_references(self) -> None:
        """Ask each case alone, without speculation."""
        async with open_client() as client:
            for index, case in enumerate(
                track(
                    self._cases, "reference outputs", console=console, transient=True, disable=not console.is_terminal
                )
            ):
                payload = case.payload(stream=False, speculative_config={"method": "off"})
                response = await client.post(self._endpoint(case).path, content=payload, timeout=REQUEST_TIMEOUT_S)
                self._references[index] = _answer(response.raise_for_status().json())

    async def fill_cache(self, tokens: int, sequences: int, context_tokens: int, vocabulary_size: int) -> None:
        """Hold about `tokens` positions at once: a KV cache takes its memory where it is first written.

        Raises OutriderError where the daemon refuses that.
        """
        length = min(tokens // sequences, context_tokens - 1)
        drawn = random.Random(self._mix.seed)  # noqa: S311  # any tokens will do
        fields = {"model": self._model, "max_tokens": 1, "ignore_eos": True}
        async with open_client() as client:

            async def hold() -> httpx.Response:
                prompt = [drawn.randrange(vocabulary_size) for _ in range(length)]
                content = json.dumps({**fields, "prompt": prompt}).encode()
                return await client.post(f"{self.url}/v1/completions", content=content, timeout=FILL_TIMEOUT_S)

            for response in await asyncio.gather(*(hold() for _ in range(sequences))):
                if response.status_code != httpx.codes.OK:
                    raise OutriderError(f"filling the KV cache: {response.status_code} {response.text[:200]}")

    async def fire(self, count: int) -> None:
        """Send `count` requests of mixed kinds, `concurrency` at a time."""
        kinds = [kind for kind, share in SHARES.items() for _ in range(round(share * count))]
        kinds += ["stream"] * (count - len(kinds))
        self._random.shuffle(kinds)
        del kinds[count:]
        waiting = iter(track(kinds, "requests", console=console, transient=True, disable=not console.is_terminal))
        transport = SlowTransport(self._mix.rest_s)
        async with open_client() as fast, httpx.AsyncClient(transport=transport, timeout=REQUEST_TIMEOUT_S) as slow:
            senders: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
                "stream": lambda: self._stream("stream", fast, REQUEST_TIMEOUT_S),
                "whole": lambda: self._whole(fast),
                "cancelled": lambda: self._stream("cancelled", fast, self._cancel_after_s()),
                "malformed": lambda: self._send_malformed(fast),
                "slow": lambda: self._stream("slow", slow, REQUEST_TIMEOUT_S),
            }

            async def one_after_another() -> None:
                for kind in waiting:
                    try:
                        await senders[kind]()
                    except (httpx.TransportError, OSError) as error:
                        self.seen.ends[kind, "broken connection"] += 1
                        self.seen.unexpected.append(f"{kind}: {error!r}")

            async with asyncio.TaskGroup() as group:
                for _ in range(self._mix.concurrency):
                    group.create_task(one_after_another())

    def _endpoint(self, case: Case) -> Endpoint:
        return Endpoint(f"{self.url}/v1", "", case.kind)

    def _cancel_after_s(self) -> float:
        return self._random.uniform(0.001, self._mix.cancel_within_s)

    async def _stream(self, kind: str, client: httpx.AsyncClient, timeout_s: float) -> None:
        index = self._random.randrange(len(self._cases))
        case, outcome = self._cases[index], Outcome(str(index), kind)
        await send_request(
            client, self._endpoint(case), case.payload(stream=True), outcome, timeout_s, time.perf_counter
        )
        if not outcome.error:
            self.seen.ends[kind, "completed"] += 1
            self.seen.note_text(kind, case, (outcome.text, outcome.generated or 0), self._references[index])
        elif kind == "cancelled" and outcome.error == "timeout":
            self.seen.ends[kind, "cancelled mid-stream" if outcome.chunks_s else "cancelled before a token"] += 1
        elif outcome.error.startswith("status_"):
            status = int(outcome.error.removeprefix("status_"))
            self.seen.note_status(kind, status, httpx.codes.OK, outcome.message)
        else:
            self.seen.ends[kind, outcome.error] += 1
            self.seen.unexpected.append(f"{kind}: {outcome.error}: {outcome.message}")

    async def _whole(self, client: httpx.AsyncClient) -> None:
        index = self._random.randrange(len(self._cases))
        case = self._cases[index]
        payload = case.payload(stream=False)
        response = await client.post(self._endpoint(case).path, content=payload, timeout=REQUEST_TIMEOUT_S)
        self.seen.note_status("whole", response.status_code, httpx.codes.OK, response.text)
        if response.status_code == httpx.codes.OK:
            self.seen.note_text("whole", case, _answer(response.json()), self._references[index])

    async def _send_malformed(self, client: httpx.AsyncClient) -> None:
        method, path, content, expected = self._random.choice(self._bad)
        if expected == 0:
            await self._half_a_body(path, content)
            self.seen.ends["malformed", "gone before the body's end"] += 1
            return
        response = await client.request(method, f"{self.url}{path}", content=content, timeout=REQUEST_TIMEOUT_S)
        self.seen.note_status("malformed", response.status_code, expected, response.text)
        if "error" not in response.json():
            self.seen.unexpected.append(f"malformed: {response.status_code} without an error object")

    async def _half_a_body(self, path: str, content: bytes) -> None:
        parts = httpx.URL(self.url)
        _, writer = await asyncio.open_connection(parts.host, parts.port)
        head = f"POST {path} HTTP/1.1\r\nHost: {parts.host}\r\nContent-Length: {2 * len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


def _answer(body: dict[str, Any]) -> tuple[str, int]:
    choice = body["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, body["usage"]["completion_tokens"]


def make_cases(model: str, prompts: Path, max_tokens: int) -> list[Case]:
    """Return chats and completions, greedy and seeded; the completions share the first prompt as their prefix."""
    texts = [prompt.text for prompt in read_texts(prompts)]
    samplings: tuple[dict[str, float], ...] = ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 7})
    found: list[Case] = []
    for number, (text, sampling) in enumerate(itertools.product(texts, samplings)):
        fields = {"model": model, "max_tokens": 1 + (number * 7) % max_tokens, **sampling}
        found.append(Case("chat", {**fields, "messages": [{"role": "user", "content": text}]}))
        found.append(Case("completions", {**fields, "prompt": f"{texts[0]}\n\n{text}"}))
    return found


def list_malformed_requests(model: str, most_body_bytes: int) -> list[Malformed]:
    """Return (method, path, body, expected status); 0: half of the body is sent, and nobody waits for an answer."""
    good = {"model": model, "messages": [{"role": "user", "content": "hello"}]}

    def chat(**fields: Any) -> bytes:
        return json.dumps({**good, **fields}).encode()

    chats, completions = "/v1/chat/completions", "/v1/completions"
    return [
        ("POST", chats, b"", 400),
        ("POST", chats, b'{"model": ', 400),
        ("POST", chats, b"\xff\xfe\x00", 400),
        ("POST", chats, b"[" * 20_000, 400),
        ("POST", chats, chat(temperature="hot"), 400),
        ("POST", chats, chat(messages=[]), 400),
        ("POST", chats, chat(max_tokens=-1), 400),
        ("POST", chats, chat(no_such_field=1), 400),
        ("POST", chats, chat(model="no-such-model"), 404),
        ("POST", completions, json.dumps({"model": model, "prompt": "word " * 100_000}).encode(), 400),
        ("POST", completions, json.dumps({"model": model, "prompt": [-1]}).encode(), 400),
        ("POST", completions, b" " * (most_body_bytes + 1), 413),
        ("GET", chats, b"", 405),
        ("POST", "/v1/no/such/route", b"{}", 404),
        ("POST", chats, chat(), 0),
    ]
