"""The newest lines of the daemon's log, in memory: for `outrider logs` and the support bundle."""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, NamedTuple

RING_BYTES: Final = 8 << 20
"""How much text the daemon keeps of its own log."""

LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class LogLine(NamedTuple):
    """One entry: its number since the daemon started, when it was made (seconds since 1970), its severity as in
    `logging`, and itself as JSON."""

    number: int
    made_s: float
    severity: int
    text: str


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which entries are wanted: later than the one numbered `after`, not older than `since_s` (seconds since 1970), at
    least this severe, and about this request or worker. "" is about any."""

    after: int = 0
    since_s: float = 0.0
    severity: int = logging.DEBUG
    request: str = ""
    worker: str = ""

    def accepts(self, line: LogLine) -> bool:
        """Return whether a line is wanted. `after` and `since_s` are the ring's to look at."""
        if line.severity < self.severity or self.request not in line.text or self.worker not in line.text:
            return False
        if not (self.request or self.worker):
            return True
        entry = json.loads(line.text)
        asked = (self.request, ("request_id", "id", "request")), (self.worker, ("worker", "replica"))
        return all(not name or _mentions(entry, name, keys) for name, keys in asked)


@dataclass(frozen=True, slots=True)
class LogPage:
    """What a search found, oldest first. `left_out`: how many older ones were wanted, too; `next_after`: where the next
    search goes on; `forgotten`: how many entries the ring has dropped since the daemon started."""

    lines: tuple[LogLine, ...]
    left_out: int
    next_after: int
    forgotten: int


@dataclass(slots=True)
class LogRing:
    """Keeps the newest lines within `most_bytes` of text. Loggers add from any thread. `hides_words`: exceptions may
    hold requests' texts, so they are left out of new lines."""

    most_bytes: int = RING_BYTES
    hides_words: bool = False
    _lines: deque[LogLine] = field(default_factory=deque)
    _bytes: int = 0
    _newest: int = 0
    _lock: Lock = field(default_factory=Lock)

    def add(self, made_s: float, severity: int, text: str) -> None:
        """Add a line, and drop the oldest that have no room beside it."""
        with self._lock:
            self._newest += 1
            self._lines.append(LogLine(self._newest, made_s, severity, text))
            self._bytes += len(text)
            while self._bytes > self.most_bytes and len(self._lines) > 1:
                self._bytes -= len(self._lines.popleft().text)

    def search(self, wanted: LogFilter, most: int) -> LogPage:
        """Return the newest `most` lines that are wanted."""
        with self._lock:
            lines, newest = list(self._lines), self._newest
        found = list(_choose(lines, wanted))
        taken = found[:most]
        return LogPage(tuple(reversed(taken)), len(found) - len(taken), newest, newest - len(lines))


class RingHandler(logging.Handler):
    """Puts each record of the log into a ring, as its formatter renders it."""

    def __init__(self, ring: LogRing) -> None:
        super().__init__()
        self._ring = ring

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record. One that cannot be rendered is told as handlers do, and its caller goes on."""
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._ring.add(record.created, record.levelno, text)


def _choose(lines: list[LogLine], wanted: LogFilter) -> Iterator[LogLine]:
    """Yield the wanted lines, the newest first."""
    for line in reversed(lines):
        if line.number <= wanted.after or line.made_s < wanted.since_s:
            return
        if wanted.accepts(line):
            yield line


def _mentions(entry: dict[str, Any], name: str, keys: tuple[str, ...]) -> bool:
    """Return whether an entry is about what has this name: by a field, or by a word of its event."""
    if any(str(entry.get(key)) == name for key in keys):
        return True
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", str(entry.get("event"))) is not None
