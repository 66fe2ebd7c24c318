"""Keeps draft workers running beside the target's replicas, and each replica told where its own are.

A draft worker serves one replica at a time, so of each draft there are as many as there are replicas. They are
interchangeable: a replica without one gets any that no other has. No replica waits for them: it serves before they are
ready, while they are started again, and when that is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from orchestrator.clock import Clock
from orchestrator.cluster.port import (
    AttachDraft,
    Cluster,
    DraftLink,
    DraftReady,
    Event,
    Failed,
    Progress,
    Worker,
    WorkerSpec,
)
from orchestrator.control.port import DraftView
from orchestrator.control.state import FAILED, READY, RESTARTING, STARTING, RestartBudget
from orchestrator.errors import WorkerError

_STOP_GRACE_S = 5.0
_GIVEN_UP: Final = ("hung", "garbage")

_log = logging.getLogger(__name__)

Attach = Callable[[str, AttachDraft], None]
Sleep = Callable[[float], Awaitable[None]]


class DraftWorkers:
    """All draft workers: `replicas` of each spec. `attach` passes a command on to a replica's worker, if there is one.

    Each may be started `max_restarts` times more within ten minutes; then the replica goes on without it, or with
    another one that is free.
    """

    def __init__(
        self,
        cluster: Cluster,
        specs: Sequence[WorkerSpec],
        replicas: int,
        max_restarts: int,
        clock: Clock,
        sleep: Sleep,
        attach: Attach,
    ) -> None:
        self._workers = [
            _DraftWorker(cluster, spec, number, RestartBudget(max_restarts), clock, sleep, attach, self._match)
            for spec in specs
            for number in range(replicas)
        ]
        self._targets: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    def target_ready(self, replica: str) -> None:
        """A replica serves: start what is not started yet, and attach what is ready."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(worker.run(), name=f"draft {worker.name}") for worker in self._workers]
        if replica not in self._targets:
            self._targets.append(replica)
        for worker in self._workers:
            if worker.target == replica:
                worker.attach()
        self._match()

    def target_gone(self, replica: str) -> None:
        """A replica does not come back: what it had is free."""
        self._targets = [target for target in self._targets if target != replica]
        for worker in self._workers:
            if worker.target == replica:
                worker.target = ""
        self._match()

    def observe(self, replica: str, link: DraftLink) -> None:
        """A replica's worker said how its connection to a draft worker is."""
        for worker in self._workers:
            if (worker.name, worker.target) == (link.name, replica):
                worker.observe_link(link)

    def views(self) -> tuple[DraftView, ...]:
        """Return the state of each."""
        return tuple(worker.view() for worker in self._workers)

    def stop(self) -> None:
        """Begin to end every draft worker."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """End every draft worker. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _match(self) -> None:
        """Give each replica that lacks a draft one that is free; those that are ready go first."""
        for worker in self._workers:
            if worker.given_up:
                worker.target = ""
        free = [worker for worker in self._workers if not worker.target and not worker.given_up]
        for worker in sorted(free, key=lambda worker: not worker.serving):
            served = {other.target for other in self._workers if other.name == worker.name}
            lacking = [target for target in self._targets if target not in served]
            if lacking:
                worker.target = lacking[0]
                worker.attach()


