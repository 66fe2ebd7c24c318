"""Adapters by name. Looking one up imports our module only; the framework is imported on first use."""

from __future__ import annotations

import importlib

from adapters.contract import Adapter, AdapterUnavailable

_MODULES = {
    "onnx_rt": "adapters.onnx_rt.adapter:OnnxRuntimeAdapter",
    "openvino_rt": "adapters.openvino_rt.adapter:OpenVinoAdapter",
    "simulated": "adapters.simulated.adapter:SimulatedAdapter",
}


def names() -> list[str]:
    """Return the names of all adapters, installed or not."""
    return sorted(_MODULES)


def get(name: str) -> Adapter:
    """Return a new adapter. Raises AdapterUnavailable for an unknown name."""
    try:
        module, attribute = _MODULES[name].split(":")
    except KeyError:
        raise AdapterUnavailable(f"no adapter is called {name!r}; there are {', '.join(names())}") from None
    adapter: Adapter = getattr(importlib.import_module(module), attribute)()
    return adapter
