"""Everybody who looks: one snapshot a second is made for all of them, and none while nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.clock import Clock
from orchestrator.daemon.api.answer_stream import STREAM_HEADERS, unless_gone
from orchestrator.errors import RequestError
from orchestrator.json_lines import escape_line_ends
from orchestrator.telemetry import LoopGuard

# ADR 0069: one snapshot a second serves all viewers.
EVERY_S: Final = 1.0
# ADR 0069. Not tuned: each is a stream of some kilobytes a second.
MOST_VIEWERS: Final = 32
SLOW_READER_S: Final = 10.0
"""A viewer that has not taken a snapshot in after so long is dropped. ADR 0069."""

_encode = msgspec.json.Encoder().encode
_Parts = dict[str, bytes]


class Viewers:
    """The viewers of one state. `describe` returns its parts, and is called from the event loop."""

    def __init__(self, describe: Callable[[], Mapping[str, Any]], clock: Clock, *, most: int = MOST_VIEWERS) -> None:
        self.snapshots = 0
        self._describe = describe
        self._clock = clock
        self._most = most
        self._watching = 0
        self._parts: _Parts = {}
        self._changed: _Parts = {}
        self._told_s = 0.0
        self._next = asyncio.Event()
        self._making: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return self._watching

    @contextmanager
    def hold_place(self) -> Iterator[None]:
        """Count one more viewer. Raises RequestError 429 where there are too many."""
        if self._watching >= self._most:
            text = f"{self._most} people look at the dashboard already"
            raise RequestError(text, status=429, code="too_many_viewers", retry_after_s=5)
        self._watching += 1
        try:
            yield
        finally:
            self._watching -= 1

    async def close(self) -> None:
        self._closed = True
        self._next.set()
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)

    async def tell(self) -> AsyncGenerator[bytes, None]:
        """Yield the whole state, then the parts that changed; the whole again after a missed snapshot."""
        if self._making is None or self._making.done():
            self._take_snapshot()
            self._making = asyncio.create_task(self._make_snapshots(), name="dashboard")
        had = self.snapshots
        yield self._render("state", self._parts)
        while not self._closed:
            if had == self.snapshots:
                await self._next.wait()
                continue
            missed = self.snapshots - had > 1
            had = self.snapshots
            yield self._render("state", self._parts) if missed else self._render("change", self._changed)

    async def _make_snapshots(self) -> None:
        guard = LoopGuard("the dashboard's snapshot")
        while self._watching:
            await asyncio.sleep(EVERY_S)
            if self._watching:
                with guard.hold():
                    self._take_snapshot()

    def _take_snapshot(self) -> None:
        parts = {name: _encode(part) for name, part in self._describe().items()}
        gone = dict.fromkeys(self._parts.keys() - parts.keys(), b"null")
        self._changed = {name: part for name, part in parts.items() if self._parts.get(name) != part} | gone
        self._parts = parts
        self._told_s = self._clock.wall_s()
        self.snapshots += 1
        reached, self._next = self._next, asyncio.Event()
        reached.set()

    def _render(self, kind: str, parts: _Parts) -> bytes:
        joined = b",".join(_encode(name) + b":" + part for name, part in parts.items())
        head = f'"number":{self.snapshots},"at_s":{self._told_s:.3f},"viewers":{self._watching}'
        data = f"event: {kind}\ndata: {{{head},".encode() + b'"parts":{' + joined + b"}}\n\n"
        return escape_line_ends(data)


class ViewerStream(Response):
    """Sends a viewer's events until it leaves, or does not read for SLOW_READER_S. Nothing is kept for it."""

    def __init__(self, viewers: Viewers, headers: Mapping[str, str]) -> None:
        super().__init__(
            headers=STREAM_HEADERS | {"Cache-Control": "no-store", **headers}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._viewers = viewers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises RequestError 429 where there are too many viewers."""
        with self._viewers.hold_place():
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._viewers.tell()) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in events:
                try:
                    async with asyncio.timeout(SLOW_READER_S):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                except TimeoutError:
                    return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
