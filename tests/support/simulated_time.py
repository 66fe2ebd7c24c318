"""A target whose forwards take simulated time, and requests that come at simulated times: nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from adapters.contract import ForwardResult, LoadOptions, Segment
from adapters.simulated.model import ToyModel
from adapters.simulated.script import Script
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import RoundReport
from orchestrator.worker.engine.loop import DecodeLoop
from policies.speculation.cost_model import TYPICAL

COST = TYPICAL.scale_by(10.0)
"""A forward of 1 row takes 10 ms, of 8 rows 15, of 16 rows 22, of 64 rows 60."""


class SimulatedClock:
    """Time that forwards move."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


class TimedModel(ToyModel):
    """The simulated model; its forwards move the clock by COST, or as a subclass says."""

    def __init__(self, clock: SimulatedClock, *, slots: int = 16, rows: int = 512) -> None:
        options = LoadOptions(device="SIM", kv_cache_bytes=8192 * 16 * 1024, max_batch_rows=rows, slots=slots)
        super().__init__(Script.parse(""), options)
        self._clock, self._cost = clock, COST

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        """See the contract."""
        ms = self._cost.ms(sum(len(segment.tokens) for segment in batch), len(batch))
        self._clock.now_s += ms / 1000.0
        return ForwardResult(super().forward(batch).logits, ms)


@dataclass
class Had:
    """What a request had. `came_s` and the times of its deltas are the clock's."""

    came_s: float
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return (self.times_s[0] - self.came_s) * 1000.0

    @property
    def tpot_ms(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) * 1000.0 / max(1, len(self.tokens) - 1)


@dataclass
class Served:
    """All requests in the order in which they came, and all rounds; after round i `moved[i]` are moved and
    `waiting[i]` wait."""

    had: dict[str, Had] = field(default_factory=dict)
    rounds: list[RoundReport] = field(default_factory=list)
    moved: list[set[str]] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    @property
    def levers(self) -> set[str]:
        """All that were ever moved."""
        return set().union(*self.moved)

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {key: one.tokens for key, one in self.had.items()}

    def late_ones(self, figure: Callable[[Had], float], rank: float = 95.0) -> float:
        """The percentile of a figure over the second half of the requests: what was moved has had its time."""
        half = list(self.had.values())[len(self.had) // 2 :]
        return float(np.percentile([figure(one) for one in half], rank))


def serve(loop: DecodeLoop, clock: SimulatedClock, arrivals: Sequence[tuple[float, Submit]]) -> Served:
    """Serve requests that come so many seconds after the beginning (ascending)."""
    start_s, left, served = clock.now_s, list(arrivals), Served()
    while left or not loop.idle:
        if loop.idle:
            clock.now_s = max(clock.now_s, start_s + left[0][0])
        while left and start_s + left[0][0] <= clock.now_s:
            after_s, submit = left.pop(0)
            assert loop.submit(submit, start_s + after_s) is None
            served.had[submit.request_id] = Had(start_s + after_s)
        served.rounds.append(loop.run_round())
        for delta in served.rounds[-1].deltas:
            one = served.had[delta.request_id]
            one.tokens.extend(delta.tokens)
            one.times_s.append(clock.now_s)
            one.rounds.append(len(served.rounds))
        state = loop.gauges(0)
        served.moved.append(set(state.slo.levers) if state.slo is not None else set())
        served.waiting.append(state.waiting)
    return served
