"""Waits for what is going to happen."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import psutil

_SHORTEST_S, _LONGEST_S = 0.02, 0.2
_TICK_S = 0.001


class RunningTime:
    """Time that stands still where the machine does, or where somebody else has it: another thread counts what it
    slept. What is bounded by it was late by its own doing."""

    def __enter__(self) -> RunningTime:
        self._ticks, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._count, name="running time", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def read_s(self) -> float:
        """Return the seconds since it was entered, at most."""
        return self._ticks * _TICK_S

    def _count(self) -> None:
        while not self._over.is_set():
            time.sleep(_TICK_S)
            self._ticks += 1


def until(happened: Callable[[], Any], seconds: float = 240.0, what: str = "it never happened") -> None:
    """Look again and again until this is true; `what` is said where it never is. A pause is as long as the look before
    it: whoever waits leaves the machine to what it waits for."""
    looking_s = now_s = time.monotonic()
    deadline = now_s + seconds
    while not happened():
        now_s = time.monotonic()
        assert now_s < deadline, what
        time.sleep(min(max(_SHORTEST_S, now_s - looking_s), _LONGEST_S))
        looking_s = time.monotonic()


async def until_async(happened: Callable[[], Any], seconds: float = 240.0) -> None:
    """The same of what happens in this event loop."""
    async with asyncio.timeout(seconds):
        while not happened():  # noqa: ASYNC110 -- tests look from outside
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended. One that has may wait for whoever adopted it to look."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
