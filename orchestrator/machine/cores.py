"""Pins a worker process to CPU cores, before it loads anything that makes threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator.errors import WorkerStartFailed


def effective_cores() -> list[int]:
    """Return the cores that this thread, and every thread that it makes, may run on; [] where that cannot be asked."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def pin_to_cores(cores: Sequence[int]) -> None:
    """Keep every thread of this process, and all that they make, on these cores; none: leave it as it is.

    Raises WorkerStartFailed where this host lets the process have none of them, or not all.
    """
    if not cores:
        return
    if sys.platform != "linux":
        raise WorkerStartFailed("workers can be pinned to cores on Linux only; leave `cores` out")
    usable = effective_cores()
    if missing := sorted(set(cores) - set(usable)):
        raise WorkerStartFailed(
            f"cores {', '.join(map(str, missing))} cannot be had on this host; a worker may use {spans(usable)} here"
        )
    pinned: set[int] = set()
    while new := {int(task.name) for task in Path("/proc/self/task").iterdir()} - pinned:
        for thread in new:  # again until there is no new one: a thread not reached yet makes others like itself
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(thread, cores)
        pinned |= new


def spans(cores: Sequence[int]) -> str:
    """Return cores as people write them ("0-3, 8")."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    return ", ".join("-".join(map(str, span)) for span in ranges) or "none"
