"""Wakes a thread that waits for sockets."""

from __future__ import annotations

import socket
from contextlib import suppress


class Bell:
    """`heard` is readable once it has rung, until `hush`."""

    def __init__(self) -> None:
        self.heard, self._rope = socket.socketpair()
        self._rope.setblocking(False)

    def ring(self) -> None:
        """Thread-safe; nothing happens when it is closed."""
        with suppress(OSError):  # BlockingIOError too: it rings enough
            self._rope.send(b"!")

    def hush(self) -> None:
        """Take the rings that are there."""
        self.heard.recv(4096)

    def close(self) -> None:
        """Idempotent."""
        self.heard.close()
        self._rope.close()
