"""The energy that a device has taken: NVML for NVIDIA's, RAPL (by the kernel's powercap files) for processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.nvml import SilentDevice, list_visible

POWERCAP = Path("/sys/class/powercap")
_UJ_PER_J = 1e6  # units of the two sources
_MJ_PER_J = 1e3  # as above


@dataclass(frozen=True, slots=True)
class EnergyMeter:
    """`joules` counts up from an unknown start, None where nothing can be read; then `reason` says why."""

    name: str
    joules: Callable[[], float | None]
    reason: str = ""


def energy_meter(kind: str, index: int = 0, powercap: Path = POWERCAP) -> EnergyMeter:
    if kind == "cpu":
        return _rapl(powercap)
    if kind == "cuda":
        return _nvml(index)
    return _none(f"nothing here tells the energy of a device of kind {kind}")


def _none(reason: str) -> EnergyMeter:
    return EnergyMeter("", lambda: None, reason)


def _rapl(powercap: Path) -> EnergyMeter:
    packages = sorted(powercap.glob("intel-rapl:[0-9]*"))  # AMD's too; "intel-rapl:0:1" is a part of "intel-rapl:0"
    files = [path / "energy_uj" for path in packages if path.name.count(":") == 1]
    if not files:
        return _none("the processor's energy counters (RAPL) are not there, as on most virtual machines")
    try:
        for path in files:
            path.read_text(encoding="ascii")
    except OSError as error:
        return _none(f"{files[0]} cannot be read ({error.strerror}); let this user read it to measure energy")
    return EnergyMeter("RAPL", _Counters(files).joules)


class _Counters:
    """RAPL's counters, which begin again from 0 when they are full: after an hour or so at full power."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._last = [self._read(path) for path in files]
        self._total = 0.0

    def joules(self) -> float | None:
        for index, path in enumerate(self._files):
            now = self._read(path)
            step = now - self._last[index]
            if step < 0:
                step += self._read(path.with_name("max_energy_range_uj"))
            self._total, self._last[index] = self._total + step, now
        return self._total / _UJ_PER_J

    @staticmethod
    def _read(path: Path) -> float:
        return float(path.read_text(encoding="ascii"))


def _nvml(index: int) -> EnergyMeter:
    try:
        import pynvml
    except ImportError:
        return _none("NVML is not installed: outrider extras install torch")
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        handle = list_visible(nvml)[index]
        if isinstance(handle, SilentDevice):
            return _none(f"NVML tells no energy of device {index}: {handle.fault or 'it does not answer'}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (nvml.NVMLError, IndexError) as error:
        return _none(f"NVML tells no energy of device {index}: {error}")
    return EnergyMeter("NVML", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / _MJ_PER_J)
