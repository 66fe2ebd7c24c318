"""How long a request may take, and what its reader gets when that is over."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from orchestrator.clock import Clock
from orchestrator.daemon.control.streams.streams import Stream
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import DEADLINE, Delta


def deadline_s(submit: Submit, request_timeout_s: float, clock: Clock) -> float:
    """Return when the request's time is over, by the clock. `request_timeout_s`: the longest for any, 0 is no limit."""
    bounds = [bound for bound in (submit.timeout_s, request_timeout_s) if bound > 0.0]
    return clock.monotonic_s() + min(bounds, default=math.inf)


@dataclass(slots=True, eq=False)
class Reader:
    """Who reads a stream. `items` holds what was not read yet: never more than `max_tokens` deltas."""

    stream: Stream
    items: asyncio.Queue[Delta | RequestError] = field(default_factory=asyncio.Queue)


async def next_item(reader: Reader, end_s: float, clock: Clock) -> Delta | RequestError:
    """Return what comes next; at the deadline the end of what there is, or an error where there is nothing."""
    if end_s == math.inf:
        return await reader.items.get()
    try:
        async with asyncio.timeout(end_s - clock.monotonic_s()):
            return await reader.items.get()
    except TimeoutError:
        if reader.stream.committed:
            return Delta(reader.stream.key, [], DEADLINE, reader.stream.last_stats)
        message = "the request's time was over before its first token came; give it longer, or try again later"
        return RequestError(message, status=504, kind="server_error", code="deadline_exceeded", param="timeout_s")
