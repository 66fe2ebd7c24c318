"""What a link's round trip takes, measured on the link itself: by its greeting, and by answers that were waited for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_SAMPLES = 32  # the least of so many counts: what is above it is not the link's


@dataclass(slots=True)
class RoundTrip:
    """The least of the newest samples, in ms; each is a time there and back, without what the other side is known to
    have taken."""

    _newest_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    @property
    def best_ms(self) -> float:
        return min(self._newest_ms, default=0.0)

    def observe_trip(self, took_ms: float) -> None:
        self._newest_ms.append(max(0.0, took_ms))
