"""How far measuring is, for whoever waits for it: which piece, of how many, and the time, told every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from adapters.contract import Progress
from orchestrator.clock import Clock

# ADR 0108.
TELL_EVERY_S: Final = 4.0


class MeasuringProgress:
    """Tells of pieces of work that are done one after another, for `budget_s` at most. `predicted_s`: by title, what
    each is to take. `tell` takes a stage and the fraction of it that is done (negative: not known)."""

    def __init__(self, predicted_s: Mapping[str, float], budget_s: float, tell: Progress, clock: Clock) -> None:
        self._left_s, self._budget_s = dict(predicted_s), budget_s
        self._count = len(predicted_s)
        self._tell, self._clock = tell, clock
        self._began_s = clock.monotonic_s()
        self._done_s = 0.0
        self._title, self._stage, self._fraction, self._time = "", "", -1.0, ""

    @property
    def elapsed_s(self) -> float:
        """The seconds since this was made."""
        return self._clock.monotonic_s() - self._began_s

    def tell_beforehand(self) -> None:
        whole_s = sum(self._left_s.values())
        parts = ", ".join(f"{title} {seconds:.0f} s" for title, seconds in self._left_s.items())
        bound = " (placement.profile_budget_s)" if whole_s > self._budget_s else ""
        line = f"measuring what has no profile takes about {min(whole_s, self._budget_s):.0f} s{bound}: {parts}"
        self._tell(line, -1.0)

    def begin(self, title: str) -> None:
        self._title = title
        self.observe_stage("start", -1.0)

    def observe_stage(self, stage: str, fraction: float) -> None:
        """The piece that was begun last has come to this stage."""
        self._stage, self._fraction = stage, fraction
        self._repeat()

    def end(self, title: str) -> None:
        self._left_s.pop(title, None)
        self._done_s = self.elapsed_s

    async def keep_telling(self) -> None:
        """Say how long it has taken and may still take, for ever."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            took_s = self.elapsed_s
            whole_s = min(self._budget_s, self._done_s + sum(self._left_s.values()))
            self._time = f" ({took_s:.0f} s of about {max(took_s, whole_s):.0f} s)"
            self._repeat()

    def _repeat(self) -> None:
        number = self._count - len(self._left_s) + 1
        self._tell(f"profile {self._title} ({number} of {self._count}): {self._stage}{self._time}", self._fraction)
