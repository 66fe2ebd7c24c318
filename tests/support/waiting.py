"""Waits for what is going to happen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(happened: Callable[[], Any], seconds: float = 240.0) -> None:
    """Look again and again until this is true."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
