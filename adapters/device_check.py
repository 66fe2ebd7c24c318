"""Whether the devices that a configuration names are here, asked as cheaply as each runtime allows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from adapters.builds import describe_lacking
from adapters.contract import AdapterUnavailable, Unsupported
from adapters.names import OWN_ADAPTERS
from adapters.nvml import with_nvml

_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"), Path("/dev/dxg"))
"""NVIDIA's driver, AMD's, and that of Windows' subsystem for Linux: torch calls the devices of each CUDA."""
_PACKAGES = {"onnx_rt": "onnxruntime", "openvino_rt": "openvino", "torch_device": "torch"}
_COMBINED = ("AUTO", "BATCH", "HETERO", "MULTI")
"""What OpenVINO makes of several devices."""


def check_device(adapter: str, device: str) -> str:
    """Return in a word how a device was looked for: "" where nobody here can tell.

    Raises AdapterUnavailable where its runtime is not installed, Unsupported where there is no such device.
    """
    if adapter not in OWN_ADAPTERS or adapter == "simulated":
        return ""
    if adapter == "llama_cpp":
        return _check_llama(device)
    package = _PACKAGES[adapter]
    if find_spec(package) is None:
        raise AdapterUnavailable(describe_lacking(adapter))
    kind = device.partition(":")[0].partition(".")[0].upper()
    if kind == "CPU":
        return f"{package} is installed"
    if adapter == "torch_device":
        return _check_torch(device, kind)
    return _check_onnx(device) if adapter == "onnx_rt" else _check_openvino(device, kind)


def _check_llama(device: str) -> str:
    from adapters.libllama import find_library
    from adapters.llama_cpp.library import check_place, load_library

    place = find_library()
    check_place(place)
    if device != "CPU":
        load_library(place).check_device(device)
    return f"{place.package} is installed" if place.package else f"{place.file} is there"


def _check_openvino(device: str, kind: str) -> str:
    from adapters.openvino_rt.adapter import list_device_names

    names = list_device_names()
    if kind in _COMBINED:
        return ""
    if kind not in {name.partition(".")[0] for name in names}:
        raise Unsupported(f"OpenVINO sees no device {device!r} here; there is {', '.join(names)}")
    return "OpenVINO sees it"


def _check_onnx(device: str) -> str:
    from adapters.onnx_rt.adapter import list_providers
    from adapters.onnx_rt.providers import choose_provider

    choose_provider(device, list_providers())
    if device.startswith("CUDA"):
        _check_nvidia(device, "ONNX Runtime")
    return "ONNX Runtime has its provider"


def _check_torch(device: str, kind: str) -> str:
    """Look for drivers alone: torch takes seconds to import."""
    if kind != "CUDA":
        raise Unsupported(f"torch_device has no device {device!r}; it takes CPU, CUDA:0, CUDA:1 and so on")
    _check_nvidia(device, "torch")
    return "its driver is here"


def _check_nvidia(device: str, runtime: str) -> None:
    """Raise Unsupported where a device that is called CUDA cannot be here."""
    if not any(path.exists() for path in _DRIVERS):
        raise Unsupported(f"{runtime} sees no device {device!r} here: there is no driver of a GPU")
    count = with_nvml(lambda nvml: int(nvml.nvmlDeviceGetCount()))
    index = device.partition(":")[2] or "0"
    if count is not None and index.isdecimal() and int(index) >= count:
        raise Unsupported(f"{runtime} sees no device {device!r} here; NVIDIA's driver has {count}, numbered from 0")
