"""What is measured of sequences: each one's times, counts over the last seconds, and what people look for first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.rounds import RequestStats

_BUCKET_S = 1.0  # counts are kept by so much: a thirtieth of the window
WINDOW_S = 30.0
"""The time that rates and means of metrics and `outrider status` look back. Not tuned."""
_REQUESTS = 100  # of which medians are taken. Not tuned.
PERCENTILES: Final = (50, 95, 99)  # what operators name objectives by
MOST_SAMPLES: Final = 1000
"""The sequences that percentiles are taken of. Not tuned: ten of them are above the highest percentile."""


@dataclass(slots=True)
class SequenceTiming:
    """One sequence of a request as it came out of the decode loop. Times are seconds of the clock.

    `first` is the report of the loop with the first token, `stats` its last one. A worker that goes on after another
    one counts its own queue and prefill from there. `engine`: the replica that had it last. `prompt`: the number of
    its prompt, where the request has several.
    """

    prompt_tokens: int
    max_tokens: int
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    finish: str = ""
    first: RequestStats | None = None
    stats: RequestStats | None = None
    engine: int = 0
    prompt: int = 0

    @property
    def tpot_s(self) -> float | None:
        """(last - first token) / (tokens - 1); None up to one token."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


class RequestTotals(NamedTuple):
    """A request, all its sequences together: `tpot_s` is their mean. None where there was no token, or one only.
    `tolerated` of its `tokens` are not the target's own choice."""

    ttft_s: float | None
    tpot_s: float | None
    drafted: int
    accepted: int
    tokens: int = 0
    tolerated: int = 0

    @classmethod
    def of(cls, sequences: Sequence[SequenceTiming], started_s: float) -> RequestTotals:
        """Return what a request's sequences come to; it came at `started_s` (seconds of the clock)."""
        answered = [sequence for sequence in sequences if sequence.tokens]
        tpots = [sequence.tpot_s for sequence in answered if sequence.tpot_s is not None]
        first_s = min((sequence.first_s for sequence in answered), default=None)
        return cls(
            None if first_s is None else first_s - started_s,
            sum(tpots) / len(tpots) if tpots else None,
            sum(sequence.stats.drafted for sequence in answered if sequence.stats),
            sum(sequence.stats.accepted for sequence in answered if sequence.stats),
            sum(sequence.tokens for sequence in answered),
            sum(sequence.stats.tolerated for sequence in answered if sequence.stats),
        )

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def agreement(self) -> float | None:
        """The share of the tokens that are the target's own choice behind what is before them."""
        return 1.0 - self.tolerated / self.tokens if self.tokens else None


@dataclass(slots=True)
class Recent:
    """Sums over the last `window_s` seconds, to the nearest second. `add` and the sums take the time, in seconds."""

    window_s: float
    _buckets: deque[tuple[float, list[int]]] = field(default_factory=deque)
    _began_s: float | None = None

    def add(self, now_s: float, *counts: int) -> None:
        """Add to each of the sums; every call brings the same number of counts."""
        if self._began_s is None:
            self._began_s = now_s
        if self._buckets and now_s - self._buckets[-1][0] < _BUCKET_S:
            sums = self._buckets[-1][1]
            sums[:] = [old + new for old, new in zip(sums, counts, strict=True)]
            return
        self._forget(now_s)
        self._buckets.append((now_s, list(counts)))

    def sum(self, now_s: float, index: int) -> int:
        self._forget(now_s)
        return sum(counts[index] for _, counts in self._buckets)

    def rate(self, now_s: float, index: int) -> float:
        """Return one of the sums by the window, or by the time since the first `add` where that is shorter."""
        if self._began_s is None:
            return 0.0
        return self.sum(now_s, index) / min(self.window_s, max(_BUCKET_S, now_s - self._began_s))

    def _forget(self, now_s: float) -> None:
        while self._buckets and now_s - self._buckets[0][0] > self.window_s:
            self._buckets.popleft()


class RecentSpeed:
    """What came out of late. Medians are of the last sequences, however long ago these were."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens = Recent(WINDOW_S)
        self._ttfts_s: deque[float] = deque(maxlen=_REQUESTS)
        self._tpots_s: deque[float] = deque(maxlen=_REQUESTS)
        self._many: dict[str, deque[float]] = {name: deque(maxlen=MOST_SAMPLES) for name in ("ttft", "tpot")}

    def observe_tokens(self, count: int) -> None:
        self._tokens.add(self._clock.monotonic_s(), count)

    def observe_first_token(self, ttft_s: float) -> None:
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
        return {
            "window_s": WINDOW_S,
            "tokens_per_s": self._tokens.rate(self._clock.monotonic_s(), 0),
            "ttft_ms": median(self._ttfts_s) * MS_PER_S if self._ttfts_s else None,
            "stream_tokens_per_s": 1.0 / middle if self._tpots_s and (middle := median(self._tpots_s)) > 0.0 else None,
            "requests": len(self._ttfts_s),
        }
