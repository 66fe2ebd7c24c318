"""Looks for workers that hang, by what each said last. No effects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.daemon.control.replicas.worker_life import WorkerLife
from policies.serving.failover.watchdog import FLOOR_S, judge_pulse, judge_silence

# ADR 0046: below PULSE_S, so that a hang is found a tick behind its bound.
TICK_S: Final = 0.2
# ADR 0046: when control itself was late it listens anew first. Two ticks.
_LATE_S: Final = 0.4


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker that loads, or has had streams since `since_s`."""

    life: WorkerLife
    loading: bool
    since_s: float = -math.inf


@dataclass(slots=True)
class Watch:
    """When to look next, and since when control listens without a gap. `patience_s`: how late words may come."""

    patience_s: float = FLOOR_S
    listens_s: float = -math.inf
    _due_s: float | None = None

    def find_hung(self, watched: Sequence[Watched], now_s: float) -> list[tuple[WorkerLife, str]]:
        """Return the workers that hang, and why. After a time in which control itself was not there it listens anew:
        the words of that time are still to be read."""
        if self._due_s is None or now_s < self._due_s:
            return []
        if now_s - self._due_s > _LATE_S:
            self.listens_s = now_s
        self._due_s = None
        return [(worker.life, why) for worker in watched if (why := self._judge(worker, now_s))]

    @property
    def scheduled(self) -> bool:
        return self._due_s is not None

    def schedule_look(self, now_s: float) -> float:
        """Return after how long to look again, once for each look."""
        self._due_s = now_s + TICK_S
        return TICK_S

    def _judge(self, worker: Watched, now_s: float) -> str:
        pulse = worker.life.pulse
        silent_s = now_s - max(worker.life.heard_s, self.listens_s, worker.since_s)
        expected_ms = max(worker.life.round_ms, pulse.expected_ms if pulse is not None else 0.0)
        silence = judge_silence(silent_s, expected_ms=expected_ms, loading=worker.loading, patience_s=self.patience_s)
        return silence or (judge_pulse(pulse) if pulse is not None else "")
