"""From the deltas of a request's choices to the bytes of its answer, in the form of any API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from http import HTTPStatus

import msgspec

from orchestrator.clock import Clock
from orchestrator.daemon.api.follow import RequestRecord
from orchestrator.daemon.api.question import AnswerWriter
from orchestrator.daemon.api.streaming import Choice, Piece, cost_of
from orchestrator.errors import RequestError
from orchestrator.protocol.rounds import Delta

_encode = msgspec.json.Encoder().encode


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
        self._writer.observe_engine(cost.engine)
        return _encode(self._writer.whole(self._pieces, cost))

    def fail(self, error: Exception) -> bytes:
        """Return what ends a stream whose status is out already: its client can only be told here."""
        known = error if isinstance(error, RequestError) else self._record.bug(error)
        self._record.log_end(known.status, reason=known.code)
        return self._writer.failure(known, opened=self.opened)

    def _write(self, piece: Piece) -> bytes:
        answer = self._choices[piece.index].answer
        self._record.record_sent(piece)
        self._writer.observe_engine(answer.engine)
        return self._open() + self._writer.piece(piece, answer)

    def _open(self) -> bytes:
        opening = b"" if self.opened else self._writer.opening(len(self._choices))
        self.opened = True
        return opening


class AnswerReader:
    """Reads the deltas of an answer's choices, one source each, into its assembler. Closing it closes the sources,
    which lets go of what was asked."""

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
        """Let nothing more be decoded."""
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
        """Read one of several sources, as fast as its deltas come."""
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
