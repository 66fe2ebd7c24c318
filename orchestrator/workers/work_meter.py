"""Tells whether this process, or one that it started, computes or moves bytes: what a load is judged by that waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import psutil

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_GONE: Final = (psutil.Error, OSError)
_LEAST_CPU_S: Final = 0.002
"""Of processor time in a second: what threads take that only wait stays below it, and a starved process above."""


class WorkMeter:
    """Measures from one call to the next. All calls come from one thread, whose own processor time is not counted."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._waits = False
        self._at_s, self._cpu_s, self._bytes = time.monotonic(), *self._read()
        self.cpu_s = 0.0

    def measure(self) -> bool:
        """Return whether anything was done since the last call. `cpu_s` becomes the processor time of all calls."""
        at_s, (cpu_s, moved_bytes) = time.monotonic(), self._read()
        spent_s = max(0.0, cpu_s - self._cpu_s)
        worked = spent_s > _LEAST_CPU_S * (at_s - self._at_s) or moved_bytes > self._bytes or self._waits
        self._at_s, self._cpu_s, self._bytes = at_s, cpu_s, moved_bytes
        self.cpu_s += spent_s
        return worked

    def _read(self) -> tuple[float, int]:
        """Return the processor time in s and the bytes of the whole tree of processes; the kernel adds those of a
        process that ended to its parent's. What a file gives through memory counts as faults."""
        children: list[psutil.Process] = []
        with suppress(*_GONE):
            children = self._process.children(recursive=True)
        self._waits = any(map(_waits_for_disk, [self._process, *children]))
        times = [time.process_time() - time.thread_time(), *_list_cpu_s(self._process, ended=True)]
        moved = [_count_faults(), _count_bytes(self._process, characters=False)]
        for child in children:
            times += [*_list_cpu_s(child, ended=False), *_list_cpu_s(child, ended=True)]
            moved.append(_count_bytes(child, characters=True))
        return sum(times), sum(moved)


def _list_cpu_s(process: psutil.Process, *, ended: bool) -> Iterator[float]:
    """Yield a process's own processor time, or that of its children that `ended`."""
    with suppress(*_GONE):
        times = process.cpu_times()
        if ended:
            yield getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        else:
            yield times.user + times.system


def _waits_for_disk(process: psutil.Process) -> bool:
    """Return whether a process waits within the kernel for a disk, as it does while all that it wrote is brought there.
    Nobody can end it meanwhile."""
    with suppress(*_GONE):
        return bool(process.status() == psutil.STATUS_DISK_SLEEP)
    return False


def _count_bytes(process: psutil.Process, *, characters: bool) -> int:
    """Return the bytes that a process moved to and from disks; `characters`: with those of caches and networks, of
    which the measuring itself has some."""
    with suppress(*_GONE, AttributeError, NotImplementedError):
        counters = process.io_counters()
        moved = counters.read_bytes + counters.write_bytes
        if characters:
            moved += getattr(counters, "read_chars", 0) + getattr(counters, "write_chars", 0)
        return int(moved)
    return 0


def _count_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt if resource is not None else 0
