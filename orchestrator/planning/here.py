"""Hosts that are there, with the devices that were measured, as the planner takes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from device_profiles.device_names import name_compute_unit, name_without_number, number_unit
from device_profiles.link import LinkProfile
from device_profiles.measured import Hardware
from device_profiles.profile import Exactness
from orchestrator.machine.devices import SeenDevice
from orchestrator.planning.models import PlannedModel
from orchestrator.planning.sketched import build_device
from orchestrator.planning.stored import MeasuredHardware, name_shortest
from policies.planning.plan import DefaultLinks, Device, Host, Inventory, Option

T = TypeVar("T")
Allowed = Callable[[Option, str], bool]


@dataclass(frozen=True, slots=True)
class PresentHost:
    """A host that is there. `node`: the address of its Ray node, THIS_NODE for the daemon's own. `hardware`: what it
    has; `seen`: that as each runtime sees it there, None where that is not known; `lacks`: why other runtimes see
    nothing there, or do not run the target. `free_bytes`: what is free of a device (all its memory where it is left
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
    seen: Collection[SeenDevice] | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)

    def list_units(self, kind: MeasuredHardware) -> list[dict[str, str]]:
        """Return those devices of a kind that may be used here, each as its name in every runtime. Those that are alike
        are told apart by their numbers, which all runtimes have in common. What nobody saw is what was measured."""
        named = {name_compute_unit(name) for name in self.devices}
        seen = [(device.adapter, device.device) for device in self.seen or () if device.hardware == kind.hardware]
        measured = [(device.adapter, device.device) for device in kind.devices if kind.hardware in self.hardware]
        units: dict[str, dict[str, str]] = {}
        for runtime, name in sorted(seen or measured):
            units.setdefault(number_unit(name), {})[runtime] = name
        return [
            units[number]
            for number in sorted(units)
            if not named or not named.isdisjoint(map(name_compute_unit, units[number].values()))
        ]


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
    left: Callable[[Device], int] = lambda device: 0,
) -> tuple[Inventory, dict[str, MeasuredHardware]]:
    """Return hosts with all their devices of kinds that were measured, and by profile what stands behind its figures.
    Devices that are alike share a profile, unless one of them alone is `allowed` something.

    `allowed`: whether an option on a runtime's device may be chosen. `left`: how much of a device's memory is for
    something else.
    """
    kinds = _name_profiles(measured)
    devices: list[Device] = []
    inventory: list[Host] = []
    options: dict[str, list[Option]] = {}
    behind: dict[str, MeasuredHardware] = {}
    for host in hosts:
        mine = [(hardware, names) for hardware in measured for names in host.list_units(hardware)]
        cores = host.cores or max((hardware.cores for hardware, _ in mine), default=0)
        inventory.append(Host(host.node, host.zone, cores, host.price_per_hour))
        for hardware, names in mine:
            profile = kinds[hardware.hardware] + (
                f", {host.cores} of its cores" if host.cores and hardware.cores else ""
            )
            device = _build_device(host, hardware, names)
            may = [
                option
                for option in hardware.options(target, drafts, exactness, cores)
                if allowed is None or allowed(option, device.name_for(option.runtime))
            ]
            if options.setdefault(profile, may) != may:
                profile = f"{profile}, {name_shortest(names.values())}"
                options[profile] = may
            behind[profile] = hardware
            memory = max(0, device.memory_bytes - left(device))
            devices.append(replace(device, profile=profile, memory_bytes=memory))
    flat = tuple(replace(option, profile=profile) for profile, some in options.items() for option in some)
    return Inventory(tuple(inventory), tuple(devices), flat, links.between, links.default), behind


def name_present(host: PresentHost, names: Mapping[str, str]) -> str:
    return f"{host.node}/{name_shortest(names.values())}"


def _build_device(host: PresentHost, kind: MeasuredHardware, names: Mapping[str, str]) -> Device:
    """Return a device of a host, whose profile is still to be named, with all the memory that it may have."""
    units = [name_compute_unit(name) for name in names.values()]
    prices, stated, free = _by_unit(host.device_prices), _by_unit(host.stated_bytes), _by_unit(host.free_bytes)
    price = max(prices.get(unit, 0.0) for unit in units)
    bounds = [stated[unit] for unit in units if unit in stated]
    known = [*bounds, *(free[unit] for unit in units if unit in free), kind.hardware.memory_bytes]
    device = build_device(kind, name_present(host, names), host.node, "", known[0], price)
    return replace(device, memory_stated=bool(bounds), names=tuple(names.items()))


def _by_unit(figures: Mapping[str, T]) -> dict[str, T]:
    """Return figures of devices by one name for each, whichever of its names they came by; the last one counts."""
    return {name_compute_unit(name): value for name, value in figures.items()}


def _name_profiles(measured: Sequence[MeasuredHardware]) -> dict[Hardware, str]:
    """Return a name for each kind of hardware. Kinds that are called alike differ in cores, memory or more."""
    names: dict[Hardware, str] = {}
    for hardware in measured:
        name = f"{hardware.hardware.name} {name_without_number(hardware.name)}"
        if name in names.values() and hardware.cores:
            name = f"{name}, {hardware.cores} cores"
        while name in names.values():
            name += "'"
        names[hardware.hardware] = name
    return names
