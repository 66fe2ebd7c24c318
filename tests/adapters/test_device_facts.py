"""What devices tell of themselves, and what happens where they tell nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from adapters.contract import AdapterUnavailable
from adapters.device_facts import DeviceFacts, device_facts
from adapters.device_memory import read_host_memory
from adapters.hardware import runtime_version


class NvmlError(Exception):
    pass


class Nvml:
    """NVML's calls as a device of an older kind answers them: no power, no clock."""

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

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

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "Old Device"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=8 << 30, used=3 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=42)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        raise NvmlError("Not Supported")

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        raise NvmlError("Not Supported")

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 61


def test_the_processor_is_there_on_every_machine():
    facts = device_facts()[0]
    assert facts.name == "CPU"
    assert facts.memory_total_bytes == read_host_memory().total_bytes
    assert 0 < facts.memory_used_bytes < facts.memory_total_bytes
    assert facts.utilisation is not None
    assert 0.0 <= facts.utilisation <= 1.0


def test_what_a_device_does_not_tell_is_none(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert device_facts()[1:] == [DeviceFacts("CUDA:0 Old Device", 8 << 30, 3 << 30, 0.42, None, None, 61.0)]
    assert not nvml.open


def test_a_machine_without_driver_or_library_has_no_such_devices(monkeypatch):
    for library in (Nvml(driver=False), None):
        monkeypatch.setitem(sys.modules, "pynvml", library)
        assert len(device_facts()) == 1


def test_another_build_of_onnx_runtime_is_its_runtime_too(tmp_path, monkeypatch):
    """Devices that onnxruntime-gpu sees are known by its version: nothing says that ONNX Runtime is not installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(AdapterUnavailable, match="onnxruntime is not installed: it is the runtime of onnx_rt"):
        runtime_version("onnx_rt")
    metadata = tmp_path / "onnxruntime_gpu-1.31.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.31.1\n")
    assert runtime_version("onnx_rt") == "onnxruntime-gpu 1.31.1"
