"""Server-sent events on the wire: they end when the client goes away, and are never silent for long.

Proxies and clients give up on a connection that says nothing. So the headers go out a moment after the request came,
with the first piece of the answer or without it, and comments fill every silence from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

COMMENT: Final = b": keep-alive\n\n"
"""An event that readers of server-sent events leave out, as the standard says."""
STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies are to pass on each event at once: nginx and others read the second."""

_T = TypeVar("_T")


class ChunkReader(Protocol):
    """Gives chunks one by one, and None behind the last."""

    async def read_chunk(self) -> bytes | None: ...

    async def aclose(self) -> None: ...


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
    """Sends chunks as they come. When the client goes away, their `reader` is closed at once. `closed` is called in the
    end, however it came."""

    def __init__(
        self, reader: ChunkReader, closed: Callable[[], object], headers: dict[str, str], keep_alive: KeepAlive
    ) -> None:
        super().__init__(headers=STREAM_HEADERS | headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._reader = reader
        self._closed = closed
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._reader):
                await unless_gone(receive, self._send(send))
        finally:
            self._closed()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with self._keep_alive.beside(send) as send_event:
            while (chunk := await self._reader.read_chunk()) is not None:
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
