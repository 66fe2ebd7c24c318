"""Answers on the wire: whole bodies, and server-sent events that end when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Literal, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.api.streaming import Answer

Kind = Literal["chat", "completion"]
DONE = b"data: [DONE]\n\n"
_OBJECTS = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
}
_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode


class Envelope:
    """What every chunk of one answer repeats: id, time and model; builds bodies and events of either kind."""

    def __init__(
        self, kind: Kind, request_id: str, created_s: int, model: str, prompt_tokens: int, fingerprint: str | None
    ) -> None:
        self._kind = kind
        self._head = {"id": request_id, "created": created_s, "model": model, "system_fingerprint": fingerprint}
        self._prompt_tokens = prompt_tokens

    def whole(self, text: str, answer: Answer) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self._kind == "chat"
            else {"text": text}
        )
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": answer.finish}
        return {**self._with_object(stream=False), "choices": [choice], **self._cost(answer)}

    def opening(self) -> bytes:
        """Return the first event: a chat's role; a completion has none."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self._kind == "chat" else b""

    def piece(self, text: str) -> bytes:
        """Return the event of some text."""
        return self._chunk({"content": text}, None)

    def ending(self, finish: str) -> bytes:
        """Return the event that says why it ended."""
        return self._chunk({}, finish)

    def usage(self, answer: Answer) -> bytes:
        """Return the usage event: no choices, what the answer cost."""
        return event({**self._with_object(stream=True), "choices": [], **self._cost(answer)})

    def _with_object(self, *, stream: bool) -> dict[str, Any]:
        return {**self._head, "object": _OBJECTS[self._kind, stream]}

    def _chunk(self, delta: dict[str, Any], finish: str | None) -> bytes:
        content = {"delta": delta} if self._kind == "chat" else {"text": delta.get("content", "")}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return event({**self._with_object(stream=True), "choices": [choice]})

    def _cost(self, answer: Answer) -> dict[str, Any]:
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": answer.tokens,
            "total_tokens": self._prompt_tokens + answer.tokens,
        }
        return {"usage": usage, "metrics": _metrics(answer)}


def _metrics(answer: Answer) -> dict[str, Any]:
    """Return vLLM's per-request figures; the formulas are in docs/metrics.md."""
    stats = answer.stats
    found: dict[str, Any] = {
        "time_to_first_token_ms": (answer.first_s - answer.started_s) * 1000.0,
        "generation_time_ms": (answer.last_s - answer.first_s) * 1000.0,
    }
    if stats is not None:
        found["queue_time_ms"] = stats.queue_ms
        found["speculative_decoding"] = {
            "mean_acceptance_length": 1.0 + stats.accepted / max(1, stats.steps),
            "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else None,
            "num_spec_steps": stats.steps,
            "num_draft_tokens": stats.drafted,
            "num_accepted_draft_tokens": stats.accepted,
        }
    return found


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def json_response(body: dict[str, Any]) -> Response:
    """Return a JSON body."""
    return Response(_encode(body), media_type="application/json")


class EventStream(Response):
    """Sends events as they come. When the client goes away, `events` and the `source` they are made of are
    closed at once. `closed` is called in the end, however it came."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AsyncGenerator[str, None],
        closed: Callable[[], object],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        # Closing a generator that never began runs none of its cleanup: a client that goes away before the
        # headers are out would otherwise leave the source, which holds a slot, to the garbage collector.
        try:
            async with aclosing(self._source):
                await unless_gone(receive, self._send(send))
        finally:
            self._closed()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Return the work's result; None when the client went away first, and then the work was cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        return None
    finally:
        for pending in (task, gone):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError):
                    await pending


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
