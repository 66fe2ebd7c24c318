"""A throughput hill-climber, as in onnxruntime-genai: one depth for all, moved by trying its neighbours.

Over a window of rounds it keeps a moving average of the throughput and the acceptance rate (accepted / evaluated:
tokens behind the first rejection do not count). Under LOW acceptance it tries one token less, from HIGH up one more,
and keeps the new depth where the throughput is at least KEEP of what it was.
"""

from __future__ import annotations

from outrider_lab.replay.fixed import FixedDepth
from policies.running_mean import update_mean
from policies.speculation import RoundContext
from policies.speculation.policy import RoundOutcome

LOW, HIGH, KEEP = 0.50, 0.75, 0.97
WINDOW_ROUNDS = 8
_NEWEST = 0.25  # weight of the newest round in the moving average


class HillClimber(FixedDepth):
    """`depth` to begin with; it stays within 1 to `most`, since it has no rule for switching off."""

    def __init__(self, depth: int, most: int) -> None:
        super().__init__(depth, name="hill-climber")
        self._most = most
        self._before: tuple[int, float] | None = None  # depth and throughput before the trial that runs
        self._throughput = 0.0
        self._rounds = self._accepted = self._evaluated = 0

    def observe_round(self, now: RoundContext, done: RoundOutcome) -> None:
        """See the port."""
        if done.times is None:
            return
        rate = done.tokens / (done.times.forward_ms + done.times.draft_ms)
        self._throughput = update_mean(self._throughput, rate, _NEWEST if self._rounds else 1.0)
        self._accepted += sum(done.accepted)
        self._evaluated += sum(right + (right < depth) for right, depth in zip(done.accepted, done.depths, strict=True))
        self._rounds += 1
        if self._rounds >= WINDOW_ROUNDS:
            self._move()

    def _move(self) -> None:
        acceptance = self._accepted / self._evaluated if self._evaluated else 1.0
        if self._before is not None and self._throughput < KEEP * self._before[1]:
            self._depth, self._before = self._before[0], None
        else:
            wanted = self._depth - (acceptance < LOW) + (acceptance >= HIGH)
            wanted = min(max(wanted, 1), self._most)
            self._before = None if wanted == self._depth else (self._depth, self._throughput)
            self._depth = wanted
        self._rounds = self._accepted = self._evaluated = 0
