"""Keeps one worker process running: started, followed to its end, started again after a while, and given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from orchestrator.clock import Clock
from orchestrator.control.state import RestartBudget
from orchestrator.errors import WorkerError
from orchestrator.workers.contract import Cluster, Worker, WorkerSpec
from orchestrator.workers.messages import Command, Event, Failed

STOP_GRACE_S = 5.0

_log = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """What every worker is kept with: each may be started `max_restarts` times more within ten minutes."""

    cluster: Cluster
    max_restarts: int
    clock: Clock
    sleep: Sleep


class SupervisedWorker(Protocol):
    """Who is told what becomes of the worker."""

    def handle_start(self, where: str) -> None:
        """A new process is there; it is not ready yet."""
        ...

    def handle_event(self, event: Event) -> None:
        """It said something."""
        ...

    def handle_loss(self, cause: str) -> None:
        """It is gone; another one may follow."""
        ...

    def handle_restart(self, detail: str) -> None:
        """Another one follows, after a while."""
        ...

    def handle_failure(self, cause: str) -> None:
        """No other follows."""
        ...


class Supervisor:
    """One worker after the other from one spec, each told of to `kept`. `title` names them in the log."""

    def __init__(self, upkeep: SupervisorSettings, spec: WorkerSpec, title: str, kept: SupervisedWorker) -> None:
        self._upkeep = upkeep
        self._spec = spec
        self._title = title
        self._kept = kept
        self._budget = RestartBudget(upkeep.max_restarts)
        self._worker: Worker | None = None
        self._failure: Failed | None = None
        self._ended_here = False
        self._ending: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def running(self) -> bool:
        """True while there is a process that is not being ended."""
        return self._worker is not None and not self._ended_here

    def start(self) -> None:
        """Begin to keep a worker running; returns at once. Nothing happens the second time."""
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name=f"keep {self._title}")

    def send(self, command: Command) -> None:
        """Pass a command on to the worker, if there is one."""
        if self._worker is not None:
            self._worker.send(command)

    def end(self, why: Failed) -> None:
        """End the worker, if there is one, as if it had failed in this way."""
        if self._worker is not None:
            self._failure, self._ended_here = why, True
            self._ending = asyncio.create_task(self._worker.stop(0.0), name=f"end {self._title}")

    def stop(self) -> None:
        """Begin to end the worker; no other follows."""
        if not self._closed and self._task is not None:
            self._task.cancel()
        self._closed = True

    async def close(self) -> None:
        """End the worker; no other follows. Idempotent."""
        self.stop()
        task, self._task = self._task, None
        if task is not None:
            while not (await asyncio.wait([task], timeout=2 * STOP_GRACE_S))[0]:
                task.cancel()  # a cancellation can be swallowed where something else ends at that instant

    async def _run(self) -> None:
        try:
            while not self._closed:
                cause = await self._run_worker()
                self._kept.handle_loss(cause)
                if not await self._back_off(cause):
                    return
        except Exception as error:
            _log.exception("control of %s is broken", self._title)
            self._kept.handle_failure(f"control is broken: {type(error).__name__}: {error}")

    async def _run_worker(self) -> str:
        """Start a worker and follow it to its end; returns why it ended."""
        cause = "the worker ended without being told to"
        self._failure, self._ended_here = None, False
        try:
            self._worker = await self._upkeep.cluster.start(self._spec)
            self._kept.handle_start(self._worker.where)
            _log.info("%s started: %s", self._title, self._worker.where)
            async for event in self._worker.events():
                self._observe(event)
        except WorkerError as error:
            cause = str(error)
        finally:
            worker, self._worker = self._worker, None
            if worker is not None:
                await worker.stop(STOP_GRACE_S if self._closed else 0.0)
        return self._why(cause)

    def _why(self, cause: str) -> str:
        """Return why the worker ended: what it or `end` said, before what was seen from outside."""
        if self._failure is None:
            return cause
        return self._failure.message if self._ended_here else f"{self._failure.message} ({cause})"

    def _observe(self, event: Event) -> None:
        if isinstance(event, Failed) and not self._ended_here:
            self._failure = event
            _log.error("%s: %s", self._title, event.message)
        self._kept.handle_event(event)

    async def _back_off(self, cause: str) -> bool:
        """Wait before the next start. False: there is none."""
        if self._closed:
            return False
        if self._failure is not None and not self._failure.restartable:
            self._kept.handle_failure(self._failure.message)
            return False
        delay_s = self._budget.spend(cause, self._upkeep.clock.monotonic_s())
        if delay_s is None:
            self._kept.handle_failure(self._budget.describe_exhaustion(cause))
            return False
        restart = f"restart {len(self._budget.restarts_s)} of {self._budget.limit} in ten minutes"
        self._kept.handle_restart(f"{cause}; {restart}")
        _log.warning("%s lost: %s; %s follows in %.1f s", self._title, cause, restart, delay_s)
        await self._upkeep.sleep(delay_s)
        return True
