"""Keeps draft workers running beside the target, and the target told where they are.

The target never waits for them: it serves before they are ready, while they are started again, and when that is given
up.
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

Attach = Callable[[AttachDraft], None]
Sleep = Callable[[float], Awaitable[None]]


class DraftWorkers:
    """All draft workers of one target. `attach` passes a command on to the target's worker, if there is one.

    Each may be started `max_restarts` times more within ten minutes; then the target goes on without it.
    """

    def __init__(
        self,
        cluster: Cluster,
        specs: Sequence[WorkerSpec],
        max_restarts: int,
        clock: Clock,
        sleep: Sleep,
        attach: Attach,
    ) -> None:
        self._workers = [
            _DraftWorker(cluster, spec, RestartBudget(max_restarts), clock, sleep, attach) for spec in specs
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def target_ready(self) -> None:
        """The target serves: start what is not started yet, and attach what is ready."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(worker.run(), name=f"draft {worker.name}") for worker in self._workers]
        for worker in self._workers:
            worker.attach()

    def observe(self, link: DraftLink) -> None:
        """The target's worker said how its connection to a draft worker is."""
        for worker in self._workers:
            if worker.name == link.name:
                worker.observe_link(link)

    def views(self) -> tuple[DraftView, ...]:
        """Return the state of each."""
        return tuple(worker.view() for worker in self._workers)

    async def close(self) -> None:
        """End every draft worker. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _DraftWorker:
    """One draft worker: started, followed, started again."""

    def __init__(
        self, cluster: Cluster, spec: WorkerSpec, budget: RestartBudget, clock: Clock, sleep: Sleep, attach: Attach
    ) -> None:
        self.name = spec.name
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
        self._serving = False
        self._failure: Failed | None = None
        self._doubt = ""
        self._restarts = 0
        self._ending: asyncio.Task[None] | None = None

    def attach(self) -> None:
        """Tell the target's worker where this one is, if it is ready."""
        if self._serving and self._ready is not None:
            self._attach(AttachDraft(self.name, self._ready.door))

    def view(self) -> DraftView:
        """Return the state."""
        return DraftView(self.name, self._phase, self._detail, self._where, self._ready, self._restarts)

    def observe_link(self, link: DraftLink) -> None:
        """End a process that hangs or talks nonsense; it is then started again. What was merely cut is the target's
        worker's to mend."""
        if link.state == "connected":
            _log.info("draft worker %s is connected to the target: %s", self.name, self._where)
            return
        _log.warning("draft worker %s: connection %s: %s", self.name, link.state, link.reason)
        if link.state in _GIVEN_UP and self._serving and self._worker is not None:
            self._serving = False
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
            self._serving = False
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
                self._ready, self._serving = event, True
                self._phase, self._detail = READY, ""
                _log.info("draft worker %s ready: %s", self.name, self._where)
                self.attach()
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
