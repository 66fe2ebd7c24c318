"""Keeps the places of workers from other tenants of a Ray cluster: a placement group for each host, device and name.

A group is shared by workers of one name: while a plan moves, the old worker and the new one are there at once. One for
which the host has no CPUs left shares the group of a worker beside it. A group lasts as long as one of its workers
does. Nothing here imports ray: `ray_driver` hands the module over.

A GPU has a group of its own, in which nothing runs. Ray would show an actor in it that one GPU alone, as the first one,
and our workers name a GPU by its number on the host. Which GPU a group is given is Ray's choice: groups of others are
held until the wanted one comes, and then given back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from device_profiles.device_names import CUDA_KIND, find_index, name_compute_unit, split_device
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.launch.ray_actor import read_own_gpus
from orchestrator.protocol.contract import WorkerSpec

# ADR 0060: where other work has the CPUs, the worker runs all the same.
_PLACED_WITHIN_S = 5.0
# The same where it can share the place of a worker beside it. Not tuned: Ray answers within a tenth of that.
_APART_WITHIN_S = 1.0
# Of a node's own resource: binds to it, and leaves room for a thousand. Any share below 1 / 100 does.
NODE_SHARE = 0.001
_ANSWERED_WITHIN_S = 30.0  # by a process that Ray may have to start
_COUNTED_KINDS = (CUDA_KIND, "rocm")
"""Devices that Ray counts as GPUs, in the order in which runtimes number them."""


@dataclass(slots=True)
class _Place:
    """A group, None where it could not be had, for the reason `why`; and the numbers of its workers."""

    group: Any
    why: str
    workers: set[int] = field(default_factory=set)


class Places:
    """`own_ip`: the address of the driver's own node. `count_gpus` tells how many GPUs Ray counts at an address, and
    may raise RayError. Thread-safe."""

    def __init__(self, ray: Any, own_ip: str, count_gpus: Callable[[str], int]) -> None:
        self._ray = ray
        self._own_ip = own_ip
        self._count_gpus = count_gpus
        self._places: dict[tuple[str, ...], _Place] = {}
        self._changing = threading.Lock()

    def take(self, number: int, spec: WorkerSpec) -> tuple[Any, str]:
        """Return the scheduling strategy for a worker (None: there is no group for it), and why its place could not be
        kept from others ("" where it is, or where none was asked for). May wait some seconds."""
        if not spec.reserved_cpus or not spec.node:
            return None, ""
        ip = self._own_ip if spec.node == THIS_NODE else spec.node
        unit, cpus = name_compute_unit(spec.device), {"CPU": spec.reserved_cpus}
        with self._changing:
            beside = self._list_beside((ip, "CPU", unit))
            within_s = _APART_WITHIN_S if beside else _PLACED_WITHIN_S
            place = self._join(number, (ip, "CPU", unit, spec.name), partial(self._reserve, ip, cpus, within_s))
            whys = [place.why]
            if place.group is None and beside:
                place = beside[0]
                place.workers.add(number)
            for index in list_gpus(spec):
                gpu = (ip, "GPU", str(index))
                whys.append(self._join(number, gpu, partial(self._reserve_gpu, ip, index)).why)
        why = "; ".join(filter(None, whys))
        if place.group is None:
            return None, why
        strategies = self._ray.util.scheduling_strategies
        return strategies.PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=0), why

    def leave(self, number: int) -> None:
        """A worker is over; the last one of a place gives it back."""
        with self._changing:
            for key, place in list(self._places.items()):
                place.workers.discard(number)
                if not place.workers:
                    del self._places[key]
                    self._remove(place.group)

    def _list_beside(self, start: tuple[str, ...]) -> list[_Place]:
        """Return the places on a device of a host that could be had."""
        return [place for key, place in self._places.items() if key[: len(start)] == start and place.group is not None]

    def _join(self, number: int, key: tuple[str, ...], reserve: Callable[[], _Place]) -> _Place:
        """Return a place with one more worker. It is reserved where no worker has it yet, or it could not be had."""
        place = self._places.get(key)
        if place is None or (place.group is None and place.why):
            before = place.workers if place is not None else set()
            place = self._places[key] = reserve()
            place.workers |= before
        place.workers.add(number)
        return place

    def _reserve(self, ip: str, resources: dict[str, float], within_s: float = _PLACED_WITHIN_S) -> _Place:
        group = None
        try:
            group = self._ray.util.placement_group([{**resources, f"node:{ip}": NODE_SHARE}], strategy="STRICT_PACK")
            if group.wait(within_s):
                return _Place(group, "")
            named = " and ".join(f"{count:g} {kind}" for kind, count in resources.items())
            why = f"host {ip} has not {named} free for it: other work of this Ray cluster has them"
        except (self._ray.exceptions.RayError, ValueError) as error:
            why = f"Ray made no placement group for it: {error}"
        self._remove(group)
        return _Place(None, why)

    def _reserve_gpu(self, ip: str, index: int) -> _Place:
        """Keep one GPU of a host, by its number there. Where Ray counts none on that host, it gives none away."""
        others: list[Any] = []
        try:
            count = self._count_gpus(ip)
            while len(others) < count:
                place = self._reserve(ip, {"GPU": 1.0})
                if place.group is None:
                    break
                others.append(place.group)
                if index in self._read_gpus(place.group):
                    others.pop()
                    return place
            why = f"host {ip} has GPU {index} not free for it: other work of this Ray cluster has it" if count else ""
        except self._ray.exceptions.RayError as error:
            why = f"Ray does not say whether GPU {index} of host {ip} is free for it: {error}"
        finally:
            for group in others:
                self._remove(group)
        return _Place(None, why)

    def _read_gpus(self, group: Any) -> set[int]:
        """Return the numbers of the GPUs that Ray gave to a group. Raises RayError."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0)
        task = self._ray.remote(num_cpus=0, num_gpus=1, max_retries=0, scheduling_strategy=strategy)(read_own_gpus)
        return set(self._ray.get(task.remote(), timeout=_ANSWERED_WITHIN_S))

    def _remove(self, group: Any) -> None:
        if group is None:
            return
        with suppress(self._ray.exceptions.RayError, ValueError):  # a head that is away forgets it with this driver
            self._ray.util.remove_placement_group(group)


def list_gpus(spec: WorkerSpec) -> list[int]:
    """Return the numbers of the GPUs that a worker computes on, of those that Ray counts."""
    counted = [device for device in (spec.device, *spec.further_devices) if split_device(device)[0] in _COUNTED_KINDS]
    indexes = (find_index(device) for device in counted)
    return sorted({index for index in indexes if index is not None})
