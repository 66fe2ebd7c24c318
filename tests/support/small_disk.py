"""A small file system of its own, and a neighbour who fills it."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

MIB = 1 << 20
_REFILL_EVERY_S = 0.01


@contextmanager
def small_disk(directory: Path, size_mib: int) -> Iterator[Path]:
    """Mount a file system of so much there, and take it away in the end. Skips where this user may not."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root and mount")
    directory.mkdir(parents=True, exist_ok=True)
    told = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(directory)]
    if subprocess.run(told, check=False, capture_output=True).returncode:
        pytest.skip("this machine mounts no tmpfs, even for root")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextmanager
def keep_full(directory: Path) -> Iterator[Path]:
    """Keep a disk full: whatever anybody gives back is taken at once. Yields the file that fills it."""
    path = directory / "filler"
    over = threading.Event()
    with path.open("wb", buffering=0) as file:

        def fill() -> None:
            while not over.wait(_REFILL_EVERY_S):
                _write_until_full(file.fileno())

        _write_until_full(file.fileno())
        thread = threading.Thread(target=fill)
        thread.start()
        try:
            yield path
        finally:
            over.set()
            thread.join()
    path.unlink()


def _write_until_full(descriptor: int) -> None:
    size = MIB
    while size:
        with suppress(OSError):
            os.write(descriptor, b"\xa5" * size)
            continue
        size //= 2
