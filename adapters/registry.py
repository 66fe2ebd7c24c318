"""Adapters by name. Looking one up imports our module only; the framework is imported on first use."""

from __future__ import annotations

import importlib

from adapters.contract import Adapter, AdapterUnavailable, StaticShapes, Unsupported

_MODULES = {
    "onnx_rt": "adapters.onnx_rt.adapter:OnnxRuntimeAdapter",
    "openvino_rt": "adapters.openvino_rt.adapter:OpenVinoAdapter",
    "simulated": "adapters.simulated.adapter:SimulatedAdapter",
    "torch_device": "adapters.torch_device.adapter:TorchAdapter",
}

_STATIC = {"openvino_rt": "adapters.openvino_rt.static_adapter:StaticOpenVinoAdapter"}
_STATIC_ONLY = {"openvino_rt": ("NPU",)}
"""Kinds of devices that take graphs of fixed shape only."""


def names() -> list[str]:
    """Return the names of all adapters, installed or not."""
    return sorted(_MODULES)


def static_names() -> list[str]:
    """Return the names of the adapters that have static shapes too."""
    return sorted(_STATIC)


def get(name: str) -> Adapter:
    """Return a new adapter. Raises AdapterUnavailable for an unknown name."""
    try:
        module, attribute = _MODULES[name].split(":")
    except KeyError:
        raise AdapterUnavailable(f"no adapter is called {name!r}; there are {', '.join(names())}") from None
    adapter: Adapter = getattr(importlib.import_module(module), attribute)()
    return adapter


def get_for(name: str, device: str, static: StaticShapes) -> Adapter:
    """Return the adapter that prepares and loads for a device: one of static shapes where the device takes nothing
    else, or `static` asks for it. Raises AdapterUnavailable for an unknown name, Unsupported where there are none."""
    needed = device.partition(".")[0].upper() in _STATIC_ONLY.get(name, ())
    if not needed and not static.on:
        return get(name)
    if name not in _STATIC:
        raise Unsupported(f"{name} has no static shapes; {', '.join(sorted(_STATIC))} has them")
    module, attribute = _STATIC[name].split(":")
    adapter: Adapter = getattr(importlib.import_module(module), attribute)(device)
    return adapter
