"""The only place that asks the operating system for the time, so that everything else can be given one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time as an argument. `monotonic_s` never goes back; `wall_s` is seconds since the epoch."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        return time.perf_counter()

    def wall_s(self) -> float:
        return time.time()
