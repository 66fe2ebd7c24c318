"""What NVIDIA devices do, by NVML: who takes their time, and how near they are to their limits.

Time is told process by process. Where processes are numbered otherwise here, as in a container, nobody can tell whose
time it is: then `others` is None.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from statistics import fmean
from typing import Any, Final

import psutil

from adapters.nvml import query_each
from device_profiles.device_load import DeviceLoad
from device_profiles.units import US_PER_S

# Two looks of the watch, one a second, so that no sample is missed.
_WINDOW_US: Final = 2_000_000
_MW_PER_W: Final = 1000.0  # a unit
_UNCORRECTED: Final = (("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1), ("NVML_VOLATILE_ECC", 0))
_SLOWDOWNS: Final = {0x08: "hardware", 0x20: "temperature", 0x40: "temperature", 0x80: "power brake"}
"""Reasons for lower clocks by the bits of nvmlClocksEventReasons, of nvml.h. A power cap is none of them: it has the
limits of power."""


def read_nvidia_loads(own: Collection[int]) -> dict[str, DeviceLoad]:
    """Return what each device does, as runtimes name it ("CUDA:0"). `own`: the numbers of our processes."""
    loads: dict[str, DeviceLoad] = {}
    for index, answer in query_each(lambda nvml, handle: _read_device(nvml, handle, own)).items():
        if isinstance(answer, DeviceLoad):
            loads[f"CUDA:{index}"] = answer
        elif answer.fault:
            loads[f"CUDA:{index}"] = DeviceLoad(fault=answer.fault)
    return loads


def _read_device(nvml: Any, handle: Any, own: Collection[int]) -> DeviceLoad:
    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):  # this device, or this version, does not tell
            return None

    memory, rates = nvml.nvmlDeviceGetMemoryInfo(handle), ask("nvmlDeviceGetUtilizationRates")
    running = ask("nvmlDeviceGetComputeRunningProcesses") or []
    utilisation = None if rates is None else rates.gpu / 100.0
    samples = ask("nvmlDeviceGetProcessUtilization", int(time.time() * US_PER_S) - _WINDOW_US)
    slowdown = getattr(nvml, "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN", 1)
    temperature_c = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
    errors = ask("nvmlDeviceGetTotalEccErrors", *(getattr(nvml, name, known) for name, known in _UNCORRECTED))
    power_mw, power_limit_mw = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    return DeviceLoad(
        utilisation=utilisation,
        others=_find_others(utilisation, [process.pid for process in running], samples, own),
        memory_total_bytes=int(memory.total),
        memory_free_bytes=int(memory.total) - int(memory.used),
        memory_ours_bytes=sum(int(process.usedGpuMemory or 0) for process in running if process.pid in own),
        temperature_c=None if temperature_c is None else float(temperature_c),
        temperature_limit_c=ask("nvmlDeviceGetTemperatureThreshold", slowdown) or None,
        power_w=None if power_mw is None else power_mw / _MW_PER_W,
        power_limit_w=power_limit_mw / _MW_PER_W if power_limit_mw else None,
        slowed_by=_describe_slowdown(
            ask("nvmlDeviceGetCurrentClocksEventReasons") or ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        ),
        memory_errors=None if errors is None else int(errors),
    )


def _describe_slowdown(reasons: int) -> str:
    """Return why a device lowers its clocks, by NVML's bits; "" where it does not."""
    return ", ".join(dict.fromkeys(name for bit, name in _SLOWDOWNS.items() if reasons & bit))


def _find_others(
    utilisation: float | None, running: Collection[int], samples: Collection[Any] | None, own: Collection[int]
) -> float | None:
    """Return the share of a device's time that processes take which are not ours; None where nobody can tell."""
    if utilisation is None:
        return None
    if utilisation == 0.0 or (running and not set(running) & set(own) and any(map(psutil.pid_exists, running))):
        return utilisation
    if not running or samples is None or not any(map(psutil.pid_exists, running)):
        return None
    shares: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        shares[sample.pid].append(sample.smUtil / 100.0)
    ours = sum(fmean(loads) for pid, loads in shares.items() if pid in own)
    return max(0.0, utilisation - ours)
