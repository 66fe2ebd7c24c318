"""The end of a process that is not our child: waited for, then forced. Runs on that process's own machine."""

from __future__ import annotations

from contextlib import suppress

import psutil

_SAME_START_S = 5.0  # two looks at one process's start differ by as much as the clock was set in between


def read_start_time_s(pid: int) -> float:
    """Return when a process began, in seconds since 1970: with its number, its name."""
    return psutil.Process(pid).create_time()


def end_process(pid: int, began: float, patience_s: float, kill_timeout_s: float) -> bool:
    """Wait so long for a process to end, then kill it: one that is stopped hears nothing else. Blocks.

    Another process that got its number since is left alone. Returns whether it is gone.
    """
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if abs(process.create_time() - began) > _SAME_START_S:
            return True
        try:
            process.wait(patience_s)
        except psutil.TimeoutExpired:
            process.kill()
            try:
                process.wait(kill_timeout_s)
            except psutil.TimeoutExpired:
                return False
    return True
