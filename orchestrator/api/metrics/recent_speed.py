"""The two figures that people look for first, for `outrider status`: tokens/s, and the time to the first token."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from device_profiles.units import MS_PER_S
from orchestrator.api.metrics.request_timing import Recent
from orchestrator.clock import Clock

WINDOW_S = 30.0
"""The time that `tokens_per_s` looks back."""
_REQUESTS = 100  # of which medians are taken


class RecentSpeed:
    """What came out of late. Medians are of the last sequences, however long ago these were."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens = Recent(WINDOW_S)
        self._ttfts_s: deque[float] = deque(maxlen=_REQUESTS)
        self._tpots_s: deque[float] = deque(maxlen=_REQUESTS)

    def observe_tokens(self, count: int) -> None:
        """So many tokens were generated."""
        self._tokens.add(self._clock.monotonic_s(), count)

    def observe_first_token(self, ttft_s: float) -> None:
        """A sequence got its first token, so long after its request came."""
        self._ttfts_s.append(ttft_s)

    def observe_end(self, tpot_s: float | None) -> None:
        """A sequence has ended; `tpot_s`: its mean time from token to token, None up to one token."""
        if tpot_s is not None:
            self._tpots_s.append(tpot_s)

    def view(self) -> dict[str, Any]:
        """Return it for people; None for what is not known."""
        return {
            "window_s": WINDOW_S,
            "tokens_per_s": self._tokens.rate(self._clock.monotonic_s(), 0),
            "ttft_ms": median(self._ttfts_s) * MS_PER_S if self._ttfts_s else None,
            "stream_tokens_per_s": 1.0 / middle if self._tpots_s and (middle := median(self._tpots_s)) > 0.0 else None,
            "requests": len(self._ttfts_s),
        }
