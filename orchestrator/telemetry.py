"""The daemon's log: structlog over the standard library, so that libraries' records look the same.

Entries carry request ids; a request's text only where the operator asked for it (`logging.prompts`).
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO

import structlog

from orchestrator.log_ring import LogRing, RingHandler

_MOST_CAUSES = 8
_WORDS = ("prompt", "messages", "output")
"""Fields that have a request's text, with `logging.prompts`."""


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
        """Run one turn within it."""
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
