"""What other programs take of a device while something is measured on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from device_profiles.device_load import PROCESSOR, DeviceLoad, name_counters
from orchestrator.clock import Clock

_EVERY_S: Final = 1.0

Sample = Callable[[], Mapping[str, DeviceLoad]]


class OthersMeter:
    """Looks at a device between forwards, so that none of them is disturbed by it.

    `counters`: whose counters tell of the device. `threads` of `cores` are used; what others take of the remaining
    cores disturbs nobody. Both are 0 off the processor.
    """

    def __init__(self, sample: Sample, clock: Clock, counters: str, *, threads: int = 0, cores: int = 0) -> None:
        self._sample, self._clock, self._counters = sample, clock, counters
        self._threads, self._cores = threads, cores
        self._looked_s = -math.inf
        self._weighted, self._whole_s = 0.0, 0.0

    def begin(self) -> None:
        self._look()
        self._weighted = self._whole_s = 0.0

    def look_when_due(self) -> None:
        """Look, where that is some time ago. To be called while nothing is timed."""
        if self._clock.monotonic_s() - self._looked_s >= _EVERY_S:
            self._look()

    def read(self) -> float | None:
        """Return the mean share, 0 to 1, that others took since `begin`; None where nobody can tell."""
        self._look()
        return round(self._weighted / self._whole_s, 3) if self._whole_s else None

    def _look(self) -> None:
        load = self._sample().get(self._counters)
        now_s = self._clock.monotonic_s()
        if load is not None and load.others is not None and math.isfinite(self._looked_s):
            self._weighted += (now_s - self._looked_s) * find_taken(load.others, self._threads, self._cores)
            self._whole_s += now_s - self._looked_s
        self._looked_s = now_s


def find_taken(others: float, threads: int, cores: int) -> float:
    """Return the share of so many threads' time that others take, where they take the share `others` of all cores."""
    if not 0 < threads < cores:
        return min(1.0, others)
    return min(1.0, max(0.0, others * cores - (cores - threads)) / threads)


def name_measured(kind: str, device: str) -> str:
    """Return whose counters tell of a device of that kind: simulated ones run on the processor."""
    return PROCESSOR if kind in ("cpu", "simulated") else name_counters(device)
