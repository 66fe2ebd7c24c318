"""When to say again how far a preparation is. No effects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from orchestrator.control.state import format_progress
from orchestrator.workers.messages import Progress

_AGAIN_S: Final = 4.0
"""Workers say every second how far a long stage is: so nobody waits for 5 s."""


@dataclass(slots=True)
class StageLog:
    """What was said of whose preparation last, and when."""

    _last: dict[str, tuple[str, float]] = field(default_factory=dict)

    def describe_news(self, name: str, progress: Progress, now_s: float) -> str:
        """Return the line to say now; "" where there is none. A stage is said once, and again every few seconds where
        it tells how far it is. One of which the figures alone have changed is the same. `name`: whose it is."""
        stage = "".join(letter for letter in progress.stage if not letter.isdigit())
        before, said_s = self._last.get(name, ("", 0.0))
        if stage == before and (progress.fraction < 0.0 or now_s - said_s < _AGAIN_S):
            return ""
        self._last[name] = stage, now_s
        return format_progress(progress) if stage == before else progress.stage
