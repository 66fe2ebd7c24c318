"""What is known of a device reaches it under each of its names."""

from __future__ import annotations

import pytest

from device_profiles.device_load import DeviceLoad
from device_profiles.measured import Hardware
from device_profiles.store import ProfileStore
from orchestrator.planning.correction import apply_health, apply_loads
from orchestrator.planning.stored import MeasuredHardware
from policies.planning.plan import DefaultLinks, Device, Host, Inventory
from tests.support.profiles import GIB, store_simulated_profiles

GPU = Hardware("cuda", "a GPU", GIB)


@pytest.fixture
def store(tmp_path) -> ProfileStore:
    return store_simulated_profiles(tmp_path, {"CUDA": 1.0}, adapter="onnx_rt", hardware=GPU, version="onnxruntime 1")


@pytest.mark.parametrize("name", ["h/CUDA", "h/CUDA:0", "h/cuda0"])
def test_health_and_loads_are_found_by_any_name_of_the_device(store: ProfileStore, name: str) -> None:
    device = Device("h/CUDA", "h", "cuda", "p", GIB)
    cluster = Inventory((Host("h"),), (device,), (), (), DefaultLinks())
    behind = {"p": MeasuredHardware(GPU, tuple(store.devices()), ())}
    (judged,) = apply_health(cluster, behind, {name: (0.25, "it failed")}).devices
    assert (judged.health, judged.health_why) == (0.25, "it failed")
    (worse,) = apply_health(cluster, behind, {name: (0.25, "it failed"), "h": (0.1, "cut off")}).devices
    assert worse.health == 0.1
    (other,) = apply_health(cluster, behind, {"h/CUDA:1": (0.25, "it failed"), "i/CUDA:0": (0.1, "")}).devices
    assert other.health == 1.0
    (loaded,) = apply_loads(cluster, behind, {"h/CUDA:0": DeviceLoad(utilisation=0.5, others=0.5)}).devices
    assert loaded.utilisation == 0.5
