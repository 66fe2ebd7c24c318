"""Adapters by name: ours, and those of other distributions. Looking one up imports its module only; the framework is
imported on first use."""

from __future__ import annotations

import importlib

from adapters.contract import Adapter, AdapterError, AdapterUnavailable, StaticShapes, Unsupported
from adapters.distributions import describe_foreign, find_foreign, load_foreign
from adapters.names import OWN_ADAPTERS
from device_profiles.device_names import split_device
from device_profiles.profile import DeviceProfile

_MODULES = {
    "llama_cpp": "adapters.llama_cpp.adapter:LlamaCppAdapter",
    "onnx_rt": "adapters.onnx_rt.adapter:OnnxRuntimeAdapter",
    "openvino_llama": "adapters.openvino_llama.adapter:OpenVinoLlamaAdapter",
    "openvino_rt": "adapters.openvino_rt.adapter:OpenVinoAdapter",
    "simulated": "adapters.simulated.adapter:SimulatedAdapter",
    "torch_device": "adapters.torch_device.adapter:TorchAdapter",
}

_STATIC = {"openvino_rt": "adapters.openvino_rt.static_adapter:StaticOpenVinoAdapter"}
_STATIC_ONLY = {"openvino_rt": ("npu",)}
"""Kinds of devices that take graphs of fixed shape only."""


def names() -> list[str]:
    """Return the names of all adapters: ours, installed or not, and those of other distributions."""
    return sorted([*OWN_ADAPTERS, *find_foreign().usable])


def static_names() -> list[str]:
    """Return the names of the adapters that have static shapes too."""
    return sorted(_STATIC)


def get(name: str) -> Adapter:
    """Return a new adapter. Raises AdapterUnavailable for an unknown name, and for one that another distribution
    brings and that is not to be used."""
    if name not in _MODULES:
        return load_foreign(name)
    module, attribute = _MODULES[name].split(":")
    adapter: Adapter = getattr(importlib.import_module(module), attribute)()
    return adapter


def list_devices(name: str) -> list[DeviceProfile]:
    """Return the devices that an adapter sees. Raises AdapterUnavailable, also for whatever the adapter of another
    distribution raises: nobody here knows it, and it is to end nothing."""
    adapter = get(name)
    if name in _MODULES:
        return adapter.devices()
    try:
        devices = list(adapter.devices())
        strange = [device.name for device in devices if device.adapter != name]
    except AdapterUnavailable:
        raise
    except (AdapterError, Exception, SystemExit) as error:
        raise AdapterUnavailable(f"{describe_foreign(name)} lists no devices: {error!r}") from error
    if strange:
        raise AdapterUnavailable(
            f"{describe_foreign(name)} lists {', '.join(strange)} under another adapter's name: "
            f"DeviceProfile.adapter is to be {name!r}"
        )
    return devices


def get_for(name: str, device: str, static: StaticShapes) -> Adapter:
    """Return the adapter that prepares and loads for a device: one of static shapes where the device takes nothing
    else, or `static` asks for it. Raises AdapterUnavailable for an unknown name, Unsupported where there are none."""
    needed = split_device(device)[0] in _STATIC_ONLY.get(name, ())
    if not needed and not static.on:
        return get(name)
    if name not in _STATIC:
        raise Unsupported(f"{name} has no static shapes; {', '.join(sorted(_STATIC))} has them")
    module, attribute = _STATIC[name].split(":")
    adapter: Adapter = getattr(importlib.import_module(module), attribute)(device)
    return adapter
