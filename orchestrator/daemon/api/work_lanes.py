"""Work on bodies off the event loop: parsing, chat templates, tokenising. Small bodies do not wait behind large ones.

Tokenising and compiling give up the GIL; parsing and templates do not, so their size is bounded before (body_bounds).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import nullcontext
from http import HTTPStatus
from typing import TypeVar

from orchestrator.errors import RequestError
from orchestrator.side_lane import SideLane

LARGE_BYTES = 32 * 1024
PATIENCE_S = 1.0
BODY_TURN = "the body's turn to be translated"
_T = TypeVar("_T")


class WorkLanes:
    """Runs work for at most `timeout_s`, the wait for its turn included."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._small = SideLane("small bodies", gives_way=False)
        self._large = SideLane("large bodies", gives_way=True)

    async def do(self, size_bytes: int, work: Callable[..., _T], *arguments: object) -> _T:
        """Return the result of work on so many bytes. Raises RequestError 429 where its turn does not come in time,
        400 where it takes too long, and whatever the work raises. Work that nobody waits for never begins."""
        lane = self._large if size_bytes > LARGE_BYTES else self._small
        task = lane.submit(work, *arguments)
        # What is small and takes long is no reason for others to wait.
        going_on = lane.going_on(task, PATIENCE_S) if lane is self._small else nullcontext()
        try:
            with going_on:
                async with asyncio.timeout(self.timeout_s):
                    return await asyncio.wrap_future(task)
        except TimeoutError:
            if not task.cancelled():
                lane.leave_behind(task)
                raise RequestError(
                    f"this body takes longer than {self.timeout_s:g} s to translate; send a smaller one",
                    code="body_too_slow",
                ) from None
            raise miss_turn(BODY_TURN, self.timeout_s, self.timeout_s / 2) from None


def miss_turn(what: str, waited_s: float, retry_after_s: float) -> RequestError:
    """Return what a request is told whose turn did not come in time: that it may be sent again."""
    return RequestError(
        f"{what} did not come within {waited_s:.3g} s; send it again",
        status=HTTPStatus.TOO_MANY_REQUESTS,
        kind="rate_limit_error",
        code="translation_timeout",
        retry_after_s=max(1, math.ceil(retry_after_s)),
    )
