"""Keeps draft workers running beside the target's replicas, and each replica told where its own are.

A draft worker serves one replica at a time, so of each draft there are as many as there are replicas with it. They are
interchangeable: a replica without one gets any that no other has. No replica waits for them: it serves before they are
ready, while they are started again, and when that is given up. No effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final

from orchestrator.control.actions import Action, LogLine, Send
from orchestrator.control.events import WorkerEnded, WorkerEnding, WorkerSaid, WorkerStarted
from orchestrator.control.port import DraftView
from orchestrator.control.state import FAILED, READY, RESTARTING, STARTING
from orchestrator.control.worker_life import WorkerLife, WorkerLives
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.draft_messages import AttachDraft, DraftLink, DraftReady
from orchestrator.workers.messages import Event, Failed, Progress

_GIVEN_UP: Final = ("hung", "garbage")


class DraftWorkers:
    """All draft workers. Where one is given up, its replica goes on without it, or with another one that is free."""

    def __init__(self, lives: WorkerLives) -> None:
        self._lives = lives
        self._workers: list[_DraftWorker] = []
        self._targets: dict[str, tuple[int, Sequence[str]]] = {}  # by replica: its worker, the drafts that it knows
        self._begun = False

    def run_these(self, specs: Sequence[WorkerSpec]) -> list[Action]:
        """Have one worker of each of these specs, from when a replica serves. What runs one of them goes on, before
        others where it has a replica; what is left over is stopped."""
        wanted = list(specs)
        kept: list[_DraftWorker] = []
        actions: list[Action] = []
        for worker in sorted(self._workers, key=lambda one: not one.target):
            if worker.life.spec in wanted and not worker.out_of_use:
                wanted.remove(worker.life.spec)
                kept.append(worker)
            else:
                actions += worker.life.close()
        self._workers = [worker for worker in self._workers if worker in kept]
        for spec in wanted:
            taken = {worker.number for worker in self._workers if worker.name == spec.name}
            number = next(number for number in count() if number not in taken)
            life = self._lives.create(spec, f"draft worker {spec.name}")
            self._workers.append(_DraftWorker(life, number))
        if self._begun:
            actions += self._start()
        return actions + self._match()

    def _start(self) -> list[Action]:
        self._begun = True
        return [action for worker in self._workers for action in worker.life.begin()]

    def target_ready(self, replica: str, number: int, drafts: Sequence[str]) -> list[Action]:
        """A replica that knows these drafts serves: start what is not started yet, and attach what is ready. `number`:
        its worker's."""
        actions = self._start()
        self._targets[replica] = (number, drafts)
        for worker in self._workers:
            if worker.target == replica:
                actions += self._attach(worker)
        return actions + self._match()

    def detach_target(self, replica: str) -> list[Action]:
        """A replica does not come back: what it had is free."""
        self._targets.pop(replica, None)
        for worker in self._workers:
            if worker.target == replica:
                worker.target = ""
        return self._match()

    def observe_link(self, replica: str, link: DraftLink) -> list[Action]:
        """A replica's worker said how its connection to a draft worker is."""
        concerned = [worker for worker in self._workers if (worker.name, worker.target) == (link.name, replica)]
        return [action for worker in concerned for action in worker.observe_link(link)]

    def observe(self, event: WorkerStarted | WorkerSaid | WorkerEnding | WorkerEnded, now_s: float) -> list[Action]:
        """Something became of a worker; nothing happens where it is none of these."""
        worker = next((one for one in self._workers if one.life.number == event.worker), None)
        if worker is None:
            return []
        match event:
            case WorkerStarted():
                return worker.observe_start(event.where, now_s)
            case WorkerSaid():
                told = worker.observe(event.event, now_s)
                return [*told, *self._attach(worker), *self._match()] if isinstance(event.event, DraftReady) else told
            case WorkerEnding():
                worker.life.observe_ending()
                return []
            case WorkerEnded():
                return [*worker.observe_end(event, now_s), *self._match()]

    def list_loading(self) -> list[WorkerLife]:
        """Return the workers that are not ready yet."""
        return [worker.life for worker in self._workers if not worker.serving]

    def list_specs(self, replica: str) -> list[WorkerSpec]:
        """Return what the draft workers that serve a replica now were started from."""
        return [worker.life.spec for worker in self._workers if worker.serving and worker.target == replica]

    def views(self) -> tuple[DraftView, ...]:
        """Return the state of each."""
        return tuple(worker.view() for worker in self._workers)

    def close(self) -> list[Action]:
        """End every draft worker. Idempotent."""
        return [action for worker in self._workers for action in worker.life.close()]

    def _attach(self, worker: _DraftWorker) -> list[Action]:
        """Tell its replica's worker where a draft worker is, if it is ready."""
        if not worker.serving or worker.ready is None or worker.target not in self._targets:
            return []
        return [Send(self._targets[worker.target][0], AttachDraft(worker.name, worker.ready.door))]

    def _match(self) -> list[Action]:
        """Give each replica that lacks a draft one that is free; those that are ready go first."""
        actions: list[Action] = []
        for worker in self._workers:
            if worker.out_of_use:
                worker.target = ""
        free = [worker for worker in self._workers if not worker.target and not worker.out_of_use]
        for worker in sorted(free, key=lambda worker: not worker.serving):
            served = {other.target for other in self._workers if other.name == worker.name}
            lacking = [
                target for target, (_, known) in self._targets.items() if target not in served and worker.name in known
            ]
            if lacking:
                worker.target = lacking[0]
                actions += self._attach(worker)
        return actions


