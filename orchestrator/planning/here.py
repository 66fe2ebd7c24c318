"""Hosts that are there, with the devices that were measured, as the planner takes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from device_profiles.device_names import name_compute_unit
from device_profiles.link import LinkProfile
from device_profiles.measured import Hardware
from device_profiles.profile import Exactness
from orchestrator.planning.models import PlannedModel
from orchestrator.planning.sketched import build_device
from orchestrator.planning.stored import MeasuredHardware
from policies.planning.plan import DefaultLinks, Device, Host, Inventory, Option

T = TypeVar("T")
Allowed = Callable[[Option, str], bool]


@dataclass(frozen=True, slots=True)
class PresentHost:
    """A host that is there. `node`: the address of its Ray node, THIS_NODE for the daemon's own. `hardware`: what it
    has; `seen`: that with each runtime that sees it there, None where that is not known; `lacks`: why other runtimes
    see nothing there, or do not run the target. `free_bytes`: what is free of a device (all its memory where it is left
    out), and `stated_bytes` what a plan may fill of it whatever is free; both by any of its runtimes' names for it.
    `cores`: that workers may use, 0 for those of its processor's profile. `name`: what cluster.yaml calls it.
    `devices`: the names of those that may be used, empty for all. `price_per_hour`: of the host, and `device_prices` of
    devices beside it, by name, 0 where not known."""

    node: str
    hardware: frozenset[Hardware]
    free_bytes: Mapping[str, int] = field(default_factory=dict)
    cores: int = 0
    zone: str = ""
    name: str = ""
    roles: tuple[str, ...] = ("target", "draft")
    devices: tuple[str, ...] = ()
    price_per_hour: float = 0.0
    device_prices: Mapping[str, float] = field(default_factory=dict)
    stated_bytes: Mapping[str, int] = field(default_factory=dict)
    seen: Collection[tuple[str, Hardware]] | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PresentLinks:
    """What lies between hosts, named as PresentHost.node: measured or stated, and where neither is so."""

    between: tuple[LinkProfile, ...] = ()
    default: DefaultLinks = field(default_factory=DefaultLinks)


def cluster_present(
    hosts: Sequence[PresentHost],
    measured: Sequence[MeasuredHardware],
    target: PlannedModel,
    drafts: Sequence[PlannedModel],
    exactness: Exactness,
    *,
    links: PresentLinks,
    allowed: Allowed | None = None,
    left: Callable[[MeasuredHardware], int] = lambda hardware: 0,
) -> tuple[Inventory, dict[str, MeasuredHardware]]:
    """Return hosts with all their devices that were measured, and by profile what stands behind its figures.

    `allowed`: whether an option on a runtime's device may be chosen. `left`: how much of a device's memory is for
    something else.
    """
    names = _name_profiles(measured)
    devices: list[Device] = []
    inventory: list[Host] = []
    options: dict[str, list[Option]] = {}
    behind: dict[str, MeasuredHardware] = {}
    for host in hosts:
        mine = [hardware for hardware in measured if hardware.hardware in host.hardware and _may_use(host, hardware)]
        cores = host.cores or max((hardware.cores for hardware in mine), default=0)
        inventory.append(Host(host.node, host.zone, cores, host.price_per_hour))
        for hardware in mine:
            profile = names[hardware.hardware] + (
                f", {host.cores} of its cores" if host.cores and hardware.cores else ""
            )
            behind[profile] = hardware
            prices, stated = _by_unit(host.device_prices), _by_unit(host.stated_bytes)
            units = [name_compute_unit(seen.device) for seen in hardware.devices]
            price = max((prices.get(unit, 0.0) for unit in units), default=0.0)
            stated_bytes = next((stated[unit] for unit in units if unit in stated), None)
            free = _by_unit(host.free_bytes).get(name_compute_unit(hardware.name), hardware.hardware.memory_bytes)
            memory = max(0, (free if stated_bytes is None else stated_bytes) - left(hardware))
            device = build_device(hardware, name_present(host, hardware), host.node, profile, memory, price)
            devices.append(replace(device, memory_stated=stated_bytes is not None))
            options.setdefault(
                profile,
                [
                    replace(option, profile=profile)
                    for option in hardware.options(target, drafts, exactness, cores)
                    if allowed is None or allowed(option, hardware.device_for(option.runtime))
                ],
            )
    flat = tuple(option for some in options.values() for option in some)
    return Inventory(tuple(inventory), tuple(devices), flat, links.between, links.default), behind


def name_present(host: PresentHost, hardware: MeasuredHardware) -> str:
    return f"{host.node}/{hardware.name}"


def _may_use(host: PresentHost, hardware: MeasuredHardware) -> bool:
    named = {name_compute_unit(name) for name in host.devices}
    return not named or any(name_compute_unit(device.device) in named for device in hardware.devices)


def _by_unit(figures: Mapping[str, T]) -> dict[str, T]:
    """Return figures of devices by one name for each, whichever of its names they came by; the last one counts."""
    return {name_compute_unit(name): value for name, value in figures.items()}


def _name_profiles(measured: Sequence[MeasuredHardware]) -> dict[Hardware, str]:
    """Return a name for each kind of hardware. Kinds that are called alike differ in cores, memory or more."""
    names: dict[Hardware, str] = {}
    for hardware in measured:
        name = f"{hardware.hardware.name} {hardware.name}"
        if name in names.values() and hardware.cores:
            name = f"{name}, {hardware.cores} cores"
        while name in names.values():
            name += "'"
        names[hardware.hardware] = name
    return names
