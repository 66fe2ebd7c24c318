"""The memory that this process's allocator keeps for itself."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def trim_heap() -> None:
    """Give back to the system what was freed. glibc keeps blocks below 32 MiB between others that are in use: after a
    load that packs a model's matrices anew that was a sixth of a process (ADR 0148). Elsewhere nothing is done."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
