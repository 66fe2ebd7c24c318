"""Waits for what is going to happen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

_SHORTEST_S, _LONGEST_S = 0.02, 0.2


def until(happened: Callable[[], Any], seconds: float = 240.0) -> None:
    """Look again and again until this is true. A pause is as long as the look before it: whoever waits leaves the
    machine to what it waits for."""
    looking_s = now_s = time.monotonic()
    deadline = now_s + seconds
    while not happened():
        now_s = time.monotonic()
        assert now_s < deadline, "it never happened"
        time.sleep(min(max(_SHORTEST_S, now_s - looking_s), _LONGEST_S))
        looking_s = time.monotonic()


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended. One that has may wait for whoever adopted it to look."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
