"""A worker that the kernel kills for memory: a real memory cgroup that a neighbour fills, where one can be made.

The worker and a hog are put into a cgroup of their own, with a limit. The hog allocates beyond it. The kernel's killer
takes whoever has the higher `oom_score_adj`, which is the worker. Where no cgroup can be made, the worker gets SIGKILL,
as that killer sends it, and the record says so.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from outrider_lab.chaos.faults.base import Fault, NoTarget
from outrider_lab.chaos.schedule import Shape

_ROOT = Path("/sys/fs/cgroup")
_LIMIT_BYTES = 64 << 20
_WITHIN_S = 15.0
_HOG = """
import os, sys, time
open("/proc/self/oom_score_adj", "w").write("-1000")
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
kept = []
for _ in range(2 * int(sys.argv[2]) >> 20):
    kept.append(os.urandom(1 << 20))
time.sleep(600)
"""


def find_memory_cgroup(root: Path = _ROOT) -> tuple[Path, str] | None:
    """Return the directory under which memory cgroups can be made, and the name of their limit; None where none can."""
    with suppress(OSError):
        if "memory" in (root / "cgroup.controllers").read_text(encoding="utf-8").split():
            return root, "memory.max"
    if (root / "memory" / "memory.limit_in_bytes").exists():
        return root / "memory", "memory.limit_in_bytes"
    return None


class OutOfMemory(Fault):
    """A worker is killed by the kernel, for want of memory in its cgroup."""

    kind = "out-of-memory"
    description = "a worker is killed by the kernel in a memory cgroup that is full (SIGKILL where none can be made)"
    shape = Shape(weight=1)

    async def inject(self) -> None:
        victim = self.choose("target")
        self.gone.append(victim.pid)
        name, service = f"outrider-chaos-{os.getpid()}-{self.planned.number}", self.arena.service
        killed = await asyncio.to_thread(starve, victim.pid, name, lambda: service.find(victim.pid) is None)
        how = "the kernel's killer, in a cgroup of 64 MiB" if killed else "SIGKILL as its killer sends it: no cgroup"
        self.blame(victim, detail=f"out of memory of {victim.title}, pid {victim.pid}: {how}")
        if not killed and not self.arena.service.send_signal(victim.pid, signal.SIGKILL):
            raise NoTarget(f"{victim.title} had ended already")


def starve(pid: int, name: str, is_gone: Callable[[], bool]) -> bool:
    """Let the kernel kill a process for memory, in a memory cgroup of this name; returns whether it did. Blocks."""
    found = find_memory_cgroup()
    if found is None or os.geteuid() != 0:
        return False
    parent, limit = found
    group = parent / name
    hog: subprocess.Popen[bytes] | None = None
    try:
        group.mkdir()
        (group / limit).write_text(str(_LIMIT_BYTES), encoding="utf-8")
        (group / "cgroup.procs").write_text(str(pid), encoding="utf-8")
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000", encoding="utf-8")
        hog = subprocess.Popen([sys.executable, "-c", _HOG, str(group), str(_LIMIT_BYTES)])
        deadline = time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline:
            if is_gone():
                return True
            time.sleep(0.02)
    except OSError:
        return False
    finally:
        if hog is not None:
            hog.kill()
            hog.wait()
        remove_cgroup(group)
    return False


def remove_cgroup(group: Path) -> None:
    """Remove a cgroup whose processes end."""
    for _ in range(50):  # its dead are taken out a moment after they died
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
