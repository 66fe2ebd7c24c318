"""Keeps one target worker running and its streams alive: observe -> (one step of state) -> act.

A worker that is lost costs its streams a pause: the next worker gets every live stream with the tokens that
were delivered, and goes on with the very next one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from orchestrator.clock import Clock
from orchestrator.cluster.port import (
    DEADLINE,
    Cancel,
    Cluster,
    Command,
    Delta,
    DraftLink,
    Event,
    Failed,
    Gauges,
    Progress,
    Ready,
    Refused,
    Round,
    Submit,
    Worker,
    WorkerSpec,
)
from orchestrator.control.drafts import DraftWorkers
from orchestrator.control.port import StateView
from orchestrator.control.state import FAILED, STARTING, RestartBudget, TargetState, failed_drafters
from orchestrator.control.streams import Stream, Streams
from orchestrator.errors import RequestError, WorkerError

_STOP_GRACE_S = 5.0
_RETRY_AFTER_S = {"starting": 5, "draining": 10, "failed": 60}

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """`max_running` + `max_waiting` live streams; one more is answered 429. `max_restarts` in ten minutes.
    `request_timeout_s` bounds every request; 0 is no bound."""

    max_running: int
    max_waiting: int
    max_restarts: int
    request_timeout_s: float = 0.0


class TargetControl:
    """Implements control.port.Control over one worker of `cluster`, which it opens and closes.

    `drafts` are started beside it once it is ready; it never waits for them. `on_round` and `on_progress` are called
    with each event, in the event loop; what they raise is logged.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: WorkerSpec,
        limits: ControlLimits,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        drafts: Sequence[WorkerSpec] = (),
    ) -> None:
        self.on_round: list[Callable[[Round], None]] = []
        self.on_progress: list[Callable[[Progress], None]] = []
        self._cluster = cluster
        self._spec = spec
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._state = TargetState(spec.name, cluster.runtime)
        self._streams = Streams()
        self._budget = RestartBudget(limits.max_restarts)
        self._drafts = DraftWorkers(cluster, drafts, limits.max_restarts, clock, sleep, self._send)
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._draining = False
        self._closed = False
        self._started_s = clock.monotonic_s()

    async def start(self) -> None:
        """Begin to open the cluster and start the worker; returns at once (see `settled`)."""
        if self._task is None:
            self._task = asyncio.create_task(self._reconcile(), name=f"reconcile {self._spec.name}")

    async def settled(self) -> StateView:
        """Wait until the worker was ready once, or has failed for good, or control was closed."""
        await self._settled.wait()
        return self.view()

    def view(self) -> StateView:
        """See control.port.Control."""
        uptime_s = self._clock.monotonic_s() - self._started_s
        view = self._state.view(streams=len(self._streams), uptime_s=uptime_s, draining=self._draining)
        return replace(view, drafts=self._drafts.views())

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """See control.port.Control. A request is taken in (or refused) when its first token is asked for."""
        self._refuse_or_pass()
        deadline_s = self._deadline_s(submit)
        stream = self._streams.open(submit)
        try:
            self._feed()
            while True:
                item = await self._next(stream, deadline_s)
                if isinstance(item, RequestError):
                    raise item
                yield item
                if item.finish:
                    return
        finally:
            if self._streams.close(stream):
                self._send(Cancel(stream.key))
            self._feed()  # a trial may be over

    def _deadline_s(self, submit: Submit) -> float:
        """Return when the request's time is over, by the clock."""
        bounds = [bound for bound in (submit.timeout_s, self._limits.request_timeout_s) if bound > 0.0]
        return self._clock.monotonic_s() + min(bounds, default=math.inf)

    async def _next(self, stream: Stream, deadline_s: float) -> Delta | RequestError:
        """Return what comes next; at the deadline the end of what there is, or an error where there is nothing."""
        if deadline_s == math.inf:
            return await stream.items.get()
        try:
            async with asyncio.timeout(deadline_s - self._clock.monotonic_s()):
                return await stream.items.get()
        except TimeoutError:
            if stream.committed:
                return Delta(stream.key, [], DEADLINE, stream.last_stats)
            message = "the request's time was over before its first token came; give it longer, or try again later"
            return RequestError(message, status=504, kind="server_error", code="deadline_exceeded", param="timeout_s")

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let the live streams end for up to `timeout_s`, then end the rest with 503."""
        self._draining = True
        _log.info("draining: %d streams are being finished, for %g s at most", len(self._streams), timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._streams.all_read()
        if len(self._streams):
            _log.warning("drain timed out after %g s: %d streams are cut off", timeout_s, len(self._streams))
        self._end_streams("the server is shutting down; send the request again")

    async def close(self) -> None:
        """End every stream, the worker and the cluster. Idempotent."""
        self._draining = self._closed = True
        self._end_streams("the server is shutting down; send the request again")
        task, self._task = self._task, None
        if task is not None:
            while not task.done():  # a cancellation can be swallowed where something else ends at that instant
                task.cancel()
                await asyncio.wait([task], timeout=2 * _STOP_GRACE_S)
        await self._cluster.close()
        self._settled.set()

    def _refuse_or_pass(self) -> None:
        """Raise RequestError where a request cannot be taken in now."""
        phase = self.view().phase
        if phase in _RETRY_AFTER_S:
            detail = f": {self._state.detail}" if self._state.detail and phase != "draining" else ""
            raise RequestError(
                f"the model is {phase}{detail}" if phase != FAILED else f"the model has failed{detail}",
                status=503,
                kind="server_error",
                code=f"model_{phase}",
                retry_after_s=_RETRY_AFTER_S[phase],
            )
        if len(self._streams) >= self._limits.max_running + self._limits.max_waiting:
            raise RequestError(
                f"the queue is full: {len(self._streams)} requests run or wait",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
                retry_after_s=self._streams.retry_after_s(),
            )

    async def _reconcile(self) -> None:
        try:
            await self._cluster.open()
            while not self._closed:
                cause = await self._run_worker()
                self._recall_streams(cause)
                if not await self._back_off(cause):
                    return
        except WorkerError as error:  # the cluster cannot be opened
            self._fail(str(error))
        except Exception as error:
            _log.exception("control is broken")
            self._fail(f"control is broken: {type(error).__name__}: {error}")
        finally:
            await self._drafts.close()

    async def _run_worker(self) -> str:
        """Start a worker and follow it to its end; returns why it ended."""
        cause = "the worker ended without being told to"
        try:
            self._worker = await self._cluster.start(self._spec)
            self._state.worker_started(self._worker.where)
            _log.info("worker %s started: %s", self._spec.name, self._worker.where)
            async for event in self._worker.events():
                self._observe(event)
        except WorkerError as error:
            cause = str(error)
        finally:
            worker, self._worker = self._worker, None
            self._state.worker_lost(cause)
            if worker is not None:
                await worker.stop(_STOP_GRACE_S if self._closed else 0.0)
        failure = self._state.failure
        return cause if failure is None else f"{failure.message} ({cause})"

    def _recall_streams(self, cause: str) -> None:
        """Take the streams back from a lost worker; a request that kills workers is ended here."""
        ready = self._state.ready
        guilty = self._streams.worker_lost(ready.slots if ready is not None else 0)
        if guilty is not None:
            _log.error("request %s is ended: its worker died each time it ran; %s", guilty.key, cause)
            message = "the worker died each time it ran this request; it is not tried again"
            self._streams.fail(guilty.key, RequestError(message, status=500, kind="server_error", code="failed"))

    async def _back_off(self, cause: str) -> bool:
        """Wait before the next start. False: there is none, and the phase is failed."""
        failure = self._state.failure
        if self._closed:
            return False
        if failure is not None and not failure.restartable:
            self._fail(failure.message)
            return False
        delay_s = self._budget.spend(cause, self._clock.monotonic_s())
        if delay_s is None:
            self._fail(self._budget.spent(cause))
            return False
        restart = f"restart {len(self._budget.restarts_s)} of {self._budget.limit} in ten minutes"
        self._state.restarting(f"{cause}; {restart}")
        _log.warning(
            "worker %s lost: %s; %s follows in %.1f s, %d streams wait",
            *(self._spec.name, cause, restart, delay_s, len(self._streams)),
        )
        await self._sleep(delay_s)
        return True

    def _fail(self, cause: str) -> None:
        self._state.failed(cause)
        self._settled.set()
        _log.error("worker %s failed: %s", self._spec.name, cause)
        self._end_streams(f"the model has failed: {cause}")

    def _observe(self, event: Event) -> None:
        """Fold one event into the state and pass it on."""
        delivered = 0
        if isinstance(event, Round):
            now = self._clock.monotonic_s()
            delivered = sum(self._streams.deliver(delta, now) for delta in event.deltas)
        again = self._state.phase != STARTING
        gauges = self._state.gauges
        self._state.observe(event, delivered)
        match event:
            case Round():
                self._feed()
                _notify(self.on_round, event)
            case Gauges():
                for drafter in failed_drafters(gauges, event):
                    _log.warning("drafter %s failed and is not used any more: %s", drafter.name, drafter.reason)
            case Progress():
                _notify(self.on_progress, event)
            case Ready():
                self._settled.set()
                _log.info(
                    "worker %s ready%s: %s, %d streams go on",
                    *(self._spec.name, " again" if again else "", self._state.where, len(self._streams)),
                )
                self._feed()
                self._drafts.target_ready()
            case DraftLink():
                self._drafts.observe(event)
            case Refused():
                self._streams.fail(event.request_id, _refusal(event))
                self._feed()
            case Failed(message):
                _log.error("worker %s: %s", self._spec.name, message)

    def _feed(self) -> None:
        """Send the worker what is due."""
        if self._worker is not None and self._state.serving:
            for stream in self._streams.due():
                self._worker.send(stream.resumption())

    def _send(self, command: Command) -> None:
        if self._worker is not None:
            self._worker.send(command)

    def _end_streams(self, message: str) -> None:
        for key in self._streams.live():
            error = RequestError(message, status=503, kind="server_error", code="interrupted", retry_after_s=10)
            self._streams.fail(key, error)
            self._send(Cancel(key))


def _refusal(event: Refused) -> RequestError:
    if event.kind == "invalid":
        return RequestError(event.message, status=400)
    return _broken(event.message)


def _broken(message: str) -> RequestError:
    return RequestError(message, status=500, kind="server_error", code="failed")


def _notify(observers: list[Callable[[_T], None]], event: _T) -> None:
    for observer in observers:
        try:
            observer(event)
        except Exception:
            _log.exception("an observer failed")
