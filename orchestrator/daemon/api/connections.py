"""Connections that may be slow, idle or many: uvicorn's HTTP protocol with deadlines, and a limit on their number.

A connection is idle (nothing of a request has come), sends its head, sends its body, or is answered. The first three
end at a deadline of their own. An answer is cut where its reader stopped reading: `write_timeout_s` after the buffer
was full, unless there was room again. Where there are too many connections, the one that was idle for longest goes.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import h11
import psutil
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.config.model import Api
from orchestrator.telemetry import get_logger

SEND_BUFFER_BYTES = 256 * 1024
"""What the kernel keeps of an answer that is not read; more stays in the process, and then the stream waits. ADR
0047."""
_RESERVED_FILES = 256
"""Files that connections leave free: workers, logs, the admin socket, a model that is loaded. ADR 0047. Not tuned."""
# ADR 0047: a reader that stopped reading, in a drain.
_HURRIED_WRITE_S = 5.0
# ADR 0047: closed at once, TCP would take the refusal back.
_LINGER_S = 2.0
# ADR 0047: bounds memory; whoever is beyond is closed at once.
_MOST_LINGERING = 128
# ADR 0047: the kernel keeps those that are not taken in at once. Linux's usual most.
_WAITING_CONNECTIONS = 4096

Phase = Literal["idle", "head", "body", "answer"]
_log = get_logger(__name__)


def raise_open_files(wanted: int) -> int:
    """Raise the soft limit on open files so that there is room for so many connections; returns how many have room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = psutil.Process().num_fds()
    target = wanted + opened + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < target:
        soft = target if hard == resource.RLIM_INFINITY else min(hard, target)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - opened - _RESERVED_FILES)
    return max(16, room)


class Connections:
    def __init__(self, limits: Api) -> None:
        self.limits = limits
        self.closed: Counter[str] = Counter()
        self._open: dict[WatchedProtocol, None] = {}
        self._waiting: dict[WatchedProtocol, None] = {}  # idle ones and those that send a head, the oldest first

        self._lingering: set[WatchedProtocol] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def idle(self) -> int:
        return len(self._waiting)

    def hurry(self) -> None:
        """The daemon drains: readers that stopped reading are not waited for as long as before."""
        hurried = min(self.limits.write_timeout_s, _HURRIED_WRITE_S)
        self.limits = self.limits.model_copy(update={"write_timeout_s": hurried})
        for connection in list(self._open):
            connection.hurry()

    def add(self, connection: WatchedProtocol) -> bool:
        """Take in a connection; False where there is no room for it and none is idle."""
        if len(self._open) >= self.limits.max_connections:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                self.closed["full"] += 1
                return False
            oldest.end("shed")
        self._open[connection] = None
        return True

    def discard(self, connection: WatchedProtocol) -> None:
        self._open.pop(connection, None)
        self._waiting.pop(connection, None)
        self._lingering.discard(connection)

    def may_linger(self, connection: WatchedProtocol) -> bool:
        """Return whether a connection that was refused may stay open for a moment: so many may, beside the others."""
        if len(self._lingering) >= _MOST_LINGERING:
            return False
        self._lingering.add(connection)
        return True

    def note_phase(self, connection: WatchedProtocol, phase: Phase) -> None:
        self._waiting.pop(connection, None)
        if phase in ("idle", "head"):
            self._waiting[connection] = None


