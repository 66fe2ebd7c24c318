"""The log of this process, which tests leave as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

_LIBRARIES = ("httpx", "httpcore", "asyncio", "uvicorn.error")


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level, [logging.getLogger(name).level for name in _LIBRARIES]
    yield
    root.handlers[:], level, levels = before
    root.setLevel(level)
    for name, own in zip(_LIBRARIES, levels, strict=True):
        logging.getLogger(name).setLevel(own)
    structlog.reset_defaults()
