"""Server-sent events on the wire: they end when the client goes away, and are never silent for long.

Proxies and clients give up on a connection that says nothing. So the headers go out a moment after the request came,
with the first piece of the answer or without it, and comments fill every silence from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from orchestrator.daemon.api.streaming import Piece

COMMENT: Final = b": keep-alive\n\n"
"""An event that readers of server-sent events leave out, as the standard says."""
STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies are to pass on each event at once: nginx and others read the second."""

_T = TypeVar("_T")


class FirstPiece:
    """The first of an answer's pieces, and what makes all of them. Closing it ends both."""

    def __init__(self, pieces: AsyncGenerator[Piece, None]) -> None:
        self._pieces = pieces
        self._task = asyncio.ensure_future(anext(pieces, Piece(0, "")))

    async def wait(self, seconds: float) -> bool:
        """Return whether it came within this time. Raises what making it did."""
        await asyncio.wait({self._task}, timeout=seconds)
        if self._task.done():
            self._task.result()
        return self._task.done()

    async def get(self) -> Piece:
        """Return it, however long that takes. Raises what making it did."""
        return await self._task

    async def aclose(self) -> None:
        """Let nothing more be made."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # seen; raised here it would lose the place where it was raised first
        await self._pieces.aclose()


class KeepAlive:
    """Says `ping` on a stream whenever nothing else was said for `every_s` (0: never). `late`: the headers went without
    an event, so that it is said at once."""

    def __init__(self, ping: bytes, every_s: float, *, late: bool = False) -> None:
        self._message = {"type": "http.response.body", "body": ping, "more_body": True}
        self._every_s = every_s
        self._late = late
        self._turn = asyncio.Lock()
        self._sent_s = 0.0

    @asynccontextmanager
    async def beside(self, send: Send) -> AsyncIterator[Send]:
        """Give what sends events from now on. What is said beside waits for a client that reads slowly as events do:
        never more than one of both is on its way."""
        if not self._every_s:
            yield send
            return
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time() - (self._every_s if self._late else 0.0)

        async def send_event(message: Message) -> None:
            async with self._turn:
                await send(message)
                self._sent_s = loop.time()

        beside = asyncio.create_task(self._fill_silences(send))
        try:
            yield send_event
        finally:
            beside.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await beside

    async def _fill_silences(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = self._sent_s + self._every_s
            if loop.time() < due_s:
                await asyncio.sleep(due_s - loop.time())
                continue
            async with self._turn:
                if loop.time() >= self._sent_s + self._every_s:
                    await send(self._message)
                    self._sent_s = loop.time()


class EventStream(Response):
    """Sends events as they come. When the client goes away, `events` and the `source` they are made of are
    closed at once. `closed` is called in the end, however it came."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: FirstPiece,
        closed: Callable[[], object],
        headers: dict[str, str],
        keep_alive: KeepAlive,
    ) -> None:
        super().__init__(headers=STREAM_HEADERS | headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._closed = closed
        self._keep_alive = keep_alive

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
            async with self._keep_alive.beside(send) as send_event:
                async for chunk in events:
                    await send_event({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Return the work's result; None when the client went away first, and then the work was cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_await_disconnect(receive))
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


async def _await_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
