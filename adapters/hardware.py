"""What a device is, beyond what its runtime says: instruction sets, cores, NUMA nodes, driver; and a runtime's version.

Facts that a machine does not tell are empty or 0: no error.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from adapters.builds import LIBRARIES, describe_lacking, find_build
from adapters.contract import AdapterUnavailable
from adapters.cpuinfo import list_instruction_sets, read_cpuinfo
from adapters.distributions import distribution_version
from adapters.names import OPENVINO_LLAMA, OWN_ADAPTERS
from adapters.nvml import query_nvidia
from device_profiles.device_names import CPU_KIND, CUDA_KIND, find_index, split_device
from device_profiles.measured import Hardware
from device_profiles.profile import DeviceProfile
from device_profiles.units import KIB, MIB

_WHOLE = 256 * MIB
"""What a machine says of its memory differs a little from start to start."""
_NODES = Path("/sys/devices/system/node")
_CORES = Path("/sys/devices/system/cpu")
_PHYSICAL = ("physical_package_id", "core_id")


def runtime_version(adapter: str) -> str:
    """Return the version of an adapter's runtime; of the simulated one, which has none, ours. Of another
    distribution's adapter, that distribution's. Raises AdapterUnavailable."""
    if adapter not in OWN_ADAPTERS:
        return distribution_version(adapter)
    if adapter in ("llama_cpp", OPENVINO_LLAMA):
        from adapters.libllama import find_library

        decoder = find_library().version
        return decoder if adapter == "llama_cpp" else f"{runtime_version('openvino_rt')}, {decoder}"
    build = find_build(LIBRARIES.get(adapter, "outrider"))
    if build is None:
        raise AdapterUnavailable(describe_lacking(adapter))
    return " ".join(build)


def hardware(profile: DeviceProfile) -> Hardware:
    kind = name_device_kind(profile)
    if kind == CPU_KIND:
        return processor()
    if kind == CUDA_KIND:
        nvidia = _nvidia(find_index(profile.name) or 0)
        return nvidia or Hardware(kind, profile.full_name, profile.memory_bytes)
    return Hardware(kind, profile.full_name, profile.memory_bytes)


def name_device_kind(profile: DeviceProfile) -> str:
    """Return a device's kind, as in "cpu", whatever its runtime calls it."""
    return split_device(profile.name)[0] if profile.adapter != "simulated" else "simulated"


def processor() -> Hardware:
    facts = read_cpuinfo()
    name = facts.get("model name") or platform.processor() or platform.machine()
    family = "/".join(facts[key] for key in ("cpu family", "model", "stepping") if key in facts)
    return Hardware(
        kind=CPU_KIND,
        name=f"{name} ({family})" if family else name,  # a hypervisor may hide the name, and leaves these
        memory_bytes=psutil.virtual_memory().total // _WHOLE * _WHOLE,
        numa_nodes=max(1, len(list(_NODES.glob("node[0-9]*")))),
        physical_cores=cores(),
        isa=list_instruction_sets(),
    )


def cores() -> int:
    """Return how many physical cores this process may use."""
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else 0
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return min(physical, allowed) if allowed else physical


def read_cache_bytes() -> int:
    """Return the size of the processor's largest cache, 0 where it does not tell."""
    sizes = [0]
    for path in _CORES.glob("cpu[0-9]*/cache/index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text(encoding="ascii").strip().removesuffix("K")) * KIB)
    return max(sizes)


def count_logical_cores() -> int:
    """Return how many logical cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def list_core_groups() -> list[list[int]]:
    """Return the logical cores that this process may use, those of one physical core together. Where the system does
    not tell which these are, each is one of its own."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    groups: dict[str, list[int]] = {}
    for core in allowed:
        place = str(core)
        with suppress(OSError):
            topology = _CORES / f"cpu{core}" / "topology"
            place = "/".join((topology / name).read_text(encoding="ascii").strip() for name in _PHYSICAL)
        groups.setdefault(place, []).append(core)
    return list(groups.values())


def _nvidia(index: int) -> Hardware | None:
    """Return an NVIDIA device by NVML; None where there is no driver, or nothing to ask it with."""

    def describe(nvml: Any, handle: Any) -> Hardware:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Hardware(
            kind=CUDA_KIND,
            name=str(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            driver=str(nvml.nvmlSystemGetDriverVersion()),
            isa=(f"sm_{major}{minor}",),
        )

    return query_nvidia(index, describe)
