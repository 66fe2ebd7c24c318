"""What this process holds, and how often memory ran out, by the system's own account."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from device_profiles.units import KIB


def peak_rss_bytes(process: int | str = "self") -> int:
    """Return the most memory that a process ever held (VmHWM, of Linux), 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM:")), 0)


def count_memory_kills() -> int | None:
    """Return how many processes the kernel has ended since it started, for want of memory: of the machine or of a
    control group. None where the system does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def sum_family_bytes(process: psutil.Process) -> tuple[int, int]:
    """Return what a process and those that it has started hold now, and the sum of the most that each ever held."""
    family = [process]
    with suppress(psutil.Error):
        family += process.children()
    now = peak = 0
    for one in family:
        with suppress(psutil.Error):
            now += one.memory_info().rss
            peak += peak_rss_bytes(one.pid)
    return now, peak
