"""Lets in whoever has a worker's key, each in a thread of its own: strangers hold up nobody, and nobody's work.

What is let in has been greeted already. Who takes longer over that than GREETING_S is hung up on. Where too many knock,
so is the one that has been at it for longest.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from adapters.framing import ProtocolError
from device_profiles.units import MS_PER_S
from orchestrator.protocol.links.endpoint import GREETING_S, EndpointServer, LinkLost

# ADR 0056: threads of strangers. Not tuned.
_MOST_KNOCKING = 32


class Bell:
    """Wakes a thread that waits for sockets: `heard` is readable once it has rung, until `hush`."""

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


class Guest(Protocol):
    def close(self) -> None:
        """Hang up. Idempotent."""
        ...


GuestT = TypeVar("GuestT", bound=Guest)


class Reception(Generic[GuestT]):
    """`meet` makes a guest of whoever has the key, in GREETING_S; it raises LinkLost, ProtocolError or OSError, and has
    closed the connection then. `arrived` is called, from any thread, with each guest."""

    def __init__(
        self, server: EndpointServer, meet: Callable[[socket.socket], GuestT], arrived: Callable[[GuestT], None]
    ) -> None:
        self._server = server
        self._meet = meet
        self._arrived = arrived
        self._bell = Bell()
        self._closed = False
        self._lock = threading.Lock()
        self._knocking: dict[socket.socket, float] = {}  # by since when
        self._thread = threading.Thread(target=self._keep, name="endpoint", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more, and wait until that is so. Idempotent."""
        self._closed = True
        self._bell.ring()
        self._thread.join(GREETING_S)
        self._hang_up(0)
        self._bell.close()

    def _keep(self) -> None:
        poll = select.poll()
        poll.register(self._bell.heard, select.POLLIN)
        for listening in self._server.listening:
            poll.register(listening, select.POLLIN)
        by_number = {listening.fileno(): listening for listening in self._server.listening}
        while not self._closed:
            for number, _ in poll.poll(MS_PER_S if self._knocking else None):
                if number in by_number:
                    self._accept(by_number[number])
            self._hang_up(_MOST_KNOCKING)

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):  # it has gone again
            knocking, _ = listening.accept()
            with self._lock:
                self._knocking[knocking] = time.monotonic()
            threading.Thread(target=self._greet, args=(knocking,), name="greeting", daemon=True).start()

    def _hang_up(self, most: int) -> None:
        """Hang up on whoever takes too long, and on the oldest of more than so many."""
        late_s = time.monotonic() - GREETING_S
        with self._lock:
            oldest = sorted(self._knocking, key=self._knocking.__getitem__)
            for number, knocking in enumerate(oldest):
                if number < len(oldest) - most or self._knocking[knocking] < late_s:
                    with suppress(OSError):
                        knocking.shutdown(socket.SHUT_RDWR)

    def _greet(self, knocking: socket.socket) -> None:
        guest: GuestT | None = None
        try:
            if (admitted := self._server.greet(knocking)) is not None:
                guest = self._meet(admitted)
                if self._leave(knocking) and not self._closed:
                    self._arrived(guest)
                    guest = None
        except (LinkLost, ProtocolError, OSError):
            pass  # whoever it was is told by the end of the connection
        finally:
            self._leave(knocking)
            if guest is not None:
                guest.close()

    def _leave(self, knocking: socket.socket) -> bool:
        with self._lock:
            return self._knocking.pop(knocking, None) is not None
