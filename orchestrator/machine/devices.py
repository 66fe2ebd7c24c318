"""A runtime's devices: by name, by what marks them, and how many threads the runtime takes there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from adapters import registry
from adapters.contract import AdapterUnavailable, Unsupported
from adapters.device_memory import read_device_memory
from adapters.hardware import cores, hardware, name_device_kind, runtime_version
from device_profiles.device_names import CPU_KIND, split_device
from device_profiles.measured import Hardware, fingerprint
from device_profiles.profile import DeviceProfile, find_listed_device


def effective_device(adapter: str, device: str) -> str:
    """Return what a runtime calls a device: whatever the simulated one is given, it has SIM, and those named so."""
    return "SIM" if adapter == "simulated" and split_device(device)[0] != "sim" else device


def device_name(adapter: str, device: str) -> str:
    """Return a device's full name, as its runtime tells it."""
    profile = find_listed_device(registry.list_devices(adapter), device)
    return profile.full_name if profile is not None else device


def find_device(adapter: str, device: str) -> DeviceProfile:
    """Return a runtime's device by its name. Raises AdapterUnavailable, Unsupported."""
    devices = registry.list_devices(adapter)
    profile = find_listed_device(devices, effective_device(adapter, device))
    if profile is None:
        names = ", ".join(known.name for known in devices)
        raise Unsupported(f"{adapter} sees no device {device!r} here; there is {names}")
    return profile


@dataclass(frozen=True, slots=True)
class SeenDevice:
    """A device of a host as a runtime sees it there, under that runtime's name for it. `fingerprint`: of its hardware,
    driver and runtime. Memory in bytes, 0 where it is not known."""

    adapter: str
    device: str
    hardware: Hardware
    runtime_version: str = ""
    fingerprint: str = ""
    memory_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LocalDevices:
    """What runtimes see of this machine. `lacks`: why other runtimes see nothing."""

    seen: tuple[SeenDevice, ...]
    lacks: dict[str, str]


def list_devices_here(runtimes: Sequence[str] = ()) -> LocalDevices:
    """Return the devices of this machine as these runtimes see them, all where none are named."""
    seen: list[SeenDevice] = []
    lacks: dict[str, str] = {}
    for name in runtimes or registry.names():
        try:
            seen += list(map(_see_device, registry.list_devices(name)))
        except AdapterUnavailable as error:
            lacks[name] = str(error)
    return LocalDevices(tuple(seen), lacks)


def _see_device(device: DeviceProfile) -> SeenDevice:
    facts, version, memory = hardware(device), runtime_version(device.adapter), read_device_memory(device)
    mark = fingerprint(facts, version)
    return SeenDevice(device.adapter, device.name, facts, version, mark, memory.total_bytes, memory.free_bytes)


def list_free_bytes(seen: Iterable[SeenDevice]) -> dict[str, int]:
    """Return what is free of each device, by every name that a runtime has for it; left out where it is not known."""
    return {device.device: device.free_bytes for device in seen if device.memory_bytes}


def mark_of(device: DeviceProfile) -> str:
    return fingerprint(hardware(device), runtime_version(device.adapter))


def class_mark_of(device: DeviceProfile) -> str:
    """Return the fingerprint that numerical classes are kept by: the same for workers that may use other cores of one
    processor, so that they find each other's class."""
    return fingerprint(replace(hardware(device), physical_cores=0), runtime_version(device.adapter))


def join_marks(marks: Sequence[str]) -> str:
    """Return one fingerprint for all of these: the only one's own where it is one."""
    if len(marks) == 1:
        return marks[0]
    return hashlib.blake2b("+".join(marks).encode(), digest_size=6).hexdigest()


def threads_on(device: DeviceProfile, threads: int) -> int:
    """Return how many threads a runtime takes: all physical cores where none are named, 0 off the processor."""
    return (threads or cores()) if name_device_kind(device) == CPU_KIND else 0
