"""OpenVINO's errors as the contract's."""

from __future__ import annotations

from adapters.contract import DeviceLost, OutOfMemory

_OUT_OF_MEMORY_WORDS = ("bad_alloc", "out of memory", "cannot allocate", "failed to allocate")


def classify_openvino_failure(error: RuntimeError) -> DeviceLost:
    """Return what a failed forward means."""
    text = str(error).strip().splitlines()[-1] if str(error).strip() else "no reason given"
    if any(word in str(error).lower() for word in _OUT_OF_MEMORY_WORDS):
        return OutOfMemory(f"OpenVINO ran out of memory: {text}")
    return DeviceLost(f"OpenVINO failed: {text}")
