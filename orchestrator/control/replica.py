"""Keeps one target worker running: started, followed, started again. It knows nothing of streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from orchestrator.clock import Clock
from orchestrator.cluster.port import Cluster, Command, Event, Failed, Ready, Round, Worker, WorkerSpec
from orchestrator.control.affinity import SeenPrefixes
from orchestrator.control.state import RestartBudget, TargetState
from orchestrator.errors import WorkerError
from policies.replica_pace import ReplicaPace, ran

STOP_GRACE_S = 5.0

_log = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]


class Owner(Protocol):
    """Who is told what becomes of a replica."""

    def observed(self, replica: Replica, event: Event) -> None:
        """Its worker said something."""
        ...

    def lost(self, replica: Replica, cause: str) -> None:
        """Its worker is gone; another one may follow."""
        ...

    def given_up(self, replica: Replica, cause: str) -> None:
        """No worker follows."""
        ...


class Replica:
    """One target worker after the other, from one spec. `engine` is its place among the replicas, from 0.

    Each may be started `max_restarts` times more within ten minutes. `name` is unique, also among replicas whose spec
    has the same.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: WorkerSpec,
        name: str,
        engine: int,
        max_restarts: int,
        clock: Clock,
        sleep: Sleep,
        owner: Owner,
    ) -> None:
        self.spec = spec
        self.name = name
        self.engine = engine
        self.state = TargetState(name, cluster.runtime)
        self.settled = asyncio.Event()  # it was ready once, or no worker follows
        self.heard_s = 0.0
        self.busy_s = 0.0  # when it got the first of its streams
        self.prefixes = SeenPrefixes(0)
        self.pace = ReplicaPace()
        self._cluster = cluster
        self._budget = RestartBudget(max_restarts)
        self._clock = clock
        self._sleep = sleep
        self._owner = owner
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def serving(self) -> bool:
        """True while its worker decodes."""
        return self._worker is not None and self.state.serving

    def start(self) -> None:
        """Begin to keep a worker running; returns at once."""
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name=f"replica {self.name}")

    def send(self, command: Command) -> None:
        """Pass a command on to the worker, if there is one."""
        if self._worker is not None:
            self._worker.send(command)

    def refuse(self, why: str) -> None:
        """End the worker, and start no other: what it is does not go with the others."""
        self.state.failure = Failed(why, restartable=False)
        if self._worker is not None:
            self._ending = asyncio.create_task(self._worker.stop(0.0), name=f"end {self.name}")

    async def close(self) -> None:
        """End the worker, and start no other. Idempotent."""
        self._closed = True
        self.settled.set()
        task, self._task = self._task, None
        if task is not None:
            while not task.done():  # a cancellation can be swallowed where something else ends at that instant
                task.cancel()
                await asyncio.wait([task], timeout=2 * STOP_GRACE_S)

    async def _run(self) -> None:
        try:
            while not self._closed:
                cause = await self._run_worker()
                self._owner.lost(self, cause)
                if not await self._back_off(cause):
                    return
        except Exception as error:
            _log.exception("control of replica %s is broken", self.name)
            self._give_up(f"control is broken: {type(error).__name__}: {error}")

    async def _run_worker(self) -> str:
        """Start a worker and follow it to its end; returns why it ended."""
        cause = "the worker ended without being told to"
        try:
            self._worker = await self._cluster.start(self.spec)
            self.state.worker_started(self._worker.where)
            _log.info("worker %s started: %s", self.name, self._worker.where)
            async for event in self._worker.events():
                self._observe(event)
        except WorkerError as error:
            cause = str(error)
        finally:
            worker, self._worker = self._worker, None
            self.state.worker_lost(cause)
            if worker is not None:
                await worker.stop(STOP_GRACE_S if self._closed else 0.0)
        failure = self.state.failure
        return cause if failure is None else f"{failure.message} ({cause})"

    def _observe(self, event: Event) -> None:
        self.heard_s = self._clock.monotonic_s()
        match event:
            case Round():
                tokens = sum(len(delta.tokens) for delta in event.deltas)
                counts = {"sequences": event.sequences, "rows": event.rows, "drafted": event.drafted}
                self.pace = ran(self.pace, tokens=tokens, round_ms=event.round_ms, **counts)
            case Ready():
                self.prefixes = SeenPrefixes(event.kv_blocks * event.block_tokens)
            case Failed(message):
                _log.error("worker %s: %s", self.name, message)
        self._owner.observed(self, event)
        if self.state.serving:
            self.settled.set()

    async def _back_off(self, cause: str) -> bool:
        """Wait before the next start. False: there is none, and the phase is failed."""
        failure = self.state.failure
        if self._closed:
            return False
        if failure is not None and not failure.restartable:
            self._give_up(failure.message)
            return False
        delay_s = self._budget.spend(cause, self._clock.monotonic_s())
        if delay_s is None:
            self._give_up(self._budget.spent(cause))
            return False
        restart = f"restart {len(self._budget.restarts_s)} of {self._budget.limit} in ten minutes"
        self.state.restarting(f"{cause}; {restart}")
        _log.warning("worker %s lost: %s; %s follows in %.1f s", self.name, cause, restart, delay_s)
        await self._sleep(delay_s)
        return True

    def _give_up(self, cause: str) -> None:
        self.state.failed(cause)
        self.settled.set()
        _log.error("worker %s failed: %s", self.name, cause)
        self._owner.given_up(self, cause)
