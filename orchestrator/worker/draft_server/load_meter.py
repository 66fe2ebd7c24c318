"""What a draft worker is loaded with, told now and then to whoever decides how many of them there are to be."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.clock import Clock
from orchestrator.protocol.draft_messages import DraftLoad
from policies.running_mean import update_mean

EVERY_S = 1.0
IDLE_EVERY_S = 2.0
_NEWEST = 0.05  # weight of the newest pass in their mean times


@dataclass(slots=True)
class _Window:
    """Since when, and what happened since."""

    began_s: float
    busy_s: float = 0.0
    answers: int = 0
    crowded: int = 0


class LoadMeter:
    """Counts passes and answers over windows of EVERY_S. While nothing is done it tells that every IDLE_EVERY_S, as a
    sign of life to whoever is connected."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window = _Window(clock.monotonic_s())
        self._alone_s = self._shared_s = 0.0
        self._told: DraftLoad | None = None
        self._told_s = 0.0

    def observe_pass(self, took_s: float, targets: int, *, reads: bool) -> None:
        """A pass for so many targets is over. `reads`: it read a prompt, which tells nothing of what company costs."""
        self._window.busy_s += took_s
        if reads:
            return
        if targets > 1:
            self._shared_s = update_mean(self._shared_s or took_s, took_s, _NEWEST)
        else:
            self._alone_s = update_mean(self._alone_s or took_s, took_s, _NEWEST)

    def observe_answer(self, *, crowded: bool) -> None:
        """An answer went. `crowded`: drafts were cut short, and another target's had shared the passes for them."""
        self._window.answers += 1
        self._window.crowded += crowded

    def take_report(self, targets: int, sequences: int) -> DraftLoad | None:
        """Return the load of the window that is over; None while it goes on, and where there is nothing to tell."""
        now_s = self._clock.monotonic_s()
        window = self._window
        if now_s - window.began_s < EVERY_S:
            return None
        self._window = _Window(now_s)
        load = DraftLoad(
            targets=targets,
            sequences=sequences,
            busy=round(min(1.0, window.busy_s / (now_s - window.began_s)), 3),
            crowded=round(window.crowded / window.answers, 3) if window.answers else 0.0,
            slowdown=round(self._shared_s / self._alone_s, 3) if self._shared_s and self._alone_s else 0.0,
        )
        alive = targets > 0 and now_s - self._told_s >= IDLE_EVERY_S
        if load == self._told and not window.busy_s and not alive:
            return None
        self._told, self._told_s = load, now_s
        return load
