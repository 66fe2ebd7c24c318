"""What workers print (native libraries, tracebacks, crash dumps), as entries of the daemon's log."""

from __future__ import annotations

import asyncio
import os

from orchestrator.telemetry import get_logger

_CHUNK_BYTES = 65536  # of one read: what a pipe holds on Linux
_LONGEST_BYTES = 16384  # of one entry of the log. Not tuned.

_log = get_logger(__name__)


def say(worker: str, pid: int, line: str) -> None:
    if text := line.rstrip():
        _log.info("worker output", worker=worker, pid=pid, line=text)


async def follow(worker: str, pid: int, reading: int) -> None:
    """Log what comes out of a pipe, line by line, until nobody can write to it any more. Closes it."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
    )
    held = b""
    try:
        while data := await reader.read(_CHUNK_BYTES):
            *lines, held = (held + data).split(b"\n")
            if len(held) > _LONGEST_BYTES:  # somebody prints without end
                lines, held = [*lines, held], b""
            for line in lines:
                say(worker, pid, line.decode("utf-8", "replace"))
    finally:
        say(worker, pid, held.decode("utf-8", "replace"))
        transport.close()
