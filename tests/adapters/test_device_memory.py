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


class Core:
    """OpenVINO's core as plugins of NPUs answer it; no such device is at hand."""

    FACTS: ClassVar[dict[str, dict[str, int | str | list[str]]]] = {
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
    assert {name: read_openvino_memory(Core(), name) for name in Core.FACTS} == {"NPU": 8 * GIB, "OLD": 0}


def test_an_npu_is_given_the_weights_that_its_graphs_have_and_no_others() -> None:
    model = ModelSizes(parameters=1_350_000_000, file_bytes=5 * GIB, stored="f32")
    assert choose_precision(device_profile(Core(), "NPU"), model, free_bytes=8 * GIB).weights == "int8"
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
