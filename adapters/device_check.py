"""Whether the devices that a configuration names are here, asked as cheaply as each runtime allows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from adapters.builds import describe_lacking
from adapters.contract import AdapterUnavailable, Unsupported
from adapters.names import LLAMA_CPP, OPENVINO_LLAMA, OWN_ADAPTERS
from adapters.nvml import list_visible, with_nvml
from device_profiles.device_names import CUDA_KIND, find_device_name, find_index, is_processor, split_device

_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"), Path("/dev/dxg"))
"""NVIDIA's driver, AMD's, and that of Windows' subsystem for Linux: torch calls the devices of each CUDA."""
_PACKAGES = {"onnx_rt": "onnxruntime", "openvino_rt": "openvino", "torch_device": "torch"}
_COMBINED = ("auto", "batch", "hetero", "multi")
"""What OpenVINO makes of several devices."""


def check_device(adapter: str, device: str) -> str:
    """Return in a word how a device was looked for: "" where nobody here can tell.

    Raises AdapterUnavailable where its runtime is not installed, Unsupported where there is no such device.
    """
    if adapter not in OWN_ADAPTERS or adapter == "simulated":
        return ""
    if adapter == LLAMA_CPP:
        return _check_llama(device)
    if adapter == OPENVINO_LLAMA:
        if not is_processor(device):
            raise Unsupported(f"{adapter} runs on processors alone: set device: CPU, or adapter: {LLAMA_CPP}")
        return f"{check_device(LLAMA_CPP, device)}, and {check_device('openvino_rt', device)}"
    package = _PACKAGES[adapter]
    if find_spec(package) is None:
        raise AdapterUnavailable(describe_lacking(adapter))
    if is_processor(device):
        return f"{package} is installed"
    if adapter == "torch_device":
        return _check_torch(device)
    return _check_onnx(device) if adapter == "onnx_rt" else _check_openvino(device)


def _check_llama(device: str) -> str:
    from adapters.libllama import find_library
    from adapters.llama_cpp.library import check_place, load_library

    place = find_library()
    check_place(place)
    if not is_processor(device):
        load_library(place).check_device(device)
    return f"{place.package} is installed" if place.package else f"{place.file} is there"


def _check_openvino(device: str) -> str:
    from adapters.openvino_rt.adapter import list_device_names, refuse_gpu

    refuse_gpu(device)
    names = list_device_names()
    if split_device(device)[0] in _COMBINED:
        return ""
    if find_device_name(device, names) is None:
        raise Unsupported(f"OpenVINO sees no device {device!r} here; there is {', '.join(names)}")
    return "OpenVINO sees it"


def _check_onnx(device: str) -> str:
    from adapters.onnx_rt.adapter import list_providers
    from adapters.onnx_rt.providers import check_device_name

    check_device_name(device, list_providers())
    return "ONNX Runtime has its provider"


def _check_torch(device: str) -> str:
    """Look for drivers alone: torch takes seconds to import."""
    if split_device(device)[0] != CUDA_KIND:
        raise Unsupported(f"torch_device has no device {device!r}; it takes CPU, CUDA:0, CUDA:1 and so on")
    _check_nvidia(device)
    return "its driver is here"


def _check_nvidia(device: str) -> None:
    """Raise Unsupported where a device that is called CUDA cannot be here."""
    if not any(path.exists() for path in _DRIVERS):
        raise Unsupported(f"torch sees no device {device!r} here: there is no driver of a GPU")
    count = with_nvml(lambda nvml: len(list_visible(nvml)))
    index = find_index(device)
    if count is not None and index is not None and index >= count:
        raise Unsupported(f"torch sees no device {device!r} here; there are {count}, numbered from 0")
