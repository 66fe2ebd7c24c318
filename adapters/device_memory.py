"""What memory a device has, and what of it is free now, as whoever drives it says."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from adapters.hardware import name_device_kind
from adapters.nvml import query_nvidia
from device_profiles.profile import DeviceProfile

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_OPENVINO_TOTALS = ("GPU_DEVICE_TOTAL_MEM_SIZE", "NPU_DEVICE_TOTAL_MEM_SIZE")


class DeviceMemory(NamedTuple):
    """In bytes; 0 where it is not known."""

    total_bytes: int
    free_bytes: int


def read_device_memory(device: DeviceProfile) -> DeviceMemory:
    """Return what a device has and what is free of it. Where a driver does not tell, all of it counts as free. A device
    that works in the host's memory has at most what is free there."""
    if name_device_kind(device) == "cpu":
        return read_host_memory()
    if name_device_kind(device) == "cuda":
        memory = read_nvidia_memory(int(device.name.partition(":")[2] or 0))
        if memory is not None:
            return memory
    if device.in_host_memory:
        host = read_host_memory()
        return DeviceMemory(min(device.memory_bytes, host.total_bytes), min(device.memory_bytes, host.free_bytes))
    return DeviceMemory(device.memory_bytes, device.memory_bytes)


def read_nvidia_memory(index: int) -> DeviceMemory | None:
    """Return an NVIDIA device's memory; None where nobody can be asked."""
    memory = query_nvidia(index, lambda nvml, one: nvml.nvmlDeviceGetMemoryInfo(one))
    return None if memory is None else DeviceMemory(int(memory.total), int(memory.free))


def read_host_memory() -> DeviceMemory:
    """Return the host's memory, as far as the control groups of this process let it be used."""
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    with suppress(OSError):
        own = next((line[3:] for line in _OWN_CGROUP.read_text().splitlines() if line.startswith("0::")), "/")
        group = _CGROUPS / own.strip("/")
        for one in (group, *group.parents):
            if one == _CGROUPS.parent:
                break
            limit, used = _read_bytes(one / "memory.max"), _read_bytes(one / "memory.current")
            if limit is not None:
                total, free = min(total, limit), min(free, max(0, limit - (used or 0)))
    return DeviceMemory(total, free)


def read_openvino_memory(core: Any, name: str) -> tuple[int, bool]:
    """Return the memory of one of OpenVINO's devices (0: its plugin does not tell), and whether it is the host's."""
    if name == "CPU":
        return read_host_memory().total_bytes, True
    total = 0
    for key in _OPENVINO_TOTALS:
        with suppress(RuntimeError):  # a plugin that has no such property
            total = total or int(core.get_property(name, key))
    shared = name.startswith("NPU")
    with suppress(RuntimeError):
        shared = shared or "integrated" in str(core.get_property(name, "DEVICE_TYPE")).lower()
    return total, shared


def _read_bytes(path: Path) -> int | None:
    """Return what a file of a control group says; None for no limit, or where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
