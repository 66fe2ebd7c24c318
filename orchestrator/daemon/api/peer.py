"""Who asks on a Unix socket: the kernel knows the user and the process at the other end."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

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
