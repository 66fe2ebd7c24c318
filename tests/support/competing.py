"""Other programs that take a processor's time while a test looks on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

MOST_S = 240.0
"""Generous: on a machine of its own what is waited for takes a few seconds."""
_BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@contextmanager
def compete(cores: Sequence[int]) -> Iterator[None]:
    """Run a busy loop on each of these cores."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY, str(core)]) for core in cores]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def wait_or_skip(met: Callable[[], bool], noisy: Callable[[], bool], what: str, within_s: float = MOST_S) -> None:
    """Wait until it is so. Where somebody else takes the cores meanwhile, nothing is learnt: the test is skipped."""
    end_s, noisy_s = time.monotonic() + within_s, 0.0
    while not met():
        noisy_s = noisy_s + 0.2 if noisy() else 0.0
        if noisy_s > 2.0:
            pytest.skip(f"another program takes the cores of this machine: {what} cannot be seen")
        assert time.monotonic() < end_s, f"never: {what}"
        time.sleep(0.2)
