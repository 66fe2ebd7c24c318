"""Runs a batch: asks every line that has no result, a number of them at a time, and writes each result once.

A request that cannot be answered now is asked again: `Asking` says when. Each has the same key each time, so that an
answer whose computation has begun is resumed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from orchestrator.daemon.batches.lines import BadLine, BatchError, BatchInput, BatchLine, LinePlace
from orchestrator.daemon.batches.results import ResultFile

BUSY = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""The server lives, and cannot answer this now."""
ATTEMPTS = 4
"""How often a request is asked that the server fails at, as each time may cost a worker. ADR 0054."""
# Between attempts, doubled each time (ADR 0054). Not tuned.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for a request. `retry_after_s`: when to come back; None where nothing was said of that."""

    status: int
    body: Any
    request_id: str = ""
    retry_after_s: float | None = None


class Unreachable(Exception):
    """No answer came: the server, or the connection to it, was lost."""


class Asking(Protocol):
    """Sends one request. Raises Unreachable, and BatchError where no request of the batch can be answered."""

    async def __call__(self, line: BatchLine, request_id: str) -> Answer: ...


@dataclass(slots=True)
class BatchProgress:
    """Lines of the input: all, those with a result, those of them with an error, and those that could not be finished.
    `earlier`: results of earlier runs."""

    total: int
    done: int = 0
    failed: int = 0
    unfinished: int = 0
    earlier: int = 0
    retries: int = 0
    last_problem: str = ""


class Outage:
    """How long no server has answered, over all requests together."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: float | None = None

    def observe_answer(self) -> None:
        """Something answered."""
        self._since_s = None

    def observe_loss(self, why: str) -> None:
        """Nothing answered. Raises BatchError where that has been so for too long."""
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s > self._patience_s:
            raise BatchError(f"the server has not answered for {self._patience_s:g} s: {why}")


class BatchRun:
    """One run over an input. `on_change` sees the progress.
    `keep_failures`: a request that the server fails at again and again becomes an error line; else it is left for
    another run."""

    def __init__(
        self,
        source: BatchInput,
        results: ResultFile,
        ask: Asking,
        *,
        concurrency: int,
        outage: Outage,
        on_change: Callable[[BatchProgress], None] = lambda _: None,
        keep_failures: bool = False,
    ) -> None:
        self._source = source
        self._results = results
        self._ask = ask
        self._concurrency = concurrency
        self._outage = outage
        self._on_change = on_change
        self._keep_failures = keep_failures
        earlier = len(results.done)
        self.progress = BatchProgress(len(source.places), earlier, results.failed, earlier=earlier)

    async def run(self) -> BatchProgress:
        """Ask what has no result. Raises BatchError where the run cannot go on; what was written stays."""
        due = [place for place in self._source.places if place.result_id not in self._results.done]
        for place in due:
            if place.bad is not None:
                self._write(describe_bad_line(place, place.bad))
        lines = self._source.read_lines([place for place in due if place.bad is None])
        syncing = asyncio.create_task(self._results.keep_synced(), name="sync results")
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._concurrency, len(due))):
                    group.create_task(self._work(lines))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            syncing.cancel()
            await asyncio.wait([syncing])
            self._results.sync()
        return self.progress

    async def _work(self, lines: Iterator[tuple[LinePlace, BatchLine]]) -> None:
        for place, line in lines:  # several share it
            answer = await self._ask_until_answered(line, place.result_id)
            if answer is None:
                self.progress.unfinished += 1
                self._on_change(self.progress)
            else:
                self._write(describe_answer(place, line, answer))

    async def _ask_until_answered(self, line: BatchLine, request_id: str) -> Answer | None:
        """Return the answer; None where the server fails at this request."""
        pause_s, failures = _FIRST_PAUSE_S, 0
        while True:
            wait_s = None
            try:
                answer = await self._ask(line, request_id)
            except Unreachable as lost:
                self._note_problem(f"line {line.number}: {lost}")
                self._outage.observe_loss(str(lost))
            else:
                self._outage.observe_answer()
                if not _is_worth_asking_again(answer):
                    return answer
                self._note_problem(f"line {line.number}: {answer.status}: {message_of(answer.body)}")
                wait_s = answer.retry_after_s
                if answer.status not in BUSY:
                    failures += 1
                    if failures >= ATTEMPTS:
                        return answer if self._keep_failures else None
            # Those that were refused together come back one by one.
            await asyncio.sleep((pause_s if wait_s is None else wait_s) + random.uniform(0.0, pause_s))  # noqa: S311
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
            self.progress.retries += 1

    def _note_problem(self, text: str) -> None:
        self.progress.last_problem = text
        self._on_change(self.progress)

    def _write(self, result: Mapping[str, Any]) -> None:
        self._results.append(result)
        self.progress.done += 1
        self.progress.failed = self._results.failed
        self._on_change(self.progress)


def _is_worth_asking_again(answer: Answer) -> bool:
    return answer.status in BUSY or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR


def message_of(body: Any) -> str:
    """Return what an error's body says."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(body)[:200]


def describe_answer(place: LinePlace, line: BatchLine, answer: Answer) -> dict[str, Any]:
    """Return the result of a request that was answered, or refused."""
    error = None
    if answer.status >= HTTPStatus.BAD_REQUEST:
        details = answer.body.get("error") if isinstance(answer.body, dict) else None
        code = details.get("code") if isinstance(details, dict) else None
        error = {"code": code or f"http_{answer.status}", "message": message_of(answer.body)}
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    return {"id": place.result_id, "custom_id": line.custom_id, "response": response, "error": error}


def describe_bad_line(place: LinePlace, bad: BadLine) -> dict[str, Any]:
    """Return the result of a line that is no request."""
    error = {"code": bad.code, "message": bad.message, "param": bad.param, "line": place.number}
    return {"id": place.result_id, "custom_id": bad.custom_id, "response": None, "error": error}
