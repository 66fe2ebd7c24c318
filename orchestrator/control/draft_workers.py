"""Keeps draft workers running beside the target's replicas, and each replica told where its own are.

A draft worker serves one replica at a time, so of each draft there are as many as there are replicas with it. They are
interchangeable: a replica without one gets any that no other has. No replica waits for them: it serves before they are
ready, while they are started again, and when that is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from orchestrator.control.port import DraftView
from orchestrator.control.state import FAILED, READY, RESTARTING, STARTING
from orchestrator.control.supervisor import Supervisor, SupervisorSettings
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.draft_messages import AttachDraft, DraftLink, DraftReady
from orchestrator.workers.messages import Event, Failed, Progress

_GIVEN_UP: Final = ("hung", "garbage")

_log = logging.getLogger(__name__)

Attach = Callable[[str, AttachDraft], None]


class DraftWorkers:
    """All draft workers. `attach` passes a command on to a replica's worker, if there is one.

    Where one is given up, the replica goes on without it, or with another one that is free.
    """

    def __init__(self, upkeep: SupervisorSettings, attach: Attach) -> None:
        self._upkeep = upkeep
        self._attach = attach
        self._workers: list[_DraftWorker] = []
        self._targets: dict[str, Sequence[str]] = {}  # by replica, the drafts that it knows
        self._leaving: set[asyncio.Task[None]] = set()
        self._begun = False

    def run_these(self, specs: Sequence[WorkerSpec]) -> None:
        """Have one worker of each of these specs, from when a replica serves. What runs one of them goes on, before
        others where it has a replica; what is left over is stopped."""
        wanted = list(specs)
        kept: list[_DraftWorker] = []
        for worker in sorted(self._workers, key=lambda one: not one.target):
            if worker.spec in wanted and not worker.out_of_use:
                wanted.remove(worker.spec)
                kept.append(worker)
            else:
                ending = asyncio.create_task(worker.keeper.close(), name=f"end draft {worker.name}")
                self._leaving.add(ending)
                ending.add_done_callback(self._leaving.discard)
        self._workers = [worker for worker in self._workers if worker in kept]
        for spec in wanted:
            taken = {worker.number for worker in self._workers if worker.name == spec.name}
            number = next(number for number in count() if number not in taken)
            self._workers.append(_DraftWorker(self._upkeep, spec, number, self._attach, self._match))
        if self._begun:
            self._start()
        self._match()

    def _start(self) -> None:
        self._begun = True
        for worker in self._workers:
            worker.keeper.start()

    def target_ready(self, replica: str, drafts: Sequence[str]) -> None:
        """A replica that knows these drafts serves: start what is not started yet, and attach what is ready."""
        self._start()
        self._targets[replica] = drafts
        for worker in self._workers:
            if worker.target == replica:
                worker.attach()
        self._match()

    def detach_target(self, replica: str) -> None:
        """A replica does not come back: what it had is free."""
        self._targets.pop(replica, None)
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
        for worker in self._workers:
            worker.keeper.stop()

    async def close(self) -> None:
        """End every draft worker. Idempotent."""
        await asyncio.gather(*(worker.keeper.close() for worker in self._workers), *self._leaving)

    def _match(self) -> None:
        """Give each replica that lacks a draft one that is free; those that are ready go first."""
        for worker in self._workers:
            if worker.out_of_use:
                worker.target = ""
        free = [worker for worker in self._workers if not worker.target and not worker.out_of_use]
        for worker in sorted(free, key=lambda worker: not worker.serving):
            served = {other.target for other in self._workers if other.name == worker.name}
            lacking = [
                target for target, known in self._targets.items() if target not in served and worker.name in known
            ]
            if lacking:
                worker.target = lacking[0]
                worker.attach()


class _DraftWorker:
    """One draft worker after the other, from one spec. Implements control.supervisor.SupervisedWorker."""

    def __init__(
        self, upkeep: SupervisorSettings, spec: WorkerSpec, number: int, attach: Attach, changed: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.number = number
        self.target = ""
        self.keeper = Supervisor(upkeep, spec, f"draft worker {spec.name}", self)
        self._changed = changed
        self._attach = attach
        self._phase, self._detail = STARTING, "waits for the target"
        self._where = ""
        self._ready: DraftReady | None = None
        self._serving = False
        self._restarts = 0

    @property
    def serving(self) -> bool:
        """True while it drafts."""
        return self._serving and self.keeper.running

    @property
    def out_of_use(self) -> bool:
        """True when it will not serve any more."""
        return self._phase == FAILED

    def attach(self) -> None:
        """Tell its replica's worker where this one is, if it is ready."""
        if self.serving and self.target and self._ready is not None:
            self._attach(self.target, AttachDraft(self.name, self._ready.door))

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
        if link.state in _GIVEN_UP and self.serving:
            self.keeper.end(Failed(f"{link.state}: {link.reason}", restartable=True))
        elif link.state == "refused":
            self._detail = link.reason

    def handle_start(self, where: str) -> None:
        """See control.supervisor.SupervisedWorker."""
        self._where = where

    def handle_event(self, event: Event) -> None:
        """See control.supervisor.SupervisedWorker."""
        match event:
            case DraftReady():
                self._ready, self._serving = event, True
                self._phase, self._detail = READY, ""
                _log.info("draft worker %s ready: %s", self.name, self._where)
                self.attach()
                self._changed()
            case Progress(stage, _):
                self._detail = stage
            case _:
                pass

    def handle_loss(self, cause: str) -> None:
        """See control.supervisor.SupervisedWorker."""
        self._serving, self._detail = False, cause

    def handle_restart(self, detail: str) -> None:
        """See control.supervisor.SupervisedWorker."""
        self._restarts += 1
        self._phase, self._detail = RESTARTING, detail

    def handle_failure(self, cause: str) -> None:
        """See control.supervisor.SupervisedWorker."""
        self._phase, self._detail = FAILED, cause
        _log.error("draft worker %s failed, the target goes on without it: %s", self.name, cause)
        self._changed()
