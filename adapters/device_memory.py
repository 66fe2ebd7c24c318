"""What memory a device has, and what of it is free now, as whoever drives it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import psutil

from adapters.control_groups import PROC, list_memory_bounds
from adapters.hardware import name_device_kind
from adapters.nvml import query_each, query_nvidia
from device_profiles.device_names import CPU_KIND, CUDA_KIND, find_index, is_processor
from device_profiles.profile import DeviceProfile


class DeviceMemory(NamedTuple):
    """In bytes. A total of 0 is not known, and then nor is what is free."""

    total_bytes: int
    free_bytes: int


class HostMemory(NamedTuple):
    """In bytes. `limit_file`: the control group's file that allows this total, None where it is the whole machine's."""

    total_bytes: int
    free_bytes: int
    limit_file: Path | None = None


def read_device_memory(device: DeviceProfile) -> DeviceMemory:
    """Return what a device has and what is free of it. Where nobody tells, all of it counts as free. A device that
    works in the host's memory has at most what is free there."""
    if name_device_kind(device) == CPU_KIND:
        return DeviceMemory(*read_host_memory()[:2])
    if name_device_kind(device) == CUDA_KIND:
        memory = read_nvidia_memory(find_index(device.name) or 0)
        if memory is not None:
            return memory
    total = device.memory_bytes
    free = total if device.free_bytes is None else device.free_bytes
    if device.in_host_memory:
        host = read_host_memory()
        return DeviceMemory(min(total, host.total_bytes), min(free, host.free_bytes))
    return DeviceMemory(total, free)


def read_nvidia_memory(index: int) -> DeviceMemory | None:
    """Return an NVIDIA device's memory; None where nobody can be asked."""
    memory = query_nvidia(index, lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle))
    return None if memory is None else DeviceMemory(int(memory.total), int(memory.free))


def list_nvidia_memory() -> list[DeviceMemory]:
    """Return the memory of every NVIDIA device that answers; none where nobody can be asked."""

    def ask(nvml: Any, handle: Any) -> DeviceMemory:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceMemory(int(memory.total), int(memory.free))

    return [answer for answer in query_each(ask).values() if isinstance(answer, DeviceMemory)]


def read_host_memory(proc: Path = PROC) -> HostMemory:
    """Return the host's memory, as far as the control groups of this process let it be used."""
    memory = psutil.virtual_memory()
    total, free, limit_file = int(memory.total), int(memory.available), None
    for bound in list_memory_bounds(proc):
        if bound.limit_bytes < total:
            total, limit_file = bound.limit_bytes, bound.file
        free = min(free, bound.free_bytes)
    return HostMemory(total, free, limit_file)


def read_openvino_memory(core: Any, name: str) -> int:
    """Return how much of the host's memory one of OpenVINO's devices has, a processor or an NPU; 0: its plugin does not
    tell."""
    if is_processor(name):
        return read_host_memory().total_bytes
    try:
        return int(core.get_property(name, "NPU_DEVICE_TOTAL_MEM_SIZE"))
    except RuntimeError:  # a plugin that has no such property
        return 0
