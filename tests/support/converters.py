"""The processes that convert models for a test's daemon."""

from __future__ import annotations

from pathlib import Path

import psutil


def list_converters(store: Path) -> list[psutil.Process]:
    """Return the processes that convert a model into this directory."""
    return [one for one in psutil.process_iter() if is_converter(one, store)]


def is_converter(process: psutil.Process, store: Path) -> bool:
    """Return whether a process converts a model into this directory."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "adapters.openvino_rt.convert" in words and any(word.startswith(str(store)) for word in words)
