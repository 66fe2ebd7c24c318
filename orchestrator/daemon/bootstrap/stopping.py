"""How a daemon is told to stop: once to drain, and by a second Ctrl-C to end at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import TypeVar

from orchestrator.clock import Clock
from orchestrator.telemetry import get_logger

_ONE_PRESS_S = 0.3  # a terminal, and a program that passes signals on, may both send one Ctrl-C

_T = TypeVar("_T")
_log = get_logger(__name__)


class Stopping:
    """`asked`: the daemon is to drain and end. `hurried`: it is to end without waiting for its streams."""

    def __init__(self, clock: Clock) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self._clock = clock
        self._asked_s = 0.0

    def observe_signal(self, number: int) -> None:
        """Take SIGTERM or SIGINT. Only the second SIGINT hurries: service managers may repeat SIGTERM."""
        now_s = self._clock.monotonic_s()
        if not self.asked.is_set():
            self._asked_s = now_s
            self.asked.set()
            _log.info("told to stop: running streams are finished; Ctrl-C once more ends at once")
        elif number == signal.SIGINT and now_s - self._asked_s >= _ONE_PRESS_S and not self.hurried.is_set():
            _log.warning("ends at once, as Ctrl-C was pressed again")
            self.hurried.set()


async def run_until(event: asyncio.Event, work: Coroutine[object, object, _T]) -> _T | None:
    """Return what comes of this; None where the event comes before, which ends it. Raises what it raises."""
    task, coming = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, coming}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        coming.cancel()
        if task.cancel():
            with contextlib.suppress(asyncio.CancelledError):
                await task
