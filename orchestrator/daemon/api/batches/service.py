"""Runs batches behind all other requests, and goes on with them where the last daemon ended."""

from __future__ import annotations

import asyncio
import math
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from orchestrator.clock import Clock
from orchestrator.daemon.api.batches.records import BatchRecord, CreateBatch, LineError
from orchestrator.daemon.api.batches.store import BatchStore, build_batch
from orchestrator.daemon.api.served import ServedModels
from orchestrator.daemon.batches.lines import BatchError, BatchInput, BatchLine, LinePlace, NoRoom, read_input
from orchestrator.daemon.batches.results import ResultFile, encode_line, open_results, read_results
from orchestrator.daemon.batches.run import Answer, BatchProgress, BatchRun, Outage
from orchestrator.durable import is_full
from orchestrator.errors import RequestError
from orchestrator.telemetry import get_logger, where_it_broke

WINDOW_S = 24 * 3600  # OpenAI's `24h`
# ADR 0054: whether a place stays free behind other requests. Not tuned.
_LOOK_EVERY_S = 0.05
# From where a line is decoded until its stream is seen. Not tuned.
_GAP_S = 0.005
# For room on the disk. ADR 0106. Not tuned.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
INPUT_PURPOSE = "batch"
_T = TypeVar("_T")

Ask = Callable[[BatchLine, str, str, Callable[[], None]], Awaitable[Answer]]

_log = get_logger(__name__)


