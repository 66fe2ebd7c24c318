"""NVIDIA's management library, where it is installed and finds a driver."""

from __future__ import annotations

import os
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
    """Return what `ask` gets from NVML and a device's handle, by its number as CUDA counts in this process; None as
    `with_nvml` does, and where there is no such device."""

    def query(nvml: Any) -> _T | None:
        handles = list_visible(nvml)
        return ask(nvml, handles[index]) if index < len(handles) else None

    return with_nvml(query)


def list_visible(nvml: Any) -> list[Any]:
    """Return the handles of the devices that CUDA shows to this process, in its order: NVML shows all, whatever
    CUDA_VISIBLE_DEVICES says. As CUDA does, it ends before the first that is not there."""
    every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return every
    handles: list[Any] = []
    for name in map(str.strip, shown.split(",")):
        handle = _find_handle(nvml, every, name)
        if handle is None:
            break
        handles.append(handle)
    return handles


def _find_handle(nvml: Any, every: list[Any], name: str) -> Any:
    """Return the handle of a device by its number, or by the beginning of its UUID; None where there is none."""
    if name.isdecimal():
        return every[int(name)] if int(name) < len(every) else None
    if name.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    return next((handle for handle in every if name and nvml.nvmlDeviceGetUUID(handle).startswith(name)), None)
