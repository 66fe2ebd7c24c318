"""One target worker after the other, in one place among the replicas. It knows nothing of streams."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from orchestrator.control.affinity import SeenPrefixes
from orchestrator.control.state import FAILED, TargetState
from orchestrator.control.supervisor import Supervisor, SupervisorSettings
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.messages import Command, Event, Failed, Ready, RoundReport
from policies.serving.replica_load import ReplicaPace, observe_replica_round

_log = logging.getLogger(__name__)


class Owner(Protocol):
    """Who is told what becomes of a replica."""

    def handle_replica_event(self, replica: Replica, event: Event) -> None:
        """Its worker said something."""
        ...

    def handle_replica_loss(self, replica: Replica, cause: str) -> None:
        """Its worker is gone; another one may follow."""
        ...

    def handle_replica_failure(self, replica: Replica, cause: str) -> None:
        """No worker follows."""
        ...


class Replica:
    """One target worker after the other, from one spec. `engine` is its place among the replicas, from 0.

    `name` is unique, also among replicas whose spec has the same. Implements control.supervisor.SupervisedWorker.
    """

    def __init__(self, upkeep: SupervisorSettings, spec: WorkerSpec, name: str, engine: int, owner: Owner) -> None:
        self.spec = spec
        self.name = name
        self.engine = engine
        self.state = TargetState(name)
        self.settled = asyncio.Event()  # it was ready once, or no worker follows
        self.heard_s = 0.0
        self.busy_s = 0.0  # when it got the first of its streams
        self.prefixes = SeenPrefixes(0)
        self.pace = ReplicaPace()
        self._clock = upkeep.clock
        self._owner = owner
        self._keeper = Supervisor(upkeep, spec, f"worker {name}", self)

    @property
    def serving(self) -> bool:
        """True while its worker decodes."""
        return self._keeper.running and self.state.serving

    def start(self) -> None:
        """Begin to keep a worker running; returns at once."""
        self._keeper.start()

    def send(self, command: Command) -> None:
        """Pass a command on to the worker, if there is one."""
        self._keeper.send(command)

    def refuse(self, why: str) -> None:
        """End the worker, and start no other: what it is does not go with the others."""
        self._keeper.end(Failed(why, restartable=False))

    async def close(self) -> None:
        """End the worker, and start no other. Idempotent."""
        self.settled.set()
        await self._keeper.close()
        if self.state.phase != FAILED:
            self.state.mark_worker_lost("the worker was stopped")

    def handle_start(self, where: str) -> None:
        """See control.supervisor.SupervisedWorker."""
        self.state.where = where

    def handle_event(self, event: Event) -> None:
        """See control.supervisor.SupervisedWorker."""
        self.heard_s = self._clock.monotonic_s()
        match event:
            case RoundReport():
                tokens = sum(len(delta.tokens) for delta in event.deltas)
                counts = {"sequences": event.sequences, "rows": event.rows, "drafted": event.drafted}
                self.pace = observe_replica_round(self.pace, tokens=tokens, round_ms=event.round_ms, **counts)
            case Ready():
                self.prefixes = SeenPrefixes(event.kv_blocks * event.block_tokens)
        self._owner.handle_replica_event(self, event)
        if self.state.serving:
            self.settled.set()

    def handle_loss(self, cause: str) -> None:
        """See control.supervisor.SupervisedWorker."""
        self.state.mark_worker_lost(cause)
        self._owner.handle_replica_loss(self, cause)

    def handle_restart(self, detail: str) -> None:
        """See control.supervisor.SupervisedWorker."""
        self.state.mark_restarting(detail)

    def handle_failure(self, cause: str) -> None:
        """See control.supervisor.SupervisedWorker."""
        self.state.mark_failed(cause)
        self.settled.set()
        _log.error("worker %s failed: %s", self.name, cause)
        self._owner.handle_replica_failure(self, cause)
