"""Which replicas stay when others are wanted, and which places the new ones take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count

import msgspec

from orchestrator.daemon.control.replicas.replicas import Replica
from orchestrator.daemon.control.state import FAILED
from orchestrator.protocol.contract import WorkerSpec


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`engines`: the place of each spec that is wanted. `kept`: those where a worker goes on; `coming`: those that a
    new worker takes, from this spec. Who is in any other place leaves."""

    engines: tuple[int, ...]
    kept: frozenset[int]
    coming: tuple[tuple[int, WorkerSpec], ...]


def arrange_replicas(replicas: Sequence[Replica], specs: Sequence[WorkerSpec]) -> Arrangement:
    """Return how replicas come to be those of `specs`.

    Specs that differ in nothing but their name run alike; who is in the place that its spec has in `specs` stays there.
    A new worker takes the place of one that leaves, the lowest first, else the lowest number that is free.
    """
    running = {replica.engine: leave_name(replica.spec) for replica in replicas if replica.state.phase != FAILED}
    wanted = [leave_name(spec) for spec in specs]
    stays = {place: place for place, spec in enumerate(wanted) if running.get(place) == spec}
    for number, spec in enumerate(wanted):
        alike = [engine for engine, known in running.items() if known == spec and engine not in stays.values()]
        if number not in stays and alike:
            stays[number] = alike[0]
    kept = frozenset(stays.values())
    left = sorted({replica.engine for replica in replicas} - kept)
    free = chain(left, (engine for engine in count() if engine not in kept and engine not in left))
    placed = tuple(stays[number] if number in stays else next(free) for number in range(len(specs)))
    coming = tuple((place, spec) for place, spec in zip(placed, specs, strict=True) if place not in kept)
    return Arrangement(placed, kept, coming)


def leave_name(spec: WorkerSpec) -> WorkerSpec:
    """Return a spec without its name: two that differ in nothing else run alike."""
    return msgspec.structs.replace(spec, name="")
