"""From the deltas of a request's choices to the bytes of its answer, in the form of any API, and out to its client.

Proxies and clients give up on a connection that says nothing. So the headers of server-sent events go out a moment
after the request came, with the first piece of the answer or without it. Comments fill every silence from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from orchestrator.clock import Clock
from orchestrator.daemon.api.follow import RequestRecord
from orchestrator.daemon.api.question import AnswerWriter
from orchestrator.daemon.api.streaming import Choice, Piece, cost_of
from orchestrator.errors import RequestError
from orchestrator.protocol.rounds import Delta

_encode = msgspec.json.Encoder().encode
STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies are to pass on each event at once: nginx and others read the second."""
_T = TypeVar("_T")


class AnswerAssembler:
    """Makes the chunks of one answer. Where it is not a `stream` of events, all of it is the last chunk. `record` is
    told of every delta, and of the end. `opened`: something of the answer was written."""

    def __init__(
        self, writer: AnswerWriter, choices: Sequence[Choice], record: RequestRecord, clock: Clock, *, stream: bool
    ) -> None:
        self._writer = writer
        self._choices = choices
        self._record = record
        self._clock = clock
        self._stream = stream
        self._pieces: list[Piece] = []
        self.opened = False

    def is_over(self, index: int) -> bool:
        """Whether a choice has come to its end: no more of its deltas are wanted."""
        return bool(self._choices[index].answer.finish)

    def push(self, index: int, delta: Delta) -> bytes:
        """Return what a delta of this choice makes certain; b"" where that is nothing."""
        now_s = self._clock.monotonic_s()
        self._record.observe_delta(index, delta, now_s)
        pieces = self._choices[index].push_delta(delta, now_s)
        if self._stream:
            return b"".join(map(self._write, pieces))
        self._pieces += pieces
        return b""

    def finish(self) -> bytes:
        """Return what comes last, once all choices are over."""
        self._record.record_sent(*self._pieces)
        self._record.log_end(HTTPStatus.OK)
        cost = cost_of(self._choices)
        if self._stream:
            return self._open() + self._writer.ending(cost)
        self._writer.observe_source(cost.engine, cost.first_group)
        return _encode(self._writer.whole(self._pieces, cost))

    def fail(self, error: Exception) -> bytes:
        """Return what ends a stream whose status is out already: its client can only be told here."""
        known = error if isinstance(error, RequestError) else self._record.bug(error)
        self._record.log_end(known.status, reason=known.code)
        return self._writer.failure(known, opened=self.opened)

    def _write(self, piece: Piece) -> bytes:
        answer = self._choices[piece.index].answer
        self._record.record_sent(piece)
        self._writer.observe_source(answer.engine, answer.group)
        return self._open() + self._writer.piece(piece, answer)

    def _open(self) -> bytes:
        opening = b"" if self.opened else self._writer.opening(len(self._choices))
        self.opened = True
        return opening


class AnswerReader:
    """Reads the deltas of an answer's choices, one source each, into its assembler. Closing it closes the sources."""

    def __init__(self, sources: Sequence[AsyncIterator[Delta]], assembler: AnswerAssembler) -> None:
        self._sources = sources
        self._assembler = assembler
        self._first: asyncio.Task[bytes | None] | None = None
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []
        self._running = len(sources)  # of several
        self._ended = False

    async def read_all(self) -> bytes:
        """Return an answer that is not streamed. Raises what decoding it did."""
        async with aclosing(self):
            while await self._next() is not None:
                pass
            return self._assembler.finish()

    async def wait(self, seconds: float) -> bool:
        """Return whether the answer has begun within this time. Raises what decoding it did."""
        self._first = asyncio.create_task(self._read_first())
        await asyncio.wait({self._first}, timeout=seconds)
        if self._first.done():
            self._first.result()
        return self._first.done()

    async def read_chunk(self) -> bytes | None:
        """Return the next chunk, an error's too; None behind the last."""
        if self._ended:
            return None
        try:
            chunk: bytes | None = b""
            if self._first is not None:
                chunk, self._first = await self._first, None
            while chunk == b"":
                chunk = await self._next()
        except Exception as error:  # a refusal or a bug: the status is out, so only the stream can tell it
            self._ended = True
            await self.aclose()
            return self._assembler.fail(error)
        self._ended = chunk is None
        return self._assembler.finish() if chunk is None else chunk

    async def aclose(self) -> None:
        tasks = self._pumps if self._first is None else [self._first, *self._pumps]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in self._sources:
            await _close(source)

    async def _read_first(self) -> bytes | None:
        chunk: bytes | None = b""
        while chunk is not None and not self._assembler.opened:
            chunk = await self._next()
        return chunk

    async def _next(self) -> bytes | None:
        """Return what the next delta adds; None once all choices are over."""
        if len(self._sources) == 1:
            return await self._pull(0)
        if not self._pumps:
            self._pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self._sources))]
        while self._running:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._running -= 1
        return None

    async def _pump(self, index: int) -> None:
        try:
            while (chunk := await self._pull(index)) is not None:
                self._queue.put_nowait(chunk)
            self._queue.put_nowait(None)
        except Exception as error:  # whoever reads the queue raises it
            self._queue.put_nowait(error)

    async def _pull(self, index: int) -> bytes | None:
        """Return what a choice's next delta adds; None behind its last, and then its source is closed."""
        source = self._sources[index]
        delta = None if self._assembler.is_over(index) else await anext(source, None)
        if delta is None:
            await _close(source)
            return None
        return self._assembler.push(index, delta)


async def _close(source: AsyncIterator[Delta]) -> None:
    await source.aclose()  # type: ignore[attr-defined]  # what control and what is kept give are async generators


class ChunkReader(Protocol):
    """Gives chunks one by one, and None behind the last."""

    async def read_chunk(self) -> bytes | None: ...

    async def aclose(self) -> None: ...


class KeepAlive:
    """Says `ping` on a stream after `every_s` without a word (0: never). `late`: the headers went alone, so at once."""

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
    """Sends chunks as server-sent events, as they come. When the client goes away, their `reader` is closed at once.
    `closed` is called in the end, however it came."""

    def __init__(
        self, reader: ChunkReader, closed: Callable[[], object], headers: dict[str, str], keep_alive: KeepAlive
    ) -> None:
        super().__init__(headers=STREAM_HEADERS | headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self.reader = reader
        self.closed = closed
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self.reader):
                await unless_gone(receive, self._send(send))
        finally:
            self.closed()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with self._keep_alive.beside(send) as send_event:
            while (chunk := await self.reader.read_chunk()) is not None:
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
