"""A machine with NVIDIA devices that are not there: a module in place of NVML, and a runtime over the simulated one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device_profiles.measured import Hardware
from tests.support.daemon import configuration
from tests.support.foreign_adapter import write_distribution
from tests.support.profiles import store_simulated_profiles

GIB = 1 << 30
_DEVICES = "devices.json"
_NVML = '''
"""NVML's calls over devices.json, in which whoever tests says what becomes of a device."""

import json
from pathlib import Path
from types import SimpleNamespace

NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__({3: "Not Supported", 15: "GPU is lost"}[value])
        self.value = value


def nvmlInit():
    pass


nvmlShutdown = nvmlInit


def _devices():
    return json.loads(Path(__file__).with_name("devices.json").read_text())


def _ask(handle, name):
    device = _devices()[handle]
    if device["lost"]:
        raise NVMLError(15)
    return device[name]


def nvmlSystemGetDriverVersion():
    return "1.0"


def nvmlDeviceGetCount():
    return len(_devices())


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetName(handle):
    return _devices()[handle]["name"]


def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle}"


def nvmlDeviceGetCudaComputeCapability(handle):
    return 9, 0


def nvmlDeviceGetMemoryInfo(handle):
    used = _ask(handle, "used")
    return SimpleNamespace(total=8 << 30, used=used, free=(8 << 30) - used)


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=_ask(handle, "busy"))


def nvmlDeviceGetComputeRunningProcesses(handle):
    return []


def nvmlDeviceGetProcessUtilization(handle, since_us):
    return []


def nvmlDeviceGetTemperature(handle, kind):
    return _ask(handle, "temperature_c")


def nvmlDeviceGetTemperatureThreshold(handle, kind):
    return 90


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    return _ask(handle, "slowdowns")


def nvmlDeviceGetTotalEccErrors(handle, kind, counter):
    assert (kind, counter) == (1, 0)
    return _ask(handle, "memory_errors")


def _not_supported(*arguments):
    raise NVMLError(3)


nvmlDeviceGetPowerUsage = nvmlDeviceGetEnforcedPowerLimit = nvmlDeviceGetClockInfo = _not_supported
nvmlDeviceGetTotalEnergyConsumption = _not_supported
'''
_RUNTIME = '''
"""CUDA devices that are simulated ones. Of one that is lost no forward comes back, and memory is what NVML says: where
others have all of it, a forward finds no room for what it makes. Lower clocks take ten times as long."""

import os
import time
from dataclasses import replace

import pynvml
from adapters.contract import DeviceLost, OutOfMemory
from adapters.device_memory import read_nvidia_memory
from adapters.simulated.adapter import DEVICES_VARIABLE, SimulatedAdapter

os.environ[DEVICES_VARIABLE] = "2"
FORWARD_BYTES = 64 << 20


class Model:
    def __init__(self, model, device, index):
        self._model, self._index = model, index
        self.capabilities = replace(model.capabilities, device=device)

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, batch):
        device = pynvml._devices()[self._index]
        if device["lost"]:
            raise DeviceLost("CUDA error: unspecified launch failure")
        if device["used"] > (8 << 30) - FORWARD_BYTES:
            raise OutOfMemory("CUDA out of memory")
        began_s = time.perf_counter()
        made = self._model.forward(batch)
        if device["slowdowns"]:
            time.sleep(9 * (time.perf_counter() - began_s))
        return made


class Adapter:
    name = "fake_cuda"

    def __init__(self):
        self._simulated = SimulatedAdapter()

    def devices(self):
        names = [device["name"] for device in pynvml._devices()]
        return [
            replace(device, adapter=self.name, name=f"CUDA:{index}", kind="cuda", full_name=names[index])
            for index, device in enumerate(self._simulated.devices())
        ]

    def classes(self, options):
        return self._simulated.classes(options)

    def recipe(self, weights=None):
        return self._simulated.recipe(weights)

    def prepare(self, source, target, progress, weights=None):
        self._simulated.prepare(source, target, progress, weights)

    def load(self, prepared, options, progress):
        index = int(options.device.partition(":")[2])
        memory = read_nvidia_memory(index)
        if memory is None:
            raise DeviceLost(f"{options.device} does not answer")
        if memory.free_bytes < options.kv_cache_bytes:
            raise OutOfMemory(f"{options.device} has {memory.free_bytes} bytes free")
        device = f"SIM.{index}" if index else "SIM"
        return Model(self._simulated.load(prepared, replace(options, device=device), progress), options.device, index)
'''


def write_machine(site: Path, names: Sequence[str] = ("fake device 0", "fake device 1")) -> None:
    """Write two devices of 8 GiB. `site` belongs at the front of PYTHONPATH, before the real pynvml."""
    write_distribution(site, "fake-cuda", "fake_cuda", _RUNTIME, fake_cuda="fake_cuda:Adapter")
    (site / "pynvml.py").write_text(_NVML, encoding="utf-8")
    well = {"lost": False, "used": GIB, "busy": 0, "temperature_c": 50, "slowdowns": 0, "memory_errors": 0}
    _write_devices(site, [{"name": name, **well} for name in names])


def change_device(site: Path, index: int, **facts: Any) -> None:
    """Let a device tell other facts from now on."""
    devices = json.loads((site / _DEVICES).read_text(encoding="utf-8"))
    devices[index] |= facts
    _write_devices(site, devices)


def _write_devices(site: Path, devices: list[dict[str, Any]]) -> None:
    draft = site / f"{_DEVICES}.new"
    draft.write_text(json.dumps(devices), encoding="utf-8")
    draft.replace(site / _DEVICES)


def write_machine_config(directory: Path, extra: str) -> Path:
    """Write a cluster.yaml of two replicas, one on each device."""
    items = "[{device: 'CUDA:0'}, {device: 'CUDA:1'}]"
    path = configuration(directory, script="base_ms=20", replicas=items, extra=f"drafts: []\n{extra}")
    path.write_text(path.read_text().replace("adapter: simulated", "adapter: fake_cuda", 1))
    return path


def write_planned_machine(directory: Path, row_ms: Mapping[str, float], extra: str, replicas: str = "1") -> Path:
    """Write a cluster.yaml of `replicas` on the devices that a plan chooses, and a stored profile of each kind: what a
    forward takes on one of that name."""
    script = "base_ms=20"
    for index, (name, ms) in enumerate(row_ms.items()):
        store_simulated_profiles(
            directory / "store" / "profiles",
            {f"CUDA:{index}": ms},
            script=script,
            adapter="fake_cuda",
            hardware=Hardware("cuda", name, 8 * GIB, driver="1.0", isa=("sm_90",)),
            version="fake-cuda 0.1",
        )
    path = configuration(directory, script=script, replicas=replicas, extra=f"drafts: []\n{extra}")
    path.write_text(path.read_text().replace("adapter: simulated", "adapter: fake_cuda, device: auto", 1))
    return path
