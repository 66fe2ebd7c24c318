"""The daemon's log: structlog over the standard library, so that libraries' records look the same.

Entries carry request ids; a request's text only where the operator asked for it (`logging.prompts`).
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, TextIO

import structlog

_MOST_CAUSES = 8


def setup_logging(level: str, style: str, stream: TextIO | None = None) -> None:
    """Write entries of `level` and above to `stream` (standard error): "json", "console", or "auto" by terminal."""
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
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger that takes an event and key-value pairs."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


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
