"""NVIDIA's management library, where it is installed and finds a driver."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

_T = TypeVar("_T")
# NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED, of nvml.h.
_GONE: Final = (15, 16)


@dataclass(frozen=True, slots=True)
class SilentDevice:
    """A device that does not answer. `fault`: what NVML says has become of it, "" where it may answer yet."""

    fault: str


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


def query_each(ask: Callable[[Any, Any], _T]) -> dict[int, _T | SilentDevice]:
    """Return what `ask` gets from NVML and the handle of each device, by its number as CUDA counts in this process.
    A device that does not answer hides no other. Nothing where there is no driver."""

    def query(nvml: Any) -> dict[int, _T | SilentDevice]:
        answers: dict[int, _T | SilentDevice] = {}
        for index, handle in enumerate(list_visible(nvml)):
            try:
                answers[index] = SilentDevice(handle.fault) if isinstance(handle, SilentDevice) else ask(nvml, handle)
            except nvml.NVMLError as error:
                answers[index] = describe_silence(error)
        return answers

    return with_nvml(query) or {}


def describe_silence(error: Exception) -> SilentDevice:
    """Return what an error of NVML says of the device that was asked."""
    return SilentDevice(str(error) if getattr(error, "value", 0) in _GONE else "")


def query_nvidia(index: int, ask: Callable[[Any, Any], _T]) -> _T | None:
    """Return what `ask` gets from NVML and a device's handle, by its number as CUDA counts in this process; None as
    `with_nvml` does, and where there is no such device."""

    def query(nvml: Any) -> _T | None:
        handles = list_visible(nvml)
        known = index < len(handles) and not isinstance(handles[index], SilentDevice)
        return ask(nvml, handles[index]) if known else None

    return with_nvml(query)


def list_visible(nvml: Any) -> list[Any]:
    """Return the handles of the devices that CUDA shows to this process, in its order: NVML shows all, whatever
    CUDA_VISIBLE_DEVICES says. As CUDA does, it ends before the first that is not there. One that has no handle any more
    is a SilentDevice."""
    every = [_open_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
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


def _open_device(nvml: Any, index: int) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return describe_silence(error)


def _find_handle(nvml: Any, every: list[Any], name: str) -> Any:
    """Return the handle of a device by its number, or by the beginning of its UUID; None where there is none."""
    if name.isdecimal():
        return every[int(name)] if int(name) < len(every) else None
    if name.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    named = (handle for handle in every if name and not isinstance(handle, SilentDevice))
    return next((handle for handle in named if nvml.nvmlDeviceGetUUID(handle).startswith(name)), None)
