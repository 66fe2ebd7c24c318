"""Whose an NVIDIA device's time is, as far as NVML can tell here."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.device_memory import list_nvidia_memory, read_nvidia_memory
from adapters.nvidia_load import read_nvidia_loads

OURS, THEIRS, ELSEWHERE = os.getpid(), os.getppid(), 2**22 + 7


class NvmlError(Exception):
    pass


class Nvml:
    """NVML's calls as a device of an older kind answers them: no power."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, driver: bool = True) -> None:
        self.driver, self.open = driver, False

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NvmlError("Driver Not Loaded")
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=8 << 30, used=3 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=42)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        raise NvmlError("Not Supported")

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 61


class Busy(Nvml):
    """A device that processes use: `shares` by their numbers, in percent."""

    def __init__(self, shares: dict[int, int], *, tells: bool = True) -> None:
        super().__init__()
        self.shares, self.tells = shares, tells

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=90)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 30) for pid in self.shares]

    def nvmlDeviceGetProcessUtilization(self, handle: int, since_us: int) -> list[SimpleNamespace]:
        if not self.tells:
            raise NvmlError("Not Supported")
        return [SimpleNamespace(pid=pid, smUtil=share) for pid, share in self.shares.items() for _ in range(2)]

    def nvmlDeviceGetTemperatureThreshold(self, handle: int, kind: int) -> int:
        return 92

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 250_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000


def read(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> Any:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    loads = read_nvidia_loads({OURS})
    assert not nvml.open
    return loads["CUDA:0"]


def test_what_our_processes_take_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    load = read(monkeypatch, Busy({OURS: 60, THEIRS: 30}))
    assert (load.utilisation, load.others) == (0.9, pytest.approx(0.3))
    assert (load.memory_total_bytes, load.memory_free_bytes, load.memory_ours_bytes) == (8 << 30, 5 << 30, 1 << 30)
    assert (load.temperature_c, load.temperature_limit_c) == (61.0, 92)
    assert (load.power_w, load.power_limit_w) == (250.0, 700.0)


def test_where_none_of_ours_is_there_all_is_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, Busy({THEIRS: 90}, tells=False)).others == 0.9


@pytest.mark.parametrize("nvml", [Busy({}), Busy({ELSEWHERE: 90}), Busy({OURS: 90}, tells=False)])
def test_where_nobody_can_tell_whose_it_is_that_is_not_known(monkeypatch: pytest.MonkeyPatch, nvml: Busy) -> None:
    assert read(monkeypatch, nvml).others is None


def test_an_old_device_and_an_old_library_tell_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    load = read(monkeypatch, Nvml())
    assert (load.utilisation, load.others, load.power_limit_w, load.temperature_limit_c) == (0.42, None, None, None)


@pytest.mark.parametrize("library", [Nvml(driver=False), None])
def test_a_machine_without_driver_or_library_has_no_such_devices(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert read_nvidia_loads({OURS}) == {}


class Several(Nvml):
    """Three devices of unlike size, as NVML numbers them."""

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'abc'[handle]}0000000"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=handle + 1, used=0, free=handle + 1)


@pytest.mark.parametrize(
    ("shown", "sizes"),
    [
        (None, [1, 2, 3]),
        ("2,0", [3, 1]),
        (" 1", [2]),
        ("GPU-c,GPU-a0", [3, 1]),
        ("1,7,0", [2]),
        ("-1", []),
        ("", []),
    ],
)
def test_devices_are_numbered_as_cuda_shows_them_to_this_process(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, sizes: list[int]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Several())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [memory.total_bytes for memory in list_nvidia_memory()] == sizes
    loads = read_nvidia_loads({OURS})
    assert [loads[f"CUDA:{index}"].memory_total_bytes for index in range(len(loads))] == sizes
    single = [read_nvidia_memory(index) for index in range(4)]
    assert [memory.total_bytes if memory else None for memory in single] == [*sizes, *[None] * (4 - len(sizes))]
