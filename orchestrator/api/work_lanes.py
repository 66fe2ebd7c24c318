"""Work on bodies off the event loop: parsing, chat templates, tokenising. Small bodies do not wait behind large ones.

Each lane has one thread. The large lane's thread has the lowest priority: decoding on the same cores goes first.
Tokenising gives up the GIL, parsing and templates do not, so their size is bounded before (see body_bounds).
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from orchestrator.errors import RequestError

LARGE_BYTES = 32 * 1024
_LOWEST_PRIORITY = 19
_T = TypeVar("_T")


class WorkTooSlow(RequestError):
    """Work that had its turn, and took too long."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"this body takes longer than {timeout_s:g} s to translate; send a smaller one", code="body_too_slow"
        )
        self.timeout_s = timeout_s


class WorkLanes:
    """Runs work for at most `timeout_s`, the wait for its turn included."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._small = ThreadPoolExecutor(1, thread_name_prefix="small bodies")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large bodies", initializer=_give_way)

    async def do(self, size_bytes: int, work: Callable[..., _T], *arguments: object) -> _T:
        """Return the result of work on so many bytes. Raises RequestError 429 where it takes too long, and whatever
        the work raises. Work that has not begun by then never does; of work that has, WorkTooSlow is raised."""
        lane = self._large if size_bytes > LARGE_BYTES else self._small
        task = lane.submit(work, *arguments)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(task)
        except TimeoutError:
            if not task.cancelled():
                raise WorkTooSlow(self._timeout_s) from None
            raise RequestError(
                f"the body could not be translated within {self._timeout_s:g} s; send it again, or a smaller one",
                status=429,
                kind="rate_limit_error",
                code="translation_timeout",
                retry_after_s=max(1, math.ceil(self._timeout_s / 2)),
            ) from None


def _give_way() -> None:
    with suppress(OSError, AttributeError):  # Linux gives each thread a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
