"""OpenVINO's errors as the contract's."""

from __future__ import annotations

from adapters.contract import DeviceLost, OutOfMemory
from adapters.failures import classify_failure

FAILURES = (RuntimeError, MemoryError)
"""What OpenVINO raises: std::bad_alloc arrives as a MemoryError."""


_BROKEN = "broken promise"
"""A kernel that could not be made for want of memory stays so in OpenVINO's cache: forwards of its shape fail."""


def classify_openvino_failure(error: BaseException) -> DeviceLost:
    if _BROKEN in str(error).lower():
        return OutOfMemory("OpenVINO has no kernel for this forward: there was no memory when it made one")
    return classify_failure(error, "OpenVINO", last_line=True)
