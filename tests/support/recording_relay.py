"""What a server is asked, and what it answers, as its own bytes say: a TCP relay that keeps both."""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

_READ_BYTES = 64 * 1024
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_EVENT = re.compile(rb"data: (\{.*\})")


@dataclass
class Exchange:
    """A request that was posted, and what has come of its answer."""

    path: str
    body: dict[str, Any]
    answer: bytearray = field(default_factory=bytearray)

    def read_events(self) -> list[dict[str, Any]]:
        """Return what the answer's events say, of those that came whole."""
        return [json.loads(event) for event in _EVENT.findall(bytes(self.answer))]


class RecordingRelay:
    """Listens on 127.0.0.1 and connects whoever comes to `upstream`, a port there, while that listens. `exchanges`: in
    the order in which they were asked."""

    def __init__(self, upstream: int) -> None:
        self.exchanges: list[Exchange] = []
        self._upstream = upstream
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]

    def __enter__(self) -> RecordingRelay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # wakes the thread that waits
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near:
            try:
                far = socket.create_connection(("127.0.0.1", self._upstream))
            except OSError:
                return
            with far:
                recorder = _Recorder(self.exchanges)
                back = threading.Thread(target=_carry, args=(far, near, recorder.take_answer), daemon=True)
                back.start()
                _carry(near, far, recorder.take_request)
                back.join()


class _Recorder:
    """Takes one connection's bytes apart. Its requests come one after the other."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self._exchanges = exchanges
        self._unparsed = b""
        self._last: Exchange | None = None

    def take_request(self, data: bytes) -> None:
        self._unparsed += data
        while b"\r\n\r\n" in self._unparsed:
            head, _, rest = self._unparsed.partition(b"\r\n\r\n")
            length_field = _LENGTH.search(head)
            length = int(length_field[1]) if length_field else 0
            if len(rest) < length:
                return
            self._unparsed = rest[length:]
            body = json.loads(rest[:length]) if length else {}
            self._last = Exchange(head.split(b" ", 2)[1].decode(), body)
            if length:
                self._exchanges.append(self._last)

    def take_answer(self, data: bytes) -> None:
        if self._last is not None:
            self._last.answer += data


def _carry(source: socket.socket, target: socket.socket, note: Any) -> None:
    """Hand bytes on until one end is gone: then the other learns it, too."""
    with suppress(OSError):
        while data := source.recv(_READ_BYTES):
            note(data)
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
