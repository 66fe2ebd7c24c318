"""The daemon's log: structlog over the standard library, so that libraries' records look the same, and its newest lines
in memory, for `outrider logs` and the support bundle.

Entries carry request ids; a request's text only where the operator asked for it (`logging.prompts`).
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Final, NamedTuple, TextIO

import structlog

RING_BYTES: Final = 8 << 20
"""How much text the daemon keeps of its own log. ADR 0068. Not tuned."""
LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_MOST_CAUSES = 8  # of an exception, in one line. Not tuned.
_WORDS = ("prompt", "messages", "output")
"""Fields that have a request's text, with `logging.prompts`."""


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
        filters = (self.request, ("request_id", "id", "request")), (self.worker, ("worker", "replica"))
        return all(not name or _mentions(entry, name, keys) for name, keys in filters)


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


def setup_logging(level: str, style: str, stream: TextIO | None = None, ring: LogRing | None = None) -> None:
    """Write entries of `level` and above to `stream` (standard error): "json", "console", or "auto" by terminal. `ring`
    gets them too, as JSON, without texts of requests."""
    out = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    console = style == "console" or (style == "auto" and out.isatty())
    renderer: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=out.isatty())]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    if ring is not None:
        kept = RingHandler(ring)
        kept.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=shared,
                processors=[
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    structlog.processors.format_exc_info,
                    partial(_drop_texts, ring),
                    structlog.processors.JSONRenderer(),
                ],
            )
        )
        root.handlers.append(kept)
    set_level(level)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def set_level(level: str) -> None:
    """Write entries of this level and above from now on."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


def _drop_texts(ring: LogRing, _: Any, __: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Take requests' texts out of an entry: the ring has none, whatever the operator has written elsewhere. With
    `logging.prompts` exceptions and what workers say may hold some, too."""
    for key in _WORDS:
        entry.pop(key, None)
    for key in ("exception", "line") if ring.hides_words else ():
        if key in entry:
            entry[key] = "left out: logging.prompts is true, so it may hold a request's text; the log itself has it"
    return entry


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger that takes an event and key-value pairs."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


class LoopGuard:
    """Keeps a loop going: what breaks one of its turns is logged, once until a turn goes well again. `title` is the
    loop's name in the log."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._broken = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._broken:
                told = where_it_broke(error, words=False)
                get_logger(__name__).error(f"{self._title} failed; it goes on", exception=told)
            self._broken = True
        else:
            self._broken = False


def where_it_broke(error: BaseException, *, words: bool) -> str:
    """Return a traceback; without `words` it has the exceptions' types and places, and not what they say."""
    if words:
        return "".join(traceback.format_exception(error)).rstrip()
    causes: list[str] = []
    found: BaseException | None = error
    while found is not None and len(causes) < _MOST_CAUSES:
        frames = "".join(traceback.format_tb(found.__traceback__))
        causes.append(f"{frames}{type(found).__name__} (logging.prompts: true shows what it says)")
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return "\n\nraised from:\n".join(causes)
