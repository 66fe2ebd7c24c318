"""What an agent says of its host: values that cross the process boundary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from device_profiles.measured import Hardware, MeasuredDevice, MeasuredModel
from orchestrator.machine.devices import SeenDevice
from orchestrator.protocol.measuring import ProfileJob


@dataclass(frozen=True, slots=True)
class MissingProfile:
    """A piece of work that has no stored result on this host, and what that will be known by: see profiling.work."""

    job: ProfileJob
    fingerprint: str
    threads: int
    digest: str


@dataclass(frozen=True, slots=True)
class HostInventory:
    """A host. `address`: of its Ray node. `version`: of Outrider there, `python` of its interpreter. `cores`: those
    that workers may run on. `libraries`: versions of what decides bits there. `lacks`: why a runtime cannot be used
    there, or does not run the target, by its name; `failed`: why models cannot. `devices_measured` and
    `models_measured`: its stored profiles; `missing`: what a plan would need beside."""

    address: str
    hostname: str
    version: str
    python: str
    cores: tuple[int, ...]
    devices: tuple[SeenDevice, ...]
    libraries: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    devices_measured: tuple[MeasuredDevice, ...] = ()
    models_measured: tuple[MeasuredModel, ...] = ()
    missing: tuple[MissingProfile, ...] = ()

    @property
    def hardware(self) -> frozenset[Hardware]:
        """What it has, each device once."""
        return frozenset(device.hardware for device in self.devices)

    @property
    def problems(self) -> list[str]:
        """What cannot be used there, in a line each."""
        return [*(f"{runtime}: {why}" for runtime, why in self.lacks.items()), *self.failed]


def describe_skew(host: HostInventory, own: HostInventory) -> str:
    """Return why no worker of ours can run on a host, "" where it can: another version of Outrider speaks another
    protocol."""
    if host.version != own.version:
        return f"it has Outrider {host.version}, and the daemon {own.version}: install the same on both"
    if host.python.split(".")[:2] != own.python.split(".")[:2]:
        return f"it has Python {host.python}, and the daemon {own.python}: Ray needs the same minor version"
    return ""


def list_differences(host: HostInventory, own: HostInventory) -> list[str]:
    """Return what differs in a host's libraries and runtimes from the daemon's own: nothing is wrong, but bits and
    speed may differ by it. A library that only one of them has computes nothing for the other's streams."""
    ours, theirs = _list_versions(own), _list_versions(host)
    return [
        f"{name}: {version} there, {ours[name]} here"
        for name, version in sorted(theirs.items())
        if name in ours and ours[name] != version
    ]


def _list_versions(host: HostInventory) -> dict[str, str]:
    """Return the versions of libraries, and those of runtimes that are none of these libraries alone."""
    runtimes = {device.adapter: device.runtime_version for device in host.devices}
    known = {f"{name} {version}" for name, version in host.libraries.items()} | set(host.libraries.values())
    return {**host.libraries, **{name: version for name, version in runtimes.items() if version not in known}}