class _DraftWorker:
    """One draft worker after the other, from one spec. `target` is the replica that it drafts for."""

    def __init__(self, life: WorkerLife, number: int) -> None:
        self.life = life
        self.name = life.spec.name
        self.number = number
        self.target = ""
        self.ready: DraftReady | None = None
        self._phase, self._detail = STARTING, "waits for the target"
        self._where = ""
        self._serving = False
        self._restarts = 0

    @property
    def serving(self) -> bool:
        """True while it drafts."""
        return self._serving and self.life.running

    @property
    def out_of_use(self) -> bool:
        """True when it will not serve any more."""
        return self._phase == FAILED

    def view(self) -> DraftView:
        """Return the state."""
        return DraftView(
            *(self.name, self._phase, self._detail, self._where, self.ready, self._restarts),
            number=self.number,
            target=self.target,
        )

    def observe_link(self, link: DraftLink) -> list[Action]:
        """End a process that hangs or talks nonsense; it is then started again. What was merely cut is the target's
        worker's to mend."""
        if link.state == "connected":
            return [LogLine("info", "draft worker %s is connected to the target: %s", (self.name, self._where))]
        actions: list[Action] = [
            LogLine("warning", "draft worker %s: connection %s: %s", (self.name, link.state, link.reason))
        ]
        if link.state in _GIVEN_UP and self.serving:
            actions += self.life.end(Failed(f"{link.state}: {link.reason}", restartable=True))
        elif link.state == "refused":
            self._detail = link.reason
        return actions

    def observe_start(self, where: str, now_s: float) -> list[Action]:
        """A new process is there; it is not ready yet."""
        self._where = where
        return self.life.observe_start(where, now_s)

    def observe(self, event: Event, now_s: float) -> list[Action]:
        """Its worker said something."""
        actions = self.life.observe(event, now_s)
        match event:
            case DraftReady():
                self.ready, self._serving = event, True
                self.life.served = True
                self._phase, self._detail = READY, ""
                actions.append(LogLine("info", "draft worker %s ready: %s", (self.name, self._where)))
            case Progress(stage, _):
                self._detail = stage
            case _:
                pass
        return actions

    def observe_end(self, end: WorkerEnded, now_s: float) -> list[Action]:
        """Its worker is gone; another follows, or none does. One that is lost too often is out of use until it is ready
        again."""
        loss = self.life.observe_end(end.cause, end.kind, now_s)
        self._serving, self._detail = False, loss.cause
        if loss.restart:
            self._restarts += 1
            self._phase, self._detail = FAILED if loss.spent else RESTARTING, loss.restart
        if not loss.failure:
            return list(loss.actions)
        self._phase, self._detail = FAILED, loss.failure
        text = "draft worker %s failed, the target goes on without it: %s"
        return [*loss.actions, LogLine("error", text, (self.name, loss.failure))]
