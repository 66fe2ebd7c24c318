"""Requests for a model that is loaded for them: they wait before they can be read, and their clients are told so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, cast

from starlette.responses import Response

from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.answer_stream import EventStream, KeepAlive
from orchestrator.daemon.api.errors import CLIENT_CLOSED
from orchestrator.daemon.api.question import AnswerHead, AnswerSource, AnswerWriter, Question
from orchestrator.errors import RequestError
from orchestrator.telemetry import get_logger

_log = get_logger(__name__)


class LoadWait:
    """A request that may have to wait for its model. `begin_answer` is called where it does, and is to be streamed."""

    def __init__(self) -> None:
        self.question: Question | None = None
        self._answer_begun = asyncio.Event()

    def begin_answer(self, question: Question) -> None:
        self.question = question
        self._answer_begun.set()

    async def answer(
        self, work: Coroutine[Any, Any, Response], headers_after_s: float, keep_alive_s: float
    ) -> Response:
        """Return what the work does, or what streams it where headers may not wait. Raises what the work does."""
        task = asyncio.create_task(work, name="answer behind a load")
        stream_begun = asyncio.create_task(self._answer_begun.wait(), name="wait for a load")
        try:
            await asyncio.wait({task, stream_begun}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=headers_after_s)
        except BaseException:
            task.cancel()
            raise
        finally:
            stream_begun.cancel()
        if task.done() or self.question is None:
            return await task
        writer = _build_writer(self.question)
        reader = _LateReader(task, writer)
        keep_alive = KeepAlive(writer.ping(), keep_alive_s, late=True)
        return EventStream(reader, lambda: None, {}, keep_alive)


def _build_writer(question: Question) -> AnswerWriter:
    """Return what writes, in its API's form, that a request came to nothing: no token, so no tokenizer."""
    nothing = cast(Tokenizer, None)
    model, request_id = question.body.model or "", question.id_prefix.rstrip("-_")
    head = AnswerHead(request_id, 0, model, [[]], lambda _engine, _group: AnswerSource(None), "coupled", nothing)
    return question.build_writer(head)


class _LateReader:
    """Reads the stream that an answer turns out to be. What goes wrong before is an event: the status is out."""

    def __init__(self, task: asyncio.Task[Response], writer: AnswerWriter) -> None:
        self._task = task
        self._writer = writer
        self._stream: EventStream | None = None
        self._ended = False

    async def read_chunk(self) -> bytes | None:
        if self._ended:
            return None
        if self._stream is None:
            try:
                response = await asyncio.shield(self._task)
            except RequestError as error:
                self._ended = True
                _log.warning("request ended with an error behind its headers", status=error.status, code=error.code)
                return self._writer.failure(error, opened=False)
            if not isinstance(response, EventStream):
                self._ended = True
                return None
            self._stream = response
        return await self._stream.reader.read_chunk()

    async def aclose(self) -> None:
        if not self._task.done():
            self._task.cancel()
            with suppress(asyncio.CancelledError, RequestError):
                await self._task
        elif not self._task.cancelled() and self._task.exception() is None:
            response = self._task.result()
            if isinstance(response, EventStream):
                await response.reader.aclose()
                response.closed()


def refuse_gone() -> RequestError:
    """Return what a request is answered whose client has left while it waited."""
    return RequestError("the client has gone", status=CLIENT_CLOSED, code="client_closed")
