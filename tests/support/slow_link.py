"""A slow link in user space: a TCP relay that hands every byte on half a round trip later.

For kernels without `tc netem`, and for programs without the rights to use it. Bytes wait in order, each for as long as
the link takes, so the delay cuts no throughput. A bandwidth may be declared beside it: then bytes queue, as on a link.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from device_profiles.units import MS_PER_S

_READ_BYTES = 64 * 1024
_MOST_HELD_BYTES = 64 * 1024 * 1024  # on their way in one direction: more than any link of tests has in flight
_START_WITHIN_S = 10.0
_T = TypeVar("_T")


class DelayingRelay:
    """Listens on 127.0.0.1 and connects whoever comes to `upstream` (host, port). Runs in a thread of its own from
    `open` on; all methods are thread-safe.

    `rtt_ms`: there and back. `bytes_per_s`: each direction's bandwidth. `sent_bytes` counts what went to `upstream`,
    `returned_bytes` what came back, over all connections.
    """

    def __init__(self, upstream: tuple[str, int], rtt_ms: float, bytes_per_s: float = math.inf) -> None:
        if rtt_ms < 0.0 or bytes_per_s <= 0.0:
            raise ValueError(f"a link of {rtt_ms:g} ms and {bytes_per_s:g} bytes/s: neither may be less than nothing")
        self._upstream = upstream
        self._delay_s = rtt_ms / 2.0 / MS_PER_S
        self._bytes_per_s = bytes_per_s
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())  # epoll rounds up to whole milliseconds
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow link", daemon=True)
        self._flows = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Server | None = None
        self.sent_bytes = self.returned_bytes = 0

    @property
    def address(self) -> tuple[str, int]:
        """Where to connect to instead of to `upstream`."""
        host, port = self._listening.getsockname()
        return host, port

    def __enter__(self) -> DelayingRelay:
        self._thread.start()
        self._ask(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def freeze(self) -> None:
        """Hold all bytes from now on, on connections that stay open."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def thaw(self) -> None:
        """Let held bytes go on."""
        self._loop.call_soon_threadsafe(self._flows.set)

    def cut(self) -> None:
        """End all connections, in mid-stream. New ones are taken."""
        self._ask(self._cut())

    def close(self) -> None:
        """End all connections, and take no more. Idempotent."""
        if not self._thread.is_alive():
            return
        self._ask(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _ask(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_WITHIN_S)

    async def _open(self) -> None:
        self._flows.set()
        self._accepting = await asyncio.start_server(self._connect, sock=self._listening)

    async def _cut(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(self) -> None:
        if self._accepting is not None:
            self._accepting.close()
        await self._cut()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._upstream)
        for one in (writer, far_writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        directions = [
            asyncio.create_task(self._carry(reader, far_writer, self._count_sent)),
            asyncio.create_task(self._carry(far_reader, writer, self._count_returned)),
        ]
        try:
            # An end that hangs up ends both directions, when what it had sent has arrived.
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            far_writer.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None]
    ) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_HELD_BYTES // _READ_BYTES)
        handing_on = asyncio.create_task(self._hand_on(under_way, writer))
        free_s = 0.0  # when the last byte before has left the sender
        try:
            while data := await reader.read(_READ_BYTES):
                count(len(data))
                free_s = max(free_s, self._loop.time()) + len(data) / self._bytes_per_s
                await under_way.put((free_s + self._delay_s, data))
            await under_way.put((self._loop.time() + self._delay_s, b""))
            await handing_on
        finally:
            handing_on.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await handing_on

    async def _hand_on(self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due_s, data = await under_way.get()
            await asyncio.sleep(due_s - self._loop.time())
            await self._flows.wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()

    def _count_sent(self, count: int) -> None:
        self.sent_bytes += count

    def _count_returned(self, count: int) -> None:
        self.returned_bytes += count
