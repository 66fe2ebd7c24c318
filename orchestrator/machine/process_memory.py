"""What this process holds, and how often memory ran out, by the system's own account."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from adapters.control_groups import count_group_kills
from device_profiles.units import KIB

KILLED_FOR_MEMORY: Final = (
    "was killed for want of memory (SIGKILL by the kernel); "
    "free memory, raise the limit of its control group, or lower limits.kv_cache"
)
_NOTE_EVERY_S = 0.5  # of reading the peak from /proc. Not tuned.


def peak_rss_bytes(process: int | str = "self") -> int:
    """Return the most memory that a process ever held (VmHWM, of Linux), 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM:")), 0)


def count_memory_kills() -> int | None:
    """Return how many processes the kernel has ended since it started, for want of memory: of the machine or of a
    control group. Where it does not tell, those of our own control group. None where nobody does."""
    with suppress(OSError):
        lines = Path("/proc/vmstat").read_text(encoding="ascii", errors="replace").splitlines()
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return count_group_kills()


class MemoryKillWatch:
    """Whether the kernel ended a process of this host for want of memory after a worker spoke last."""

    def __init__(self) -> None:
        self._kills, self._noted_s = count_memory_kills(), time.monotonic()

    def observe_alive(self) -> None:
        """Whatever the kernel ended before this worker spoke was another process."""
        now_s = time.monotonic()
        if now_s - self._noted_s >= _NOTE_EVERY_S:
            self._kills, self._noted_s = count_memory_kills(), now_s

    def has_kill(self) -> bool:
        """Return whether one was ended since; False where nobody tells."""
        kills = count_memory_kills()
        return None not in (kills, self._kills) and kills != self._kills


def sum_family_bytes(process: psutil.Process) -> tuple[int, int]:
    """Return what a process and those that it has started hold now, and the sum of the most that each ever held."""
    family = [process]
    with suppress(psutil.Error):
        family += process.children()
    now = peak = 0
    for member in family:
        with suppress(psutil.Error):
            now += member.memory_info().rss
            peak += peak_rss_bytes(member.pid)
    return now, peak
