"""How long requests took of late: when the next one can be expected to begin, and when a place may be free."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from device_profiles.units import MS_PER_S
from orchestrator.protocol.rounds import RequestStats
from policies.running_mean import update_mean
from policies.serving.admission import expect_gap_s
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
        return self if stats is None else TypicalTimes(_mean(self.prefill_ms, stats.prefill_ms), self.decode_ms)

    def observe_request_end(self, decode_ms: float) -> TypicalTimes:
        """A request ended, so long after its first token."""
        return TypicalTimes(self.prefill_ms, _mean(self.decode_ms, decode_ms))

    @property
    def service_s(self) -> float | None:
        if self.decode_ms is None or self.prefill_ms is None:
            return None
        return (self.prefill_ms + self.decode_ms) / MS_PER_S

    def ttft_ms(self, live: int, places: int) -> float:
        """Return when the first token of a request can be expected that comes now, where `live` ones have `places`
        (1 or more) to run in; 0 where that is not known."""
        if self.decode_ms is None or self.prefill_ms is None:
            return 0.0
        gap_ms = (self.prefill_ms + self.decode_ms) / places
        return predict_ttft_ms(live + 1 - places, gap_ms, self.prefill_ms)


@dataclass(frozen=True, slots=True)
class Running:
    """The streams that there are: `slots` of them are decoded at a time. The oldest is there since `since_s`, by the
    clock. `left_s`: what the one that is nearest to its end needs at its own pace; None where that is not known."""

    slots: int
    since_s: float
    left_s: float | None = None


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
        self.times = self.times.observe_request_start(stats)

    def observe_end(self, now_s: float, first_token_s: float | None, tokens: int) -> None:
        """A stream ended with so many tokens. `first_token_s`: None where its first one came from a lost worker."""
        self._ends_s.append(now_s)
        if first_token_s is not None:
            self.times = self.times.observe_request_end((now_s - first_token_s) * MS_PER_S)
        self._output_tokens = update_mean(self._output_tokens, tokens, _NEWEST)

    def promise_place(self, now_s: float, running: Running, wanted: int = 1) -> int:
        """Return after how many seconds a request that is refused now may find the places that it wants. Each refused
        one is promised the next places to get free, so that they do not all come back for one."""
        ended_s = self._ends_s[-1] if self._ends_s else running.since_s
        gap_s = expect_gap_s(
            ends_gap_s=self._ends_gap_s(),
            service_s=self.times.service_s,
            slots=running.slots,
            left_s=running.left_s,
            waited_s=max(0.0, now_s - max(ended_s, running.since_s)),
        )
        self._promised_s = min(max(now_s, self._promised_s) + gap_s * wanted, now_s + MAX_RETRY_AFTER_S)
        return max(1, math.ceil(self._promised_s - now_s))

    def _ends_gap_s(self) -> float | None:
        """Return the mean time between the last ends of streams; None where there were no two."""
        if len(self._ends_s) < 2:
            return None
        return (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)


def _mean(before: float | None, now: float) -> float:
    return update_mean(now if before is None else before, now, _NEWEST)
