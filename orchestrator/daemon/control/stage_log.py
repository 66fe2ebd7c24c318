"""When to say again how far a preparation is. No effects."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from orchestrator.daemon.control.state import format_progress
from orchestrator.protocol.events import Progress

_AGAIN_S: Final = 4.0
"""Workers say every second how far a long stage is: so nobody waits for 5 s."""


@dataclass(slots=True)
class StageLog:
    """What was said of whose preparation last, and when."""

    _last: dict[str, tuple[str, float]] = field(default_factory=dict)

    def describe_news(self, name: str, progress: Progress, now_s: float) -> str:
        """Return the line to say now; "" where there is none. A stage is said once, and again every few seconds where
        its figures have changed, or where it tells how far it is. `name`: whose it is."""
        before, said_s = self._last.get(name, ("", 0.0))
        same = _drop_figures(progress.stage) == _drop_figures(before)
        news = format_progress(progress) if same else progress.stage
        if same and (now_s - said_s < _AGAIN_S or news == before):
            return ""
        self._last[name] = news, now_s
        return news


def _drop_figures(line: str) -> str:
    return re.sub(r"[\d.,%]+", "", line).strip()
