"""A proxy that speaks TLS for a server that does not, on a host of `hosts.py`."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.hosts import enter_host


@contextmanager
def speaking_tls(host: str, address: str, port: int, upstream_port: int, certificate: Path, key: Path) -> Iterator[str]:
    """Listen at an address of a host, and hand on to a port of its loopback. Yields the URL."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    loop, listens = asyncio.new_event_loop(), threading.Event()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while part := await reader.read(1 << 16):
                writer.write(part)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, to_them = await asyncio.open_connection("127.0.0.1", upstream_port)
        await asyncio.gather(carry(reader, to_them), carry(theirs, writer))

    def run() -> None:
        enter_host(host)
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(asyncio.start_server(connect, address, port, ssl=context))
        listens.set()
        loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert listens.wait(60.0)
        yield f"https://{address}:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
