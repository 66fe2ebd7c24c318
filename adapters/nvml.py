"""NVIDIA's management library, where it is installed and finds a driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def with_nvml(ask: Callable[[Any], _T]) -> _T | None:
    """Return what `ask` gets from NVML. None where there is no driver, or no NVML to ask it, or it does not tell."""
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or no permission to ask it
        return None
    try:
        return ask(nvml)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def query_nvidia(index: int, ask: Callable[[Any, Any], _T]) -> _T | None:
    """Return what `ask` gets from NVML and a device's handle; None as `with_nvml` does."""
    return with_nvml(lambda nvml: ask(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