class BatchService:
    """`ask` gets a line, the request's id, whose it is and what is called when it is decoded."""

    def __init__(self, store: BatchStore, places: ServedModels, ask: Ask, clock: Clock) -> None:
        self.store = store
        self.line_counts = {"completed": 0, "failed": 0}
        self._ask = ask
        self._clock = clock
        self._places = places
        self._running = asyncio.Semaphore(store.limits.concurrency)
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by model
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._started = False

    def start(self) -> None:
        """Go on with what the last daemon left. Idempotent."""
        if self._started:
            return
        self._started = True
        left = [batch for batch in self.store.batches.values() if batch.live]
        if left:
            _log.info("batches of the last daemon go on", batches=len(left))
        for batch in left:
            self._launch(batch)

    async def close(self) -> None:
        """Run nothing more; the next daemon goes on."""
        self._started = False
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def create(self, body: CreateBatch, owner: str) -> BatchRecord:
        """Take in a batch. Raises RequestError."""
        record = self.store.find_file(body.input_file_id, owner)
        if record.purpose != INPUT_PURPOSE:
            text = f"'{record.id}' has the purpose '{record.purpose}': a batch reads a file that was uploaded for it"
            raise RequestError(text, code="invalid_value", param="input_file_id")
        batch = build_batch(body, owner, int(self._clock.wall_s()), WINDOW_S)
        self.store.add_batch(batch)
        _log.info("batch created", batch=batch.id, endpoint=batch.endpoint)
        if self._started:
            self._launch(batch)
        return batch

    def cancel(self, batch_id: str, owner: str) -> BatchRecord:
        """Cancel a batch; what it has stays. Raises RequestError 404, and 409 where it has ended."""
        batch = self.store.find_batch(batch_id, owner)
        if not batch.live or batch.status == "finalizing":
            text = f"the batch has ended: it is {batch.status}"
            raise RequestError(text, status=409, code="batch_ended", param="batch_id")
        if batch.status != "cancelling":
            with suppress(OSError):  # its end is written when that is possible again
                self._move(batch, "cancelling")
            if (task := self._tasks.get(batch.id)) is not None:
                task.cancel()
        return batch

    def _launch(self, batch: BatchRecord) -> None:
        task = asyncio.create_task(self._run(batch), name=f"batch {batch.id}")
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, batch: BatchRecord) -> None:
        try:
            end = await self._keep_trying(batch, partial(self._work, batch))
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise  # the daemon stops
            end = "cancelled"
        except (BatchError, OSError) as error:
            batch.errors = [*batch.errors, LineError("batch_failed", str(error))]
            end = "failed"
        except Exception as error:
            _log.error("a batch failed", batch=batch.id, exception=where_it_broke(error, words=False))
            batch.errors = [*batch.errors, LineError("server_error", "the server failed; its log says why")]
            end = "failed"
        try:
            await self._keep_trying(batch, partial(self._finish, batch, end))
        except OSError as error:
            way_out = "the next start of the daemon tries again"
            _log.error("a batch cannot be ended", batch=batch.id, reason=error.strerror, way_out=way_out)

    async def _keep_trying(self, batch: BatchRecord, do: Callable[[], Awaitable[_T]]) -> _T:
        """Return what comes of this. Where the disk is full it waits, and does it again: what has a result stays, and
        what was answered without room for it is asked again."""
        pause_s = _FIRST_WAIT_S
        while True:
            try:
                return await do()
            except (NoRoom, OSError) as error:
                if isinstance(error, OSError) and not is_full(error):
                    raise
                _log.warning("a batch waits for room on the disk", batch=batch.id, reason=str(error))
            begun_s = self._clock.monotonic_s()
            while not self.store.has_room() or self._clock.monotonic_s() - begun_s < pause_s:  # noqa: ASYNC110
                await asyncio.sleep(_FIRST_WAIT_S)
            pause_s = min(2.0 * pause_s, _LONGEST_WAIT_S)

    async def _work(self, batch: BatchRecord) -> str:
        """Ask what has no answer; returns the status in which the batch ends."""
        if batch.status == "cancelling":
            return "cancelled"
        path = self.store.path_of(batch.input_file_id)
        try:
            source = await asyncio.to_thread(read_input, path, (batch.endpoint,))
        except BatchError as error:
            batch.errors = [LineError("invalid_input_file", str(error).removeprefix(f"{path}:"), "input_file_id")]
            return "failed"
        batch.total = len(source.places)
        if batch.status == "validating":
            self._move(batch, "in_progress")
        known = frozenset(place.result_id for place in source.places)
        opening = open_results(self.store.path_of(batch.id), known)
        results = await asyncio.to_thread(opening.__enter__)
        try:
            try:
                async with asyncio.timeout(max(0.0, batch.expires_at - self._clock.wall_s())):
                    await self._run_lines(batch, source, results)
            except TimeoutError:
                _write_expired(source, results)
                _count(batch, results)
                return "expired"
        finally:
            opening.__exit__(None, None, None)
        return "completed"

    async def _run_lines(self, batch: BatchRecord, source: BatchInput, results: ResultFile) -> None:
        counted = [len(results.done), results.failed]
        room = self.store.limits.max_storage - self.store.used_bytes

        def observe(progress: BatchProgress) -> None:
            _count(batch, results)
            if progress.done == counted[0]:
                return
            failed = progress.failed - counted[1]
            self.line_counts["failed"] += failed
            self.line_counts["completed"] += progress.done - counted[0] - failed
            counted[:] = progress.done, progress.failed
            if results.size > room:
                raise BatchError("the output takes more than there is room for (batches.max_storage); delete files")

        async def ask(line: BatchLine, request_id: str) -> Answer:
            return await self._ask_in_turn(line, request_id, batch.owner)

        _count(batch, results)
        width = self.store.limits.concurrency
        patience = Outage(math.inf)
        run = BatchRun(source, results, ask, concurrency=width, outage=patience, on_change=observe, keep_failures=True)
        await run.run()

    async def _ask_in_turn(self, line: BatchLine, request_id: str, owner: str) -> Answer:
        """Ask where no other request waits for the line's model, and a place beside one that stays free is there. The
        next line of that model looks for one when this one's stream can be seen, so that no two take the same. A line
        whose model is away keeps no line of another from its turn."""
        name = self._places.name_line(line)
        turn = self._turns[name]
        await turn.acquire()
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                turn.release()

        def begin() -> None:
            asyncio.get_running_loop().call_later(_GAP_S, give_back)

        try:
            await self._wait_for_place(name)
            try:
                return await self._ask(line, request_id, owner, begin)
            finally:
                self._running.release()
        finally:
            give_back()

    async def _wait_for_place(self, name: str) -> None:
        """Wait until a line of this model may be asked, and take one of the lines that there may be at a time."""
        while True:
            if self._places.has_place_for_batches(name):
                await self._running.acquire()
                if self._places.has_place_for_batches(name):
                    return
                self._running.release()
            await asyncio.sleep(_LOOK_EVERY_S)

    def _move(self, batch: BatchRecord, status: str) -> None:
        batch.status = status
        batch.times = {**batch.times, status: int(self._clock.wall_s())}
        self.store.save(batch)

    async def _finish(self, batch: BatchRecord, end: str) -> None:
        """Make the outputs of what was answered, then say that the batch has ended. The next daemon may do it again."""
        if end == "completed":
            self._move(batch, "finalizing")
        await asyncio.to_thread(self._publish, batch)
        self._move(batch, end)
        work = self.store.path_of(batch.id)
        work.unlink(missing_ok=True)
        work.with_suffix(".jsonl.lock").unlink(missing_ok=True)
        _log.info("batch ended", batch=batch.id, status=end, completed=batch.completed, failed=batch.failed)

    def _publish(self, batch: BatchRecord) -> None:
        work = self.store.path_of(batch.id)
        if not work.exists():
            return
        for failed, file_id, name in ((False, batch.output_id, "output"), (True, batch.error_id, "error")):
            fresh = self.store.path_of(f"{file_id}.part").with_suffix(".new")
            if not _copy_results(work, fresh, failed=failed):
                fresh.unlink()
                continue
            self.store.add_file(file_id, batch.owner, f"{batch.id}_{name}.jsonl", "batch_output", fresh)
            if failed:
                batch.error_file_id = file_id
            else:
                batch.output_file_id = file_id


def _copy_results(work: Any, fresh: Any, *, failed: bool) -> int:
    """Copy the results that have an error, or that have none, to the disk; returns how many there are."""
    count = 0
    with fresh.open("wb") as file:
        for result, bad in read_results(work):
            if bad is failed:
                file.write(encode_line(result))
                count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


def _count(batch: BatchRecord, results: ResultFile) -> None:
    batch.failed = results.failed
    batch.completed = len(results.done) - results.failed


def _write_expired(source: BatchInput, results: ResultFile) -> None:
    """Give every line without a result an error line, as OpenAI does."""
    error = {"code": "batch_expired", "message": "the batch's completion window was over before this request"}
    for place, custom_id in _name_undone(source, results):
        results.append({"id": place.result_id, "custom_id": custom_id, "response": None, "error": error})


def _name_undone(source: BatchInput, results: ResultFile) -> Iterator[tuple[LinePlace, str | None]]:
    undone = [place for place in source.places if place.result_id not in results.done]
    for place in undone:
        if place.bad is not None:
            yield place, place.bad.custom_id
    for place, line in source.read_lines([place for place in undone if place.bad is None]):
        yield place, line.custom_id
