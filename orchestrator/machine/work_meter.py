"""Tells whether this process, or one that it started, computes or moves bytes: what a load is judged by that waits."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

import psutil

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_GONE: Final = (psutil.Error, OSError)
LOOK_S: Final = 1.0
"""Between two looks. ADR 0107."""
_LEAST_CPU_S: Final = 0.01
"""Of processor time in a second: what threads take that only wait stays below it, and a starved process above. ADR
0107."""


class WorkMeter:
    """Measures from one call to the next. All calls come from one thread, whose own processor time is not counted.
    `pid`: of a process that this one started, which then is measured instead."""

    def __init__(self, pid: int | None = None) -> None:
        """Raises psutil.NoSuchProcess."""
        self._process, self._own = psutil.Process(pid), pid is None
        self._waits = False
        self._at_s, self._cpu_s, self._bytes = time.monotonic(), *self._read()
        self.cpu_s = self.idle_s = 0.0

    def measure(self) -> None:
        """Look. `cpu_s` becomes the processor time of all looks, `idle_s` for how long nothing has been done. A time
        between two looks that is much longer than `LOOK_S` is one in which this process did not run: it counts for
        no more."""
        at_s, (cpu_s, moved_bytes) = time.monotonic(), self._read()
        passed_s, spent_s = at_s - self._at_s, max(0.0, cpu_s - self._cpu_s)
        worked = spent_s > _LEAST_CPU_S * passed_s or moved_bytes > self._bytes or self._waits
        self._at_s, self._cpu_s, self._bytes = at_s, cpu_s, moved_bytes
        self.cpu_s += spent_s
        self.idle_s = 0.0 if worked else self.idle_s + min(passed_s, 2.0 * LOOK_S)

    def _read(self) -> tuple[float, int]:
        """Return the processor time in s and the bytes of the whole tree of processes; the kernel adds those of a
        process that ended to its parent's. What a file gives through memory counts as faults."""
        children: list[psutil.Process] = []
        with suppress(*_GONE):
            children = self._process.children(recursive=True)
        family = [(self._process, self._own), *((child, False) for child in children)]
        self._waits = any(_waits_for_disk(process) for process, _ in family)
        spent_s = sum(_read_cpu_s(process, own=own) for process, own in family)
        return spent_s, sum(_count_bytes(process, own=own) for process, own in family)


def _read_cpu_s(process: psutil.Process, *, own: bool) -> float:
    """Return the processor time of a process and of its children that ended; without this thread's where it is our
    `own`."""
    with suppress(*_GONE):
        times = process.cpu_times()
        ended_s = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        return ended_s + (time.process_time() - time.thread_time() if own else times.user + times.system)
    return 0.0


def _waits_for_disk(process: psutil.Process) -> bool:
    """Return whether a process waits within the kernel for a disk, as it does while all that it wrote is brought there.
    Nobody can end it meanwhile."""
    with suppress(*_GONE):
        return bool(process.status() == psutil.STATUS_DISK_SLEEP)
    return False


def _count_bytes(process: psutil.Process, *, own: bool) -> int:
    """Return the bytes that a process moved to and from disks, caches and networks. Of our `own`, the measuring itself
    reads from caches: those are left out, and what files gave through memory counts."""
    with suppress(*_GONE, AttributeError, NotImplementedError):
        counters = process.io_counters()
        moved = counters.read_bytes + counters.write_bytes
        if own:
            return int(moved) + (resource.getrusage(resource.RUSAGE_SELF).ru_majflt if resource is not None else 0)
        return int(moved + getattr(counters, "read_chars", 0) + getattr(counters, "write_chars", 0))
    return 0
