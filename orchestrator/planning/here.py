"""The machine that profiles were measured on, as the planner takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from device_profiles.link import LinkProfile
from device_profiles.profile import Exactness
from orchestrator.config.target import THIS_NODE
from orchestrator.planning.models import PlannedModel
from orchestrator.planning.sketched import build_device
from orchestrator.planning.stored import MeasuredHardware
from policies.planning.plan import Host, Inventory, Option

Allowed = Callable[[Option, str], bool]


def cluster_here(
    found: Sequence[MeasuredHardware],
    target: PlannedModel,
    drafts: Sequence[PlannedModel],
    exactness: Exactness,
    *,
    free_bytes: Mapping[str, int],
    links: Sequence[LinkProfile] = (),
    allowed: Allowed | None = None,
    left: Callable[[MeasuredHardware], int] = lambda one: 0,
    price_per_hour: float = 0.0,
) -> tuple[Inventory, dict[str, MeasuredHardware]]:
    """Return one host with all devices that were measured, and by profile what stands behind its figures.

    `free_bytes`: what a plan may fill of a device, by its name; else all its memory. `allowed`: whether an option on a
    runtime's device may be chosen. `left`: how much of a device's memory is for something else. `price_per_hour`: of
    the machine with its devices.
    """
    devices, options, behind = [], [], {}
    cores = max((one.cores for one in found), default=0)
    for one in found:
        profile = f"{one.hardware.name} {one.name}"
        memory = max(0, free_bytes.get(one.name, one.hardware.memory_bytes) - left(one))
        devices.append(build_device(one, f"{THIS_NODE}/{one.name}", THIS_NODE, profile, memory))
        options += [
            replace(option, profile=profile)
            for option in one.options(target, drafts, exactness, cores)
            if allowed is None or allowed(option, one.device_for(option.runtime))
        ]
        behind[profile] = one
    host = Host(THIS_NODE, "", cores, price_per_hour)
    return Inventory((host,), tuple(devices), tuple(options), tuple(links)), behind
