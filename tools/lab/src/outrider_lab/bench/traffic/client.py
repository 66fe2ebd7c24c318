"""One streamed request: raw server-sent events in, an Outcome out.

An event may hold several tokens, or none: tokens are never counted from events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec
from httpx_sse import EventSource, SSEError

from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.traffic.outcome import INTERRUPTED, Outcome

EndpointKind = Literal["chat", "completions"]
DONE = "[DONE]"
# Servers drop idle connections (uvicorn after 5 s); one that we drop first is never found dead when it is needed.
KEEP_IDLE_S = 2.0
CONNECT_TIMEOUT_S = 10.0


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    system_fingerprints: list[Any] | None = None


class _Event(msgspec.Struct):
    """What is read of an event, of either kind. Everything may be missing, null or empty."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    metrics: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What is measured. `url` is the API's base (".../v1"), `body` are fields merged into every request."""

    url: str
    model: str
    kind: EndpointKind
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What it is called in tables and plots."""
        body = f" {msgspec.json.encode(self.body).decode()}" if self.body else ""
        return f"{self.model} at {self.url}{body}"

    @property
    def path(self) -> str:
        """The route's whole URL."""
        return f"{self.url}/{'chat/completions' if self.kind == 'chat' else 'completions'}"

    def payload(self, prompt: str, fields: Mapping[str, Any]) -> bytes:
        """Return the body of a request for a streamed answer with its usage."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.kind == "chat" else {"prompt": prompt}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode({"model": self.model, **asked, **stream, **fields, **self.body})


def open_client() -> httpx.AsyncClient:
    """Return a client that never makes a request wait for another one."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_IDLE_S)
    return httpx.AsyncClient(limits=limits, timeout=None)  # noqa: S113  # each request has one time-out as a whole


def fetch_model_names(url: str, headers: Mapping[str, str]) -> list[str] | None:
    """Return the names at `url`/models, None where there is no such list. Raises BenchError when nobody answers."""
    try:
        response = httpx.get(f"{url}/models", headers=dict(headers), timeout=CONNECT_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(f"no server answers at {url} ({error}); start one, or name its base with --url") from error
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise BenchError(f"{url} refuses this key ({response.status_code}); give --api-key or set OPENAI_API_KEY")
    try:
        return [str(model["id"]) for model in response.raise_for_status().json()["data"]]
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        return None


async def send_request(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    payload: bytes,
    outcome: Outcome,
    timeout_s: float,
    clock: Callable[[], float],
) -> None:
    """Send one request and fill its outcome. Only a cancellation is raised, and it is noted too."""
    outcome.sent_s = clock()
    headers = {"Content-Type": "application/json", **endpoint.headers}
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", endpoint.path, content=payload, headers=headers) as response,
        ):
            await _read(response, outcome, clock)
    except TimeoutError:
        outcome.fail("timeout", f"no end within {timeout_s:g} s")
    except (httpx.ConnectError, httpx.InvalidURL) as error:
        outcome.fail("connection", str(error))
    except httpx.TransportError as error:
        outcome.fail("broken_stream" if outcome.last_s else "connection", repr(error))
    except asyncio.CancelledError:
        outcome.fail(INTERRUPTED, "stopped by the user")
        raise
    finally:
        outcome.end_s = clock()
        outcome.last_s = outcome.last_s or outcome.end_s


async def _read(response: httpx.Response, outcome: Outcome, clock: Callable[[], float]) -> None:
    if response.status_code != httpx.codes.OK:
        outcome.fail(f"status_{response.status_code}", _message(await response.aread()))
        return
    pieces: list[str] = []
    try:
        # Read on after the end mark: a connection whose answer is not finished cannot be used again.
        async for sse in EventSource(response).aiter_sse():
            if sse.data == DONE:
                outcome.done = True
            elif sse.data and not outcome.done:
                _note(_decode(sse.data), outcome, pieces, clock())
        if not outcome.done:
            outcome.fail("missing_done", f"the stream ended without {DONE}")
    except SSEError:
        outcome.fail("not_a_stream", f"content type {response.headers.get('content-type')!r}, no event stream")
    except msgspec.DecodeError as error:
        outcome.fail("broken_stream", f"an event is not what OpenAI's API has: {error}")
    finally:
        outcome.text = "".join(pieces)


def _note(event: _Event, outcome: Outcome, pieces: list[str], now_s: float) -> None:
    if event.error:
        outcome.fail("error_event", _format_error(event.error))
    if event.usage is not None:
        outcome.prompt_tokens = event.usage.prompt_tokens
        outcome.generated = event.usage.completion_tokens
        outcome.changes = len(event.usage.system_fingerprints or ())
    if isinstance(event.metrics, dict):
        _note_speculation(event.metrics.get("speculative_decoding"), outcome)
    for choice in event.choices or ():
        outcome.last_s = now_s
        outcome.finish = choice.finish_reason or outcome.finish
        text = choice.text or _read_text(choice.delta)
        if text:
            pieces.append(text)
            outcome.chunks_s.append(now_s)


def _message(body: bytes) -> str:
    """Return what an error's body says, where it is OpenAI's shape; else the body."""
    try:
        return _format_error(_decode(body).error or body.decode(errors="replace"))
    except msgspec.DecodeError:
        return body.decode(errors="replace")


def _format_error(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _read_text(delta: _Text | None) -> str:
    return "" if delta is None else delta.content or delta.reasoning_content or delta.reasoning or ""


def _note_speculation(figures: Any, outcome: Outcome) -> None:
    """Take vLLM's names, where all three are there."""
    if isinstance(figures, dict):
        names = ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps")
        drafted, accepted, steps = (figures.get(name) for name in names)
        if isinstance(drafted, int) and isinstance(accepted, int) and isinstance(steps, int):
            outcome.drafted, outcome.accepted, outcome.steps = drafted, accepted, steps
