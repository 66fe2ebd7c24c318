"""Costs as they turned out to be while serving, beside those that were measured alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from device_profiles.device_load import DeviceLoad, find_device_load
from device_profiles.device_names import name_compute_place
from policies.planning.plan import Device, Inventory, Option, Role, Shard
from policies.serving.device_load import describe_heat
from policies.serving.failover.health import SUSPECT_HEALTH

Key = tuple[str, str, str, int]
Corrections = Mapping[Key, float]
"""By profile, runtime, weights and threads of a target: measured time over predicted time."""


def key_of(part: Shard | Option) -> Key:
    return (part.profile, part.runtime, part.weights, part.threads)


def list_taken(cluster: Inventory, shards: Iterable[Shard]) -> dict[str, float]:
    """Return the share of each device, by its name, that other programs took while what is planned there was measured.
    Where nothing is planned it is the least of what may be."""
    known = {key_of(option): option.taken for option in cluster.options if option.role is Role.TARGET}
    used: dict[str, float] = {}
    for shard in shards:
        for device in shard.devices:
            used[device] = max(used.get(device, 0.0), known.get(key_of(shard), 0.0))
    least: dict[str, float] = {}
    for (profile, *_), taken in known.items():
        least[profile] = min(taken, least.get(profile, taken))
    return {device.id: least.get(device.profile, 0.0) for device in cluster.devices} | used


def correct_costs(cluster: Inventory, corrections: Corrections) -> Inventory:
    """Return the cluster with the targets' costs multiplied by what they turned out to be."""
    options = tuple(
        scale_option(option, corrections[key_of(option)])
        if option.role is Role.TARGET and key_of(option) in corrections
        else option
        for option in cluster.options
    )
    return replace(cluster, options=options)


def apply_health(cluster: Inventory, health: Mapping[str, tuple[float, str]]) -> Inventory:
    """Return the cluster with the health of its devices: a share of 1 and a reason, by host or by "HOST/DEVICE" with
    the device's name in any of its runtimes."""
    judged: dict[str, tuple[float, str]] = {}
    for name, known in health.items():
        place = name_compute_place(name)
        judged[place] = min(known, judged.get(place, known))

    def judge(device: Device) -> Device:
        places = {device.host, *map(name_compute_place, device.list_places())}
        worst = min((judged[place] for place in places & judged.keys()), default=(1.0, ""))
        return replace(device, health=worst[0], health_why=worst[1])

    return replace(cluster, devices=tuple(judge(device) for device in cluster.devices))


def apply_loads(
    cluster: Inventory, loads: Mapping[str, DeviceLoad], reserved: Callable[[Device], int] = lambda device: 0
) -> Inventory:
    """Return the cluster with what its devices do now, by "HOST/DEVICE" in any of its runtimes' names: the share of
    their time that other programs take, the memory that can be had, what waits, and heat. What our own workers hold can
    be had, but for what is `reserved`, and no more than is stated. Nothing is known of a device that has no load."""

    def load_device(device: Device) -> Device:
        known = (find_device_load(loads, place) for place in device.list_places())
        load = next((load for load in known if load is not None), None)
        if load is None:
            return replace(device, utilisation=0.0, queue_depth=0.0)
        memory = device.memory_bytes
        if load.memory_total_bytes:
            usable = max(0, load.memory_free_bytes + load.memory_ours_bytes - reserved(device))
            memory = min(memory, usable) if device.memory_stated else usable
        now = replace(device, utilisation=load.others or 0.0, queue_depth=load.queue_depth, memory_bytes=memory)
        hot = describe_heat(load, hot=False)
        if not hot or device.health <= SUSPECT_HEALTH:
            return now
        return replace(now, health=SUSPECT_HEALTH, health_why=f"{device.id} slows itself down: {hot}")

    return replace(cluster, devices=tuple(load_device(device) for device in cluster.devices))


def scale_option(option: Option, factor: float) -> Option:
    """Return an option that takes so many times as long."""
    return replace(
        option,
        cost=option.cost.scale_by(factor),
        overhead_ms=factor * option.overhead_ms,
        overhead_sequence_ms=factor * option.overhead_sequence_ms,
    )
