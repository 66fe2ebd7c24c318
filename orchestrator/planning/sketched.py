"""A cluster that is not there, as the planner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from device_profiles.link import LinkProfile
from device_profiles.profile import Exactness
from orchestrator.config.hosts import ClusterHost, ClusterLink, ClusterLinks, HostDevice, host_names
from orchestrator.config.sketch import Sketch
from orchestrator.config.wording import find_near
from orchestrator.errors import ConfigError
from orchestrator.planning.estimates import DeviceSource
from orchestrator.planning.models import PlannedModel
from policies.planning.plan import DefaultLinks, Device, Host, Inventory, Option

_BITS_PER_BYTE = 8  # a unit
_SKETCHED = "assumed"


def build_sketched_cluster(
    sketch: Sketch,
    sources: Mapping[str, DeviceSource],
    target: PlannedModel,
    drafts: Sequence[PlannedModel],
    exactness: Exactness,
) -> tuple[Inventory, dict[str, DeviceSource]]:
    """Return hosts, devices, options and links of a sketch, and by profile what stands behind its figures.

    `sources`: what its devices may be, by name. Raises ConfigError for one that is not among them.
    """
    hosts: list[Host] = []
    devices: list[Device] = []
    options: dict[str, list[Option]] = {}
    behind: dict[str, DeviceSource] = {}
    for index, entry in enumerate(sketch.hosts):
        known = [
            (device, _find_source(device, sources, f"hosts[{index}].devices[{at}]"))
            for at, device in enumerate(entry.devices)
        ]
        sharers = sum(device.count for device, source in known if not source.memory_bytes)
        cores = entry.cores or sum(device.count * source.cores for device, source in known)
        for device, source in known:
            profile = f"{device.device}, {cores} cores" if source.kind == "cpu" else device.device
            if profile not in options:
                known_options = source.options(target, drafts, exactness, cores)
                options[profile] = [replace(option, profile=profile) for option in known_options]
                behind[profile] = source
            for name in host_names(entry):
                devices += _devices(entry, name, device, source, profile, sharers)
        hosts += [Host(name, entry.zone, cores, entry.price_per_hour) for name in host_names(entry)]
    links = build_stated_links(sketch.links)
    flat = tuple(option for some in options.values() for option in some)
    return Inventory(tuple(hosts), tuple(devices), flat, links, build_default_links(sketch.links)), behind


def _find_source(device: HostDevice, sources: Mapping[str, DeviceSource], place: str) -> DeviceSource:
    by_name = {name.casefold(): name for name in sources}
    wanted = device.device.casefold()
    if wanted in by_name:
        return sources[by_name[wanted]]
    near = find_near(wanted, by_name) or [name for name in by_name if wanted in name]
    meant = " or ".join(repr(by_name[name]) for name in near)
    hint = f"did you mean {meant}?" if meant else f"there are {', '.join(sources)}"
    raise ConfigError(f"{place}.device: neither the library nor a stored profile has {device.device!r}; {hint}")


def _devices(
    entry: ClusterHost, host: str, device: HostDevice, source: DeviceSource, profile: str, sharers: int
) -> list[Device]:
    """Return a host's devices of one kind. What works in main memory shares it in equal parts."""
    own = source.memory_bytes or int(entry.memory or 0) // max(1, sharers)
    memory = int(device.memory if device.memory is not None else own)
    ids = (
        [f"{host}/{device.device}"]
        if device.count == 1
        else [f"{host}/{device.device}-{n}" for n in range(device.count)]
    )
    return [build_device(source, name, host, profile, memory, device.price_per_hour) for name in ids]


def build_device(
    source: DeviceSource, name: str, host: str, profile: str, memory_bytes: int, price_per_hour: float = 0.0
) -> Device:
    """Return a device as the planner takes it. `price_per_hour`: beside its host."""
    return Device(
        id=name,
        host=host,
        kind=source.kind,
        profile=profile,
        memory_bytes=memory_bytes,
        rates=source.rates,
        power_w=source.power_w,
        price_per_hour=price_per_hour,
    )


def build_stated_links(links: ClusterLinks) -> tuple[LinkProfile, ...]:
    return tuple(replace(_link(link), left=link.hosts[0], right=link.hosts[1]) for link in links.between)


def _link(link: ClusterLink) -> LinkProfile:
    return LinkProfile("", "", link.rtt_ms, link.gbit_per_s * 1e9 / _BITS_PER_BYTE, _SKETCHED)


def build_default_links(links: ClusterLinks) -> DefaultLinks:
    """Return what lies between hosts where nothing is measured or stated for the two."""
    usual = DefaultLinks()
    return DefaultLinks(
        same_host=_link(links.same_host) if links.same_host else usual.same_host,
        same_zone=_link(links.same_zone) if links.same_zone else usual.same_zone,
        other_zone=_link(links.other_zone) if links.other_zone else usual.other_zone,
    )
