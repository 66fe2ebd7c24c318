"""OpenVINO's errors as the contract's."""

from __future__ import annotations

from adapters.contract import DeviceLost
from adapters.failures import classify_failure

FAILURES = (RuntimeError, MemoryError)
"""What OpenVINO raises: std::bad_alloc arrives as a MemoryError."""


def classify_openvino_failure(error: BaseException) -> DeviceLost:
    """Return what a failed forward means."""
    return classify_failure(error, "OpenVINO", last_line=True)
