"""Which of OpenVINO's devices are offered."""

from __future__ import annotations

import subprocess
import sys

import pytest

from adapters import registry
from adapters.contract import LoadOptions, StaticShapes, Unsupported
from adapters.device_check import check_device
from tests.adapters.test_device_memory import Core

_WAY_OUT = r"openvino_rt is not offered on GPUs\. Set adapter: llama_cpp with a library for SYCL or Vulkan"


class Devices(Core):
    """OpenVINO's core on a machine with a GPU and an NPU."""

    available_devices = ("GPU.0", "NPU")


@pytest.mark.parametrize("device", ["GPU", "GPU.0", "gpu:1"])
@pytest.mark.parametrize("static", [False, True])
def test_a_gpu_is_refused_with_the_way_out(monkeypatch, device, static):
    """Its plugin has KV caches in another layout, in memory of its own; none was at hand to try it on."""
    monkeypatch.setattr("adapters.openvino_rt.adapter._core", Devices)
    adapter = registry.get_for("openvino_rt", device, StaticShapes(on=static))
    with pytest.raises(Unsupported, match=_WAY_OUT):
        adapter.classes(LoadOptions(device=device))
    with pytest.raises(Unsupported, match=_WAY_OUT):
        check_device("openvino_rt", device)


def test_a_gpu_is_in_no_list_that_a_plan_is_made_of(monkeypatch):
    monkeypatch.setattr("adapters.openvino_rt.adapter._core", Devices)
    assert [device.name for device in registry.list_devices("openvino_rt")] == ["NPU"]


def test_who_lists_devices_keeps_its_environment():
    """The daemon tells by it whether a worker of an earlier one may be adopted."""
    pytest.importorskip("openvino")
    program = (
        "import os; from adapters.openvino_rt.adapter import list_openvino_devices as look; "
        "before = dict(os.environ); assert look(); assert dict(os.environ) == before"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
