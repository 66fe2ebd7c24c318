"""Runtimes that a host lacks, or that do not run the target there: no plan takes them, whatever was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from orchestrator.planning.estimates import DeviceSource
from orchestrator.planning.here import PresentHost, name_present
from orchestrator.planning.stored import MeasuredHardware
from policies.planning.plan import Device, Inventory, Option

Lacks = Mapping[tuple[str, str], str]
"""Why a runtime cannot be used on a device, in a line, by the device's id ("HOST/DEVICE") and the runtime."""


def list_lacking(hosts: Sequence[PresentHost], measured: Collection[MeasuredHardware]) -> dict[tuple[str, str], str]:
    """Return what hosts lack of the runtimes that their devices were `found` to be measured with."""
    return {
        (name_present(host, names), runtime): host.lacks.get(runtime, "it does not see the device")
        for host in hosts
        for hardware in measured
        if host.seen is not None
        for names in host.list_units(hardware)
        for runtime in sorted({seen.adapter for seen in hardware.devices})
        if runtime not in names or runtime in host.lacks
    }


def list_unfit_runtimes(hosts: Sequence[PresentHost]) -> list[str]:
    return [
        f"{runtime} is left out there: {why}"
        for host in hosts
        for runtime, why in host.lacks.items()
        if any(runtime == seen.adapter for seen in host.seen or ())
    ]


def leave_lacking(
    cluster: Inventory, behind: Mapping[str, DeviceSource], lacks: Lacks
) -> tuple[Inventory, dict[str, DeviceSource], list[str]]:
    """Return the cluster without these runtimes on these devices, what stands behind its figures (and stood before),
    and a line for each that a plan could have taken else. Devices that lack the same share a profile, as before."""
    options: dict[str, list[Option]] = {}
    for option in cluster.options:
        options.setdefault(option.profile, []).append(option)
    devices: list[Device] = []
    kept: dict[str, list[Option]] = {}
    sources = dict(behind)
    notes: list[str] = []
    for device in cluster.devices:
        mine = options.get(device.profile, [])
        out = sorted({option.runtime for option in mine if (device.id, option.runtime) in lacks})
        notes += [f"{device.id}: {runtime} is left out there: {lacks[device.id, runtime]}" for runtime in out]
        profile = f"{device.profile}, without {' and '.join(out)}" if out else device.profile
        devices.append(replace(device, profile=profile))
        sources[profile] = behind[device.profile]
        kept[profile] = [replace(option, profile=profile) for option in mine if option.runtime not in out]
    flat = tuple(option for some in kept.values() for option in some)
    return replace(cluster, devices=tuple(devices), options=flat), sources, notes
