"""A runtime over torch on the processor, whose devices are GPUs of a made-up NVML: ranks of it are real, by gloo."""

from __future__ import annotations

from pathlib import Path

from device_profiles.measured import Hardware
from tests.support.foreign_adapter import write_distribution
from tests.support.nvidia_machine import GIB, write_machine

TWIN = Hardware("cuda", "twin", 8 * GIB, driver="1.0", isa=("sm_90",))
VERSION = "split-torch 0.1"
_RUNTIME = '''
"""torch on the processor, one thread a rank, under the names of NVIDIA devices."""

from dataclasses import replace

import pynvml
from adapters.torch_device.adapter import TorchAdapter
from device_profiles.device_names import list_rank_devices
from device_profiles.profile import DeviceProfile, Precision


class Model:
    def __init__(self, model, device):
        self._model = model
        self.capabilities = replace(model.capabilities, device=device)

    def __getattr__(self, name):
        return getattr(self._model, name)


def on_processor(options):
    return replace(options, device="CPU", threads=options.tensor_parallel)


class Adapter:
    name = "split_torch"

    def __init__(self):
        self._torch = TorchAdapter()

    def devices(self):
        return [
            DeviceProfile(
                adapter=self.name,
                name=f"CUDA:{index}",
                kind="cuda",
                full_name=device["name"],
                memory_bytes=8 << 30,
                precisions=(Precision.FP32,),
            )
            for index, device in enumerate(pynvml._devices())
        ]

    def classes(self, options):
        return self._torch.classes(on_processor(options))

    def recipe(self, weights=None):
        return self._torch.recipe(weights)

    def prepare(self, source, target, progress, weights=None):
        self._torch.prepare(source, target, progress, weights)

    def load(self, prepared, options, progress):
        return Model(self._torch.load(prepared, on_processor(options), progress), options.device)

    def load_layers(self, prepared, options, layers, progress):
        return Model(self._torch.load_layers(prepared, on_processor(options), layers, progress), options.device)

    def list_rank_places(self, options):
        return list_rank_devices(options.device, options.tensor_parallel)
'''


def write_split_machine(site: Path) -> None:
    """Write two GPUs of 8 GiB that are alike, and the runtime. `site` belongs at the front of PYTHONPATH."""
    write_machine(site, ["twin", "twin"])
    write_distribution(site, "split-torch", "split_torch", _RUNTIME, split_torch="split_torch:Adapter")
