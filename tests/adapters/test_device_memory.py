"""The memory of devices: of the host within its control groups, and of devices that only a driver's words stand for."""

from __future__ import annotations

from typing import ClassVar

import psutil
import pytest

from adapters.device_memory import read_device_memory, read_openvino_memory
from adapters.openvino_rt.adapter import device_profile
from device_profiles.profile import DeviceProfile
from policies.models.quantization import ModelSizes, NoPrecision, PrecisionRequest, choose_precision

GIB = 1 << 30


_GPU: dict[str, str | list[str]] = {
    "FULL_DEVICE_NAME": "Intel Arc",
    "OPTIMIZATION_CAPABILITIES": ["FP32", "BIN", "FP16", "INT8", "EXPORT_IMPORT"],
}


class Core:
    """OpenVINO's core as the plugins of an integrated GPU, a card and an NPU answer it; no such device is at hand."""

    FACTS: ClassVar[dict[str, dict[str, int | str | list[str]]]] = {
        "GPU.0": {"GPU_DEVICE_TOTAL_MEM_SIZE": 12 * GIB, "DEVICE_TYPE": "Type.INTEGRATED", **_GPU},
        "GPU.1": {"GPU_DEVICE_TOTAL_MEM_SIZE": 16 * GIB, "DEVICE_TYPE": "Type.DISCRETE", **_GPU},
        "NPU": {
            "NPU_DEVICE_TOTAL_MEM_SIZE": 8 * GIB,
            "FULL_DEVICE_NAME": "Intel AI Boost",
            "OPTIMIZATION_CAPABILITIES": ["FP16", "INT8", "EXPORT_IMPORT"],
        },
        "OLD": {},
    }

    def get_property(self, name: str, key: str) -> int | str | list[str]:
        if key not in self.FACTS[name]:
            raise RuntimeError(f"Unsupported property {key}")
        return self.FACTS[name][key]


def test_openvino_devices_have_the_memory_that_their_plugins_tell_of() -> None:
    memories = {name: read_openvino_memory(Core(), name) for name in Core.FACTS}
    assert memories == {
        "GPU.0": (12 * GIB, True),
        "GPU.1": (16 * GIB, False),
        "NPU": (8 * GIB, True),
        "OLD": (0, False),
    }


@pytest.mark.parametrize(
    ("name", "free_bytes", "weights"),
    [
        ("GPU.0", 12 * GIB, "fp16"),  # the format of 16 bits that it computes in
        ("GPU.1", 2 * GIB, "int8"),
        ("GPU.1", 1 * GIB, "int4"),
        ("NPU", 8 * GIB, "int8"),
    ],
)
def test_a_model_gets_the_weights_that_openvinos_devices_compute_with_and_hold(name, free_bytes, weights) -> None:
    model = ModelSizes(parameters=1_350_000_000, file_bytes=5 * GIB, stored="f32")
    assert choose_precision(device_profile(Core(), name), model, free_bytes=free_bytes).weights == weights


def test_an_npu_is_given_no_weights_that_its_graphs_do_not_have() -> None:
    model = ModelSizes(parameters=1_350_000_000, file_bytes=5 * GIB, stored="f32")
    with pytest.raises(NoPrecision, match=r"weights int8: needs 1\.4 GiB.*weights as_file: needs 5.0 GiB"):
        choose_precision(device_profile(Core(), "NPU"), model, free_bytes=GIB)
    with pytest.raises(NoPrecision, match="weights int4: openvino_rt has none for NPU"):
        choose_precision(device_profile(Core(), "NPU"), model, wanted=PrecisionRequest("int4"))


def profile(memory_bytes: int, *, in_host_memory: bool) -> DeviceProfile:
    return DeviceProfile("openvino_rt", "GPU.0", "gpu", "a GPU", memory_bytes, (), in_host_memory=in_host_memory)


def test_what_works_in_the_hosts_memory_has_no_more_than_is_free_there() -> None:
    huge = 1 << 60
    host = psutil.virtual_memory()
    shared = read_device_memory(profile(huge, in_host_memory=True))
    assert shared.total_bytes <= host.total
    assert 0 < shared.free_bytes < host.total
    assert read_device_memory(profile(huge, in_host_memory=False)) == (huge, huge)