class _DraftWorker:
    """One draft worker: started, followed, started again."""

    def __init__(
        self,
        cluster: Cluster,
        spec: WorkerSpec,
        number: int,
        budget: RestartBudget,
        clock: Clock,
        sleep: Sleep,
        attach: Attach,
        changed: Callable[[], None],
    ) -> None:
        self.name = spec.name
        self.number = number
        self.target = ""
        self._changed = changed
        self._cluster = cluster
        self._spec = spec
        self._budget = budget
        self._clock = clock
        self._sleep = sleep
        self._attach = attach
        self._worker: Worker | None = None
        self._phase, self._detail = STARTING, "waits for the target"
        self._where = ""
        self._ready: DraftReady | None = None
        self.serving = False
        self._failure: Failed | None = None
        self._doubt = ""
        self._restarts = 0
        self._ending: asyncio.Task[None] | None = None

    def attach(self) -> None:
        """Tell its replica's worker where this one is, if it is ready."""
        if self.serving and self.target and self._ready is not None:
            self._attach(self.target, AttachDraft(self.name, self._ready.door))

    @property
    def given_up(self) -> bool:
        """True when it will not serve any more."""
        return self._phase == FAILED

    def view(self) -> DraftView:
        """Return the state."""
        return DraftView(
            *(self.name, self._phase, self._detail, self._where, self._ready, self._restarts),
            number=self.number,
            target=self.target,
        )

    def observe_link(self, link: DraftLink) -> None:
        """End a process that hangs or talks nonsense; it is then started again. What was merely cut is the target's
        worker's to mend."""
        if link.state == "connected":
            _log.info("draft worker %s is connected to the target: %s", self.name, self._where)
            return
        _log.warning("draft worker %s: connection %s: %s", self.name, link.state, link.reason)
        if link.state in _GIVEN_UP and self.serving and self._worker is not None:
            self.serving = False
            self._doubt = f"{link.state}: {link.reason}"
            self._ending = asyncio.create_task(self._worker.stop(0.0), name=f"end draft {self.name}")
        elif link.state == "refused":
            self._detail = link.reason

    async def run(self) -> None:
        """Keep it running until cancelled, or until the restart budget is spent."""
        try:
            while True:
                cause = await self._run_once()
                if self._failure is not None and not self._failure.restartable:
                    self._give_up(self._failure.message)
                    return
                delay_s = self._budget.spend(cause, self._clock.monotonic_s())
                if delay_s is None:
                    self._give_up(self._budget.spent(cause))
                    return
                self._restarts += 1
                restart = f"restart {len(self._budget.restarts_s)} of {self._budget.limit} in ten minutes"
                self._phase, self._detail = RESTARTING, f"{cause}; {restart}"
                _log.warning("draft worker %s lost: %s; %s follows in %.1f s", self.name, cause, restart, delay_s)
                await self._sleep(delay_s)
        except Exception as error:
            _log.exception("control of draft worker %s is broken", self.name)
            self._give_up(f"control is broken: {type(error).__name__}: {error}")

    async def _run_once(self) -> str:
        """Start a worker and follow it to its end; returns why it ended."""
        cause = "the worker ended without being told to"
        self._failure, self._doubt = None, ""
        grace_s = _STOP_GRACE_S
        try:
            self._worker = await self._cluster.start(self._spec)
            self._where = self._worker.where
            async for event in self._worker.events():
                self._observe(event)
            grace_s = 0.0
        except WorkerError as error:
            cause, grace_s = str(error), 0.0
        finally:
            self.serving = False
            worker, self._worker = self._worker, None
            if worker is not None:
                await worker.stop(grace_s)
        return self._why(cause)

    def _why(self, cause: str) -> str:
        """Return why the worker ended: its own word, or the target's, before what was seen from outside."""
        return self._doubt or (cause if self._failure is None else f"{self._failure.message} ({cause})")

    def _observe(self, event: Event) -> None:
        match event:
            case DraftReady():
                self._ready, self.serving = event, True
                self._phase, self._detail = READY, ""
                _log.info("draft worker %s ready: %s", self.name, self._where)
                self.attach()
                self._changed()
            case Progress(stage, _):
                self._detail = stage
            case Failed():
                self._failure = event
                _log.error("draft worker %s: %s", self.name, event.message)
            case _:
                pass

    def _give_up(self, cause: str) -> None:
        self._phase, self._detail = FAILED, cause
        _log.error("draft worker %s failed, the target goes on without it: %s", self.name, cause)
        self._changed()
