"""Finds that a host is cut off, from outside of whatever runs on it: its kernel answers, or nobody does."""

from __future__ import annotations

import asyncio
from contextlib import suppress

PATIENCE_S = 2.5
"""From the first attempt that failed to the last: with the one before and the one after it, 2.5 to 4 s."""

_EVERY_S = 0.5
_ATTEMPT_S = 1.0


async def wait_until_cut_off(ip: str, port: int) -> float:
    """Return for how many seconds a host has not answered, once that is too long.

    A busy host answers, and so does one whose process is stopped or dead: only connecting to the port is tried, and a
    refusal is an answer. Where this process stood still meanwhile, one attempt fails and the next does not.
    """
    loop = asyncio.get_running_loop()
    silent_since_s: float | None = None
    while True:
        began_s = loop.time()
        if await _answers(ip, port):
            silent_since_s = None
            await asyncio.sleep(_EVERY_S)
            continue
        silent_since_s = began_s if silent_since_s is None else silent_since_s
        if loop.time() - silent_since_s >= PATIENCE_S:
            return loop.time() - silent_since_s
        await asyncio.sleep(max(0.0, began_s + _EVERY_S - loop.time()))


async def _answers(ip: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_ATTEMPT_S):
            _, writer = await asyncio.open_connection(ip, port)
    except ConnectionRefusedError:
        return True
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
