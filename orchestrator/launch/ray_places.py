"""Keeps the places of workers from other tenants of a Ray cluster: a placement group for each host and device.

A group is shared by all workers of its place: while a plan moves, the old worker and the new one are there at once. It
lasts as long as one of them does. Nothing here imports ray: `ray_driver` hands the module over.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.target import THIS_NODE
from orchestrator.protocol.contract import WorkerSpec

# ADR 0060: where other work has the CPUs, the worker runs all the same.
_PLACED_WITHIN_S = 5.0
# Of a node's own resource: binds to it, and leaves room for a thousand. Any share below 1 / 100 does.
NODE_SHARE = 0.001


@dataclass(slots=True)
class _Place:
    """A group, None where it could not be had, for the reason `why`; and the numbers of its workers."""

    group: Any
    why: str
    workers: set[int] = field(default_factory=set)


class Places:
    """`own_ip`: the address of the driver's own node. Thread-safe."""

    def __init__(self, ray: Any, own_ip: str) -> None:
        self._ray = ray
        self._own_ip = own_ip
        self._places: dict[tuple[str, str], _Place] = {}
        self._changing = threading.Lock()

    def take(self, number: int, spec: WorkerSpec) -> tuple[Any, str]:
        """Return the scheduling strategy for a worker (None: there is no group for it), and why its place could not be
        kept from others ("" where it is, or where none was asked for). May wait some seconds."""
        if not spec.reserved_cpus or not spec.node:
            return None, ""
        key = (spec.node, spec.device)
        with self._changing:
            place = self._places.get(key)
            if place is None or place.group is None:
                before = place.workers if place is not None else set()
                place = self._places[key] = self._reserve(spec)
                place.workers |= before
            place.workers.add(number)
        if place.group is None:
            return None, place.why
        strategies = self._ray.util.scheduling_strategies
        return strategies.PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=0), ""

    def leave(self, number: int) -> None:
        """A worker is over; the last one of a place gives it back."""
        with self._changing:
            for key, place in list(self._places.items()):
                place.workers.discard(number)
                if not place.workers:
                    del self._places[key]
                    self._remove(place.group)

    def _reserve(self, spec: WorkerSpec) -> _Place:
        ip = self._own_ip if spec.node == THIS_NODE else spec.node
        bundle = {"CPU": spec.reserved_cpus, f"node:{ip}": NODE_SHARE}
        if spec.device.startswith("CUDA"):
            bundle["GPU"] = 1.0
        group = None
        try:
            group = self._ray.util.placement_group([bundle], strategy="STRICT_PACK")
            if group.wait(_PLACED_WITHIN_S):
                return _Place(group, "")
            why = f"host {ip} has not {_describe(bundle)} free for it: other work of this Ray cluster has them"
        except (self._ray.exceptions.RayError, ValueError) as error:
            why = f"Ray made no placement group for it: {error}"
        self._remove(group)
        return _Place(None, why)

    def _remove(self, group: Any) -> None:
        if group is None:
            return
        with suppress(self._ray.exceptions.RayError, ValueError):  # a head that is away forgets it with this driver
            self._ray.util.remove_placement_group(group)


def _describe(bundle: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {kind}" for kind, count in bundle.items() if not kind.startswith("node:"))
