"""Starts, follows and ends worker processes as it is told, and reports their events. It decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from orchestrator.daemon.control.actions import StartWorker, StopWorker
from orchestrator.daemon.control.events import WorkerEnded, WorkerEnding, WorkerEvent, WorkerSaid, WorkerStarted
from orchestrator.daemon.control.replicas.worker_life import STOP_GRACE_S
from orchestrator.errors import WorkerError
from orchestrator.protocol.commands import Command
from orchestrator.protocol.contract import Cluster, Worker, WorkerSpec
from orchestrator.protocol.events import Failed
from policies.serving.failover.blame import LossKind

_log = logging.getLogger(__name__)
_UNTOLD: Final[LossKind] = "crashed"

Sleep = Callable[[float], Awaitable[None]]
Post = Callable[[WorkerEvent], None]


class Supervisor:
    """Workers of `cluster`, by the number that StartWorker gave them. `post` is told of each event. `complete` adds to
    a spec what is known by the time that its worker starts."""

    def __init__(
        self,
        cluster: Cluster,
        sleep: Sleep,
        post: Post,
        complete: Callable[[WorkerSpec], WorkerSpec] = lambda spec: spec,
    ) -> None:
        self._cluster = cluster
        self._sleep = sleep
        self._post = post
        self._complete = complete
        self._followed: dict[int, _Followed] = {}

    def start(self, order: StartWorker) -> None:
        followed = self._followed[order.worker] = _Followed()
        followed.task = asyncio.create_task(self._follow(order, followed), name=f"follow {order.title}")

    def send(self, worker: int, command: Command) -> None:
        followed = self._followed.get(worker)
        if followed is not None and followed.worker is not None:
            followed.worker.send(command)

    def stop(self, order: StopWorker) -> None:
        followed = self._followed.get(order.worker)
        if followed is not None and followed.ending is None:
            followed.ending = asyncio.create_task(self._end(order, followed), name=f"end worker {order.worker}")

    def list_processes(self) -> list[int]:
        """Return the numbers of all workers' processes, on whichever hosts: from their start until they have ended."""
        workers = [followed.worker or followed.leaving for followed in self._followed.values()]
        return [pid for worker in workers if worker is not None for pid in worker.pids]

    async def wait_ended(self) -> None:
        while tasks := [task for followed in self._followed.values() if (task := followed.ending or followed.task)]:
            await asyncio.wait(tasks)

    async def _follow(self, order: StartWorker, followed: _Followed) -> None:
        cause, kind = "the worker ended without being told to", _UNTOLD
        try:
            if order.after_s:
                await self._sleep(order.after_s)
            worker = followed.worker = await self._cluster.start(self._complete(order.spec))
            where = worker.where
            self._post(WorkerStarted(order.worker, where))
            async for event in worker.events():
                if where != worker.where:  # its parts were there before it
                    where = worker.where
                    self._post(WorkerStarted(order.worker, where))
                self._post(WorkerSaid(order.worker, event))
        except WorkerError as error:
            cause, kind = str(error), error.kind
        except Exception as error:
            _log.exception("control of %s is broken", order.title)
            broken = f"control is broken: {type(error).__name__}: {error}"
            self._post(WorkerSaid(order.worker, Failed(broken, restartable=False)))
        self._post(WorkerEnding(order.worker, cause, kind))
        try:
            await followed.clear(0.0)
        finally:
            if followed.ending is None:
                self._forget(order.worker, followed, cause, kind)

    async def _end(self, order: StopWorker, followed: _Followed) -> None:
        assert followed.task is not None  # noqa: S101 -- `start` has set it
        followed.task.cancel()
        try:
            while not (await asyncio.wait([followed.task], timeout=2 * STOP_GRACE_S))[0]:
                followed.task.cancel()  # a cancellation can be swallowed where something else ends at that instant
            await followed.clear(order.grace_s)
        finally:
            self._forget(order.worker, followed, "the worker was stopped")

    def _forget(self, worker: int, followed: _Followed, cause: str, kind: LossKind = _UNTOLD) -> None:
        if self._followed.get(worker) is followed:
            del self._followed[worker]
            self._post(WorkerEnded(worker, cause, kind))


class _Followed:
    """One process, and who follows and ends it."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.leaving: Worker | None = None
        """It until it has ended; nothing is sent to it any more."""
        self.task: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None

    async def clear(self, grace_s: float) -> None:
        self.leaving, self.worker = self.worker or self.leaving, None
        if self.leaving is not None:
            await self.leaving.stop(grace_s)
            self.leaving = None
