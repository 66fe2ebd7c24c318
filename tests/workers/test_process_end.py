"""A process that is not our child: it may end by itself, it is killed where it hangs, and it is not mistaken."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import psutil
import pytest

from orchestrator.launch.process_end import end_process, read_start_time_s


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that somebody else reaps."""
    process = subprocess.Popen(["sleep", "30"])
    reaper = threading.Thread(target=process.wait)
    reaper.start()
    yield process.pid
    process.kill()
    reaper.join()


def test_one_that_is_stopped_is_killed(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    assert end_process(pid, read_start_time_s(pid), patience_s=0.05, kill_timeout_s=5.0)
    assert not psutil.pid_exists(pid)


def test_another_with_its_number_lives(pid: int) -> None:
    assert end_process(pid, read_start_time_s(pid) - 60.0, patience_s=0.0, kill_timeout_s=5.0)
    assert psutil.pid_exists(pid)


def test_one_that_is_gone_is_gone(pid: int) -> None:
    began = read_start_time_s(pid)
    os.kill(pid, signal.SIGKILL)
    assert end_process(pid, began, patience_s=5.0, kill_timeout_s=5.0)
    assert end_process(pid, began, patience_s=0.0, kill_timeout_s=0.0)
