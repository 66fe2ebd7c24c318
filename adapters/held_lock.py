"""Locks between processes, and the word of whoever waits for one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from adapters.contract import Progress

# ADR 0107: whoever waits says so; far below LOAD_IDLE_S. Not tuned.
_SAID_EVERY_S: Final = 2.0


@contextmanager
def hold_lock(path: Path, progress: Progress, waits_for: str) -> Iterator[None]:
    """Hold a lock; `progress` hears every few seconds how long it waits, and for what. Whoever watches the holder finds
    it where it hangs, and the kernel frees the lock when its holder dies. Raises OSError."""
    # The file itself stays: removing it would let two processes hold two locks of one name.
    lock = FileLock(path)
    began_s, patience_s = time.monotonic(), 0.0
    while not _acquire(lock, patience_s):
        waited_s, patience_s = time.monotonic() - began_s, _SAID_EVERY_S
        progress(f"waiting for {waits_for}, {waited_s:.0f} s so far", -1.0)
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, patience_s: float) -> bool:
    try:
        lock.acquire(timeout=patience_s, poll_interval=0.1)
    except Timeout:
        return False
    return True
