"""A cluster that is not there, as the planner takes it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from device_profiles.datasheet import Datasheet
from device_profiles.link import LinkProfile
from orchestrator.config.sketch import Sketch, SketchedDevice, SketchedHost, SketchedLink, host_names
from orchestrator.errors import ConfigError
from orchestrator.planning.estimates import datasheet_options, matmul_rates
from orchestrator.planning.models import PlannedModel
from policies.plan import Cluster, DefaultLinks, Device, Host, Option, Role

_BITS_PER_BYTE = 8
_SKETCHED = "assumed"


@dataclass(frozen=True, slots=True)
class _Parts:
    hosts: list[Host]
    devices: list[Device]
    options: dict[str, tuple[Option, ...]]


def sketched_cluster(
    sketch: Sketch, library: Mapping[str, Datasheet], target: PlannedModel, drafts: Sequence[PlannedModel]
) -> Cluster:
    """Return hosts, devices, options and links of a sketch.

    Raises ConfigError for a device that the library does not have.
    """
    parts = _Parts([], [], {})
    for index, entry in enumerate(sketch.hosts):
        sheets = [_known(one, library, f"hosts[{index}].devices[{at}]") for at, one in enumerate(entry.devices)]
        processors = sum(one.count for one, sheet in zip(entry.devices, sheets, strict=True) if sheet.memory_gb is None)
        cores = entry.cores or round(
            sum(
                one.count * sheet.cores.value
                for one, sheet in zip(entry.devices, sheets, strict=True)
                if sheet.cores is not None
            )
        )
        for one, sheet in zip(entry.devices, sheets, strict=True):
            profile = f"{sheet.name}, {cores} cores" if sheet.kind == "cpu" else sheet.name
            if profile not in parts.options:
                parts.options[profile] = tuple(_options(sheet, target, drafts, profile, cores))
            for name in host_names(entry):
                parts.devices.extend(_devices(entry, name, one, sheet, profile, processors))
        parts.hosts.extend(Host(name, entry.zone, cores) for name in host_names(entry))
    links = tuple(replace(_link(one), left=one.hosts[0], right=one.hosts[1]) for one in sketch.links.between)
    options = tuple(option for found in parts.options.values() for option in found)
    return Cluster(tuple(parts.hosts), tuple(parts.devices), options, links, _defaults(sketch))


def _known(one: SketchedDevice, library: Mapping[str, Datasheet], place: str) -> Datasheet:
    if one.device in library:
        return library[one.device]
    close = difflib.get_close_matches(one.device, library, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(library)}"
    raise ConfigError(f"{place}.device: the library has no {one.device!r}; {hint}")


def _options(
    sheet: Datasheet, target: PlannedModel, drafts: Sequence[PlannedModel], profile: str, cores: int
) -> list[Option]:
    found = list(datasheet_options(sheet, target, Role.TARGET, profile=profile, cores=cores))
    for draft in drafts:
        found += datasheet_options(sheet, draft, Role.DRAFT, profile=profile, cores=cores)
    return found


def _devices(
    entry: SketchedHost, host: str, one: SketchedDevice, sheet: Datasheet, profile: str, processors: int
) -> list[Device]:
    """Return a host's devices of one kind. What works in main memory shares it in equal parts."""
    own = sheet.memory_gb.value * 1e9 if sheet.memory_gb else int(entry.memory) / max(1, processors)
    memory = int(one.memory if one.memory is not None else own)
    ids = [f"{host}/{sheet.name}"] if one.count == 1 else [f"{host}/{sheet.name}-{n}" for n in range(one.count)]
    return [
        Device(
            id=name,
            host=host,
            kind=sheet.kind,
            profile=profile,
            memory_bytes=memory,
            matmul=matmul_rates(sheet),
            bandwidth_bytes_per_s=sheet.bandwidth_bytes_per_s,
            power_w=sheet.power_w.value if sheet.power_w else 0.0,
        )
        for name in ids
    ]


def _link(one: SketchedLink) -> LinkProfile:
    return LinkProfile("", "", one.rtt_ms, one.gbit_per_s * 1e9 / _BITS_PER_BYTE, _SKETCHED)


def _defaults(sketch: Sketch) -> DefaultLinks:
    links, usual = sketch.links, DefaultLinks()
    return DefaultLinks(
        same_host=_link(links.same_host) if links.same_host else usual.same_host,
        same_zone=_link(links.same_zone) if links.same_zone else usual.same_zone,
        other_zone=_link(links.other_zone) if links.other_zone else usual.other_zone,
    )
