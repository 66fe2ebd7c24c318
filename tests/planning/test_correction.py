"""What is known of a device reaches it under each of its names."""

from __future__ import annotations

import pytest

from device_profiles.device_load import DeviceLoad
from orchestrator.planning.correction import apply_health, apply_loads
from policies.planning.plan import DefaultLinks, Device, Host, Inventory
from tests.support.profiles import GIB


@pytest.mark.parametrize("name", ["h/CUDA", "h/CUDA:0", "h/cuda0"])
def test_health_and_loads_are_found_by_any_name_of_the_device(name: str) -> None:
    device = Device("h/CUDA", "h", "cuda", "p", GIB, names=(("onnx_rt", "CUDA"),))
    cluster = Inventory((Host("h"),), (device,), (), (), DefaultLinks())
    (judged,) = apply_health(cluster, {name: (0.25, "it failed")}).devices
    assert (judged.health, judged.health_why) == (0.25, "it failed")
    (worse,) = apply_health(cluster, {name: (0.25, "it failed"), "h": (0.1, "cut off")}).devices
    assert worse.health == 0.1
    (other,) = apply_health(cluster, {"h/CUDA:1": (0.25, "it failed"), "i/CUDA:0": (0.1, "")}).devices
    assert other.health == 1.0
    (loaded,) = apply_loads(cluster, {"h/CUDA:0": DeviceLoad(utilisation=0.5, others=0.5)}).devices
    assert loaded.utilisation == 0.5
