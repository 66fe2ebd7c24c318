"""What devices are doing right now: memory, load, power, clocks and temperature, by psutil and NVML.

Facts that a machine does not tell are None, and a machine without NVIDIA's driver has no NVIDIA devices: neither is an
error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil

from adapters.device_memory import read_host_memory
from adapters.nvml import list_visible, with_nvml


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device at one moment. `utilisation` is 0 to 1, of the last fraction of a second."""

    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    utilisation: float | None = None
    power_w: float | None = None
    clock_mhz: float | None = None
    temperature_c: float | None = None


def device_facts() -> list[DeviceFacts]:
    """Return the facts of the processor and of every NVIDIA device. Takes a tenth of a second."""
    return [_processor(), *_nvidia()]


def _processor() -> DeviceFacts:
    memory = read_host_memory()
    clock = psutil.cpu_freq()
    return DeviceFacts(
        name="CPU",
        memory_total_bytes=memory.total_bytes,
        memory_used_bytes=memory.total_bytes - memory.free_bytes,
        utilisation=psutil.cpu_percent(interval=0.1) / 100.0,
        clock_mhz=float(clock.current) if clock else None,
        temperature_c=read_processor_temperature(),
    )


def read_processor_temperature() -> float | None:
    """Return the hottest of the processor's sensors. Many virtual machines have none, other systems no such call."""
    sensors: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict)()
    temperatures = [
        reading.current for chip in ("k10temp", "coretemp", "cpu_thermal") for reading in sensors.get(chip, ())
    ]
    return float(max(temperatures)) if temperatures else None


def _nvidia() -> list[DeviceFacts]:
    return with_nvml(lambda nvml: [_nvidia_device(nvml, *numbered) for numbered in enumerate(list_visible(nvml))]) or []


def _nvidia_device(nvml: Any, index: int, handle: Any) -> DeviceFacts:
    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:  # this model of device does not tell
            return None

    memory, rates = nvml.nvmlDeviceGetMemoryInfo(handle), ask("nvmlDeviceGetUtilizationRates")
    power_mw = ask("nvmlDeviceGetPowerUsage")
    clock = ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
    temperature = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
    return DeviceFacts(
        name=f"CUDA:{index} {nvml.nvmlDeviceGetName(handle)}",
        memory_total_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        utilisation=None if rates is None else rates.gpu / 100.0,
        power_w=None if power_mw is None else power_mw / 1000.0,
        clock_mhz=None if clock is None else float(clock),
        temperature_c=None if temperature is None else float(temperature),
    )
