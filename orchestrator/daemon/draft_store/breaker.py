"""When a store that failed is asked again: after a while, which grows with each failure in a row."""

from __future__ import annotations

from orchestrator.clock import Clock

# ADR 0072: three failures in a row.
_FAILURES = 3
# ADR 0072. Not tuned.
_FIRST_WAIT_S = 0.5
# ADR 0072. Not tuned: a lost store costs drafts alone.
_LONGEST_WAIT_S = 30.0


class Breaker:
    """Closed while the store works. After three failures in a row it is asked once in a while, until it answers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._again_s = 0.0
        self.why = ""
        """The last failure; "" while the store works."""

    @property
    def is_open(self) -> bool:
        """Whether the store counts as away."""
        return self._failures >= _FAILURES

    def may_ask(self) -> bool:
        """Return whether to ask now. One that is told so while the breaker is open tries for all."""
        if not self.is_open:
            return True
        now_s = self._clock.monotonic_s()
        if now_s < self._again_s:
            return False
        self._again_s = now_s + self._wait_s()
        return True

    def observe_failure(self, why: str) -> None:
        """The store failed."""
        self._failures += 1
        self.why = why
        self._again_s = self._clock.monotonic_s() + self._wait_s()

    def observe_success(self) -> None:
        """The store answered."""
        self._failures = 0
        self.why = ""

    def _wait_s(self) -> float:
        doublings = min(max(0, self._failures - _FAILURES), 10)
        return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * float(1 << doublings))
