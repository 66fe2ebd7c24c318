"""The replicas there are: those that serve, those that are being made ready to, and those that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import chain, count

from orchestrator.control.port import Totals
from orchestrator.control.replica import Owner, Replica
from orchestrator.control.state import FAILED, add_totals, fold_round, unlike
from orchestrator.control.supervisor import SupervisorSettings
from orchestrator.errors import WorkerError
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.messages import Ready, RoundReport

ALIKE = "set the precision in cluster.yaml (model.activations), and use one set of library versions"
"""The way out where replicas differ."""

_log = logging.getLogger(__name__)


class Replicas:
    """`serving` get requests, in the order of their places. `retiring` are left with the streams that only they can go
    on with to the bit. `gone`: the totals of those that have left no heir. `owner` is told what becomes of each."""

    def __init__(self, upkeep: SupervisorSettings, owner: Owner) -> None:
        self.serving: list[Replica] = []
        self.retiring: list[Replica] = []
        self.gone = Totals()
        self.closed = False
        self._joining: list[Replica] = []
        self._upkeep = upkeep
        self._owner = owner

    def __contains__(self, replica: Replica) -> bool:
        """True unless it is one that nobody waits for: one that is being made ready, or has left."""
        return replica in self.serving or replica in self.retiring

    def create_replicas(self, specs: Sequence[WorkerSpec]) -> None:
        """Have one replica of each of these, to be started."""
        for engine, spec in enumerate(specs):
            self.serving.append(self._build_replica(spec, engine))

    def _build_replica(self, spec: WorkerSpec, engine: int) -> Replica:
        taken = {replica.name for replica in self._everyone()}
        name = next(name for name in chain([spec.name], map(f"{spec.name}.{{}}".format, count(2))) if name not in taken)
        return Replica(self._upkeep, spec, name, engine, self._owner)

    def _everyone(self) -> tuple[Replica, ...]:
        return (*self.serving, *self._joining, *self.retiring)

    async def all_ready(self, coming: Sequence[tuple[int, WorkerSpec]], stay: Sequence[Replica]) -> list[Replica]:
        """Return new replicas when all serve, alike and like those that stay. Raises WorkerError."""
        new: list[Replica] = []
        for engine, spec in coming:
            new.append(self._build_replica(spec, engine))
            self._joining.append(new[-1])
        try:
            for one in new:
                one.start()
            for one in new:
                await one.settled.wait()
                if not one.serving or self.closed:
                    raise WorkerError(f"worker {one.name} cannot serve: {one.state.detail}")
                if one.state.ready is not None and (why := _unlike(one, one.state.ready, (*stay, *new))):
                    raise WorkerError(f"worker {one.name} cannot serve beside the others, with {why}; {ALIKE}")
        except BaseException:
            await asyncio.gather(*(one.close() for one in new))
            raise
        finally:
            self._joining = [one for one in self._joining if one not in new]
        return new

    def exchange(self, leaving: Sequence[Replica], coming: Sequence[Replica]) -> None:
        """Have those that come serve in place of those that leave."""
        stay = [replica for replica in self.serving if replica not in leaving]
        self.serving[:] = sorted((*stay, *coming), key=lambda replica: replica.engine)

    def bequeath(self, old: Replica) -> Replica | None:
        """Count what one that leaves did for the one in its place, and return that; None where there is none."""
        heir = self._heir(old)
        if heir is not None:
            heir.state.totals = add_totals([old.state.totals, heir.state.totals])
        else:
            self.gone = add_totals([self.gone, old.state.totals])
        return heir

    def count_for_heir(self, replica: Replica, done: RoundReport, delivered: int) -> None:
        """Count a round of one that is retiring for the one in its place. `delivered`: see state.fold_round."""
        if replica in self.retiring:
            heir = self._heir(replica)
            if heir is not None:
                heir.state.observe(done, delivered)
            else:
                self.gone = fold_round(self.gone, done, delivered)

    def _heir(self, old: Replica) -> Replica | None:
        return next((one for one in self.serving if one.engine == old.engine), None)

    def unlike_before(self, replica: Replica, ready: Ready) -> str:
        """Return in what a worker that is ready for the first time differs from those whose tokens streams have."""
        first = replica in self.serving and replica.state.ready is None
        return _unlike(replica, ready, self.serving) if first else ""

    async def close(self) -> None:
        """End all of them. Idempotent."""
        self.closed = True
        await asyncio.gather(*(one.close() for one in self._everyone()))


def _unlike(replica: Replica, ready: Ready, others: Sequence[Replica]) -> str:
    """Return in what a replica differs from the first of others that is known."""
    for other in others:
        known = other.state.ready
        if other is replica or known is None or other.state.phase == FAILED:
            continue
        if ready.device_name != known.device_name and not ready.class_fingerprint:
            _log.warning(
                "%s runs on %s and %s on %s: tokens are the same to the bit on processors of one kind only",
                *(replica.name, ready.device_name, other.name, known.device_name),
            )
        return unlike(ready, known)
    return ""
