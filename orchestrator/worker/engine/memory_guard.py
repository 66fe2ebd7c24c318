"""Keeps forwards small for a while after one ran out of memory (policies.serving.batch_bound)."""

from __future__ import annotations

from orchestrator.clock import Clock
from orchestrator.protocol.rounds import MemoryBound
from policies.serving.batch_bound import BatchLimits, lift_bound, loosen, tighten


class MemoryGuard:
    """The bound of one loop's forwards. `failures` counts forwards that ran out of memory."""

    def __init__(self, limits: BatchLimits, clock: Clock) -> None:
        self.failures = 0
        self._limits = limits
        self._clock = clock
        self._bound = lift_bound(limits)
        self._last = ""

    @property
    def rows(self) -> int:
        return self._bound.rows

    @property
    def sequences(self) -> int:
        """The most sequences that may run now."""
        return self._bound.sequences

    def look(self) -> None:
        """Loosen the bound where it has stood long enough."""
        if self.failures:
            self._bound = loosen(self._bound, self._limits, self._clock.monotonic_s())

    def tighten(self, rows: int, sequences: int, reason: str) -> bool:
        """A forward of so many rows and sequences ran out of memory. False: there is no smaller one."""
        self.failures += 1
        self._last = reason
        now_s = self._clock.monotonic_s()
        tighter = tighten(self._bound, self._limits, rows=rows, sequences=sequences, now_s=now_s)
        if tighter is None:
            return False
        self._bound = tighter
        return True

    def state(self) -> MemoryBound | None:
        """Return the bound for people; None where there is none."""
        bound, limits = self._bound, self._limits
        if bound.rows >= limits.rows and bound.sequences >= limits.sequences:
            return None
        return MemoryBound(bound.rows, limits.rows, bound.sequences, bound.hold_s, self._last)
