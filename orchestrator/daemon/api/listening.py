"""The sockets that the API and the admin commands listen on, and what serves an app on them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.daemon.api.connections import SEND_BUFFER_BYTES, Connections, Server, WatchedProtocol
from orchestrator.errors import DaemonError

_SERVER_GRACE_S = 5  # what uvicorn waits behind the drain, whose bounds come first
_ACCEPTED_AT_ONCE = 32
"""Connections that the event loop takes in before it looks after anything else: asyncio's `backlog` is that, too. ADR
0047."""


@asynccontextmanager
async def serving(
    app: object, bound: socket.socket, watch: Connections | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """Serve an ASGI app on a bound socket; on the way out let running responses end, briefly. `watch`: what bounds its
    connections, where anybody may connect. `tls`: what encrypts them."""
    protocol: Any = PeerProtocol if watch is None else partial(WatchedProtocol, watch)
    settings = uvicorn.Config(
        app,  # type: ignore[arg-type]  # uvicorn's own alias is narrower than ASGI
        http=protocol,
        ws="none",
        backlog=_ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_SERVER_GRACE_S,
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
    )
    server = Server(settings)
    server.handshake_timeout_s = None if watch is None else watch.limits.header_timeout_s
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield server
    finally:
        server.should_exit = True
        await task


@contextmanager
def listen_tcp(host: str, port: int, given: socket.socket | None = None) -> Iterator[socket.socket]:
    """Bind the endpoint. `given`: a socket that listens already, to be served instead. Raises DaemonError."""
    if given is not None:
        with given:
            given.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            yield given
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named: without that small events wait 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        try:
            bound.bind((host, port))
            bound.listen()  # whoever learns the address from the admin socket may connect; see there
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DaemonError(
                f"cannot listen on {host}:{port}: {reason}; choose another with --host, --port or api in cluster.yaml"
            ) from error
        yield bound


@contextmanager
def listen_unix(path: Path, given: socket.socket | None = None) -> Iterator[socket.socket]:
    """Bind the admin socket for this user only; take over one that nobody listens on any more. `given`: a socket that
    listens already; its path belongs to whoever made it. Raises DaemonError."""
    if given is not None:
        with given:
            yield given
        return
    if not path.parent.is_dir():
        text = f"there is no directory {path.parent}: make it, or set api.admin_socket"
        raise DaemonError(f"cannot listen on the admin socket {path}: {text}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
                path.unlink()
            bound.bind(str(path))
            path.chmod(0o600)
            bound.listen()  # whoever sees the socket may connect; the answer comes when the app serves
        except OSError as error:
            taken = "another daemon may be using it: " if error.errno == errno.EADDRINUSE else ""
            raise DaemonError(
                f"cannot listen on the admin socket {path}: {error.strerror or error}; {taken}set api.admin_socket"
            ) from error
        inode = path.stat().st_ino
        try:
            yield bound
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:
                    path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


_CREDENTIALS: Final = struct.Struct("3i")  # ucred: pid, uid, gid


class PeerProtocol(H11Protocol):
    """One connection of a Unix socket. The scope's `client` says the peer as "uid 0, pid 123"."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = (read_peer(transport.get_extra_info("socket")), 0)


def read_peer(connection: socket.socket | None) -> str:
    """Return the peer's user and process, "" where the kernel does not say."""
    if connection is None or connection.family != socket.AF_UNIX:
        return ""
    try:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return ""
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return f"uid {uid}, pid {pid}"