class WatchedProtocol(H11Protocol):
    """One connection of a server whose connections are all in `watch`."""

    def __init__(self, watch: Connections, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._watch = watch
        self._phase: Phase | None = None
        self._begun = False  # something of the next request has come
        self._ended = False  # what comes is dropped
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._watch.add(self):
            self._refuse(429, "too many connections are open; try again", "too_many_connections", retry_after_s=1)
            self._linger()
            return
        self._look()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._begun = True
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self._watch.discard(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP. A request whose body turns out so is over: the application's answer to it is dropped,
        as the connection has room for one."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self._close()
                return
        self._refuse(400, msg, "invalid_http")
        self._watch.discard(self)
        self._stop_timers()
        self._linger()

    def on_response_complete(self) -> None:
        """An answer is out: the connection is idle, or the next request is there already."""
        self._begun = False
        super().on_response_complete()
        self._unset_keepalive_if_required()  # our own deadline stands for it
        if self.transport.is_closing():
            self._abort_later()
        else:
            self._look()

    def pause_writing(self) -> None:
        """The reader is slow: it has `write_timeout_s` until there is room again."""
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None and not self.transport.is_closing():
            self._write_deadline.cancel()
            self._write_deadline = None

    def hurry(self) -> None:
        """Give a reader that keeps us waiting the limit that holds now."""
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
            self._abort_later()

    def end(self, reason: str, *, refused: bool = False) -> None:
        """Close a connection that is not answered now. `refused`: its client is to read what it was told."""
        self._watch.closed[reason] += 1
        self._watch.discard(self)
        self._stop_timers()
        if refused:
            self._linger()
        else:
            self._close()

    def _look(self) -> None:
        """See which phase this is, and set its deadline where it has just begun."""
        if self.transport.is_closing():
            self._stop_deadline()
            return
        if self._phase == "body" and self.conn.their_state is h11.IDLE:
            self._begun = False  # the rest of a body came behind its answer, and nothing else
        phase = self._find_phase()
        if phase == self._phase and phase != "idle":
            return
        self._phase = phase
        self._watch.note_phase(self, phase)
        self._stop_deadline()
        limits = self._watch.limits
        seconds = {"idle": limits.idle_timeout_s, "head": limits.header_timeout_s, "body": limits.body_timeout_s}
        if phase in seconds:
            self._deadline = self.loop.call_later(seconds[phase], self._time_out)

    def _find_phase(self) -> Phase:
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            return "head" if self._begun else "idle"
        return "body" if theirs is h11.SEND_BODY else "answer"

    def _time_out(self) -> None:
        self._deadline = None
        unanswered = self._phase == "head" or (self._phase == "body" and not self.cycle.response_started)
        if unanswered:
            self._refuse(408, f"the request's {self._phase} did not come in time; send it again", "request_timeout")
        _log.debug("connection timed out", phase=self._phase)
        self.end(f"{self._phase}_timeout", refused=unanswered)

    def _refuse(self, status: int, message: str, code: str, *, retry_after_s: int | None = None) -> None:
        """Write an answer past the application, which has none to give."""
        kind = "rate_limit_error" if status == 429 else "invalid_request_error"
        body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
        retry = f"Retry-After: {retry_after_s}\r\n" if retry_after_s is not None else ""
        phrase = {400: "Bad Request", 408: "Request Timeout", 429: "Too Many Requests"}[status]
        head = (
            f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"{retry}Connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)

    def _linger(self) -> None:
        """Say that no more comes, and close a while later: closed at once, with more to read, TCP takes back what was
        said. What still comes is dropped."""
        self._ended = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self._watch.may_linger(self):
            self._close()
            return
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:  # its client has gone, unnoticed where nothing more was read
            self._close()
            return
        self._deadline = self.loop.call_later(_LINGER_S, self._close)

    def _close(self) -> None:
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self._watch.limits.write_timeout_s, self._abort)

    def _abort(self) -> None:
        self._watch.closed["write_timeout"] += 1
        _log.info("connection cut: its reader does not read")
        self.transport.abort()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_timers(self) -> None:
        self._stop_deadline()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the daemon drains first."""

    def stop_listening(self) -> None:
        """Take no more connections in; where the socket is held elsewhere too, the kernel keeps them there."""
        for listener in self.servers if self.started else []:
            listener.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    handshake_timeout_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with a deadline for the handshakes of TLS: before they end no protocol knows the connection."""
        config, loop = self.config, asyncio.get_running_loop()
        deadline_s = self.handshake_timeout_s if config.ssl is not None else None

        def create_protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        self.servers = []
        for listener in sockets or []:
            server = await loop.create_server(
                create_protocol,
                sock=listener,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=deadline_s,
            )
            self.servers.append(server)
            listener.listen(_WAITING_CONNECTIONS)  # the kernel keeps those that are not taken in at once
        self.started = True
