"""What people look for first, for `outrider status` and the dashboard: tokens/s, TTFT and TPOT of the last requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Final

import numpy as np

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.daemon.api.metrics.request_timing import Recent
from orchestrator.daemon.api.metrics.series import Engine, Registered

WINDOW_S = 30.0
"""The time that `tokens_per_s` looks back."""
_REQUESTS = 100  # of which medians are taken
PERCENTILES: Final = (50, 95, 99)
MOST_SAMPLES: Final = 1000
"""The sequences that percentiles are taken of."""


class RecentSpeed:
    """What came out of late. Medians are of the last sequences, however long ago these were."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens = Recent(WINDOW_S)
        self._ttfts_s: deque[float] = deque(maxlen=_REQUESTS)
        self._tpots_s: deque[float] = deque(maxlen=_REQUESTS)
        self._many: dict[str, deque[float]] = {name: deque(maxlen=MOST_SAMPLES) for name in ("ttft", "tpot")}

    def observe_tokens(self, count: int) -> None:
        """So many tokens were generated."""
        self._tokens.add(self._clock.monotonic_s(), count)

    def observe_first_token(self, ttft_s: float) -> None:
        """A sequence got its first token, so long after its request came."""
        self._ttfts_s.append(ttft_s)
        self._many["ttft"].append(ttft_s)

    def observe_end(self, tpot_s: float | None) -> None:
        """A sequence has ended; `tpot_s`: its mean time from token to token, None up to one token."""
        if tpot_s is not None:
            self._tpots_s.append(tpot_s)
            self._many["tpot"].append(tpot_s)

    def compute_percentiles_s(self) -> Mapping[str, Mapping[int, float]]:
        """Return PERCENTILES of "ttft" and "tpot", in seconds, of the last sequences; {} before there is one."""
        return {
            name: dict(zip(PERCENTILES, map(float, np.percentile(list(samples), PERCENTILES)), strict=True))
            for name, samples in self._many.items()
            if samples
        }

    def view(self) -> dict[str, Any]:
        """Return it for people; None for what is not known."""
        return {
            "window_s": WINDOW_S,
            "tokens_per_s": self._tokens.rate(self._clock.monotonic_s(), 0),
            "ttft_ms": median(self._ttfts_s) * MS_PER_S if self._ttfts_s else None,
            "stream_tokens_per_s": 1.0 / middle if self._tpots_s and (middle := median(self._tpots_s)) > 0.0 else None,
            "requests": len(self._ttfts_s),
        }


class PercentileSeries:
    """Percentiles of the last sequences, as metrics. No series before there is one."""

    def __init__(self, make: Registered, speed: RecentSpeed) -> None:
        self._speed = speed
        text = f"of the last {MOST_SAMPLES} sequences."
        self._gauges = {
            "ttft": make.gauge("recent_ttft_seconds", f"Percentiles of the TTFT {text}", "percentile"),
            "tpot": make.gauge("recent_tpot_seconds", f"Percentiles of the TPOT {text}", "percentile"),
        }

    def refresh(self, of: Engine) -> None:
        for name, percentiles in self._speed.compute_percentiles_s().items():
            for percentile, seconds in percentiles.items():
                self._gauges[name].labels(*of, str(percentile)).set(seconds)
