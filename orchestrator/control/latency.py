"""How long requests took of late: when the next one can be expected to begin, and when a place may be free."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from device_profiles.units import MS_PER_S
from orchestrator.workers.messages import RequestStats
from policies.serving.slo import predict_ttft_ms

MAX_RETRY_AFTER_S = 30
_REMEMBERED_ENDS = 8
_FIRST_OUTPUT_TOKENS = 128.0
_NEWEST = 0.1  # weight of the newest end in running means


@dataclass(frozen=True, slots=True)
class TypicalTimes:
    """Running means of the times that requests take once they run: to their first token, and from there to their end.
    None before the first."""

    prefill_ms: float | None = None
    decode_ms: float | None = None

    def observe_request_start(self, stats: RequestStats | None) -> TypicalTimes:
        """A request got its first token."""
        return self if stats is None else TypicalTimes(_mean(self.prefill_ms, stats.prefill_ms), self.decode_ms)

    def observe_request_end(self, decode_ms: float) -> TypicalTimes:
        """A request ended, so long after its first token."""
        return TypicalTimes(self.prefill_ms, _mean(self.decode_ms, decode_ms))

    def ttft_ms(self, live: int, places: int) -> float:
        """Return when the first token of a request can be expected that comes now, where `live` ones have `places`
        (1 or more) to run in; 0 where that is not known."""
        if self.decode_ms is None or self.prefill_ms is None:
            return 0.0
        gap_ms = (self.prefill_ms + self.decode_ms) / places
        return predict_ttft_ms(live + 1 - places, gap_ms, self.prefill_ms)


class RecentLatency:
    """Learns from the streams of one target."""

    def __init__(self) -> None:
        self.times = TypicalTimes()
        self._output_tokens = _FIRST_OUTPUT_TOKENS
        self._ends_s: deque[float] = deque(maxlen=_REMEMBERED_ENDS)
        self._promised_s = 0.0

    @property
    def output_tokens(self) -> int:
        """How many tokens an output has, on the mean of the last ones."""
        return max(1, round(self._output_tokens))

    def observe_first_token(self, stats: RequestStats | None) -> None:
        """A stream got its first token."""
        self.times = self.times.observe_request_start(stats)

    def observe_end(self, now_s: float, first_token_s: float | None, tokens: int) -> None:
        """A stream ended with so many tokens. `first_token_s`: None where its first one came from a lost worker."""
        self._ends_s.append(now_s)
        if first_token_s is not None:
            self.times = self.times.observe_request_end((now_s - first_token_s) * MS_PER_S)
        self._output_tokens += _NEWEST * (tokens - self._output_tokens)

    def promise_place(self, now_s: float) -> int:
        """Return after how many seconds a request that is refused now may find a place. Each refused one is promised
        the next place to get free, so that they do not all come back for one."""
        self._promised_s = min(max(now_s, self._promised_s) + self._gap_s(), now_s + MAX_RETRY_AFTER_S)
        return max(1, math.ceil(self._promised_s - now_s))

    def _gap_s(self) -> float:
        """Return the mean time between the last ends of streams; 0 where there were none."""
        if len(self._ends_s) < 2:
            return 0.0
        return (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _NEWEST * (now - before)
