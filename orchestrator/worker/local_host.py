"""The process of a local worker: frames travel over a socket, never over stdout, because native libraries print there.

It begins with an inherited socket to the daemon. Where it listens for the next one, it outlives that daemon: it stops
decoding, keeps its model loaded, and waits a while for the next daemon to knock. Else it ends with its daemon.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from adapters.framing import add_header, receive_frames
from adapters.parent_process import end_with_parent
from orchestrator.protocol.commands import Cancel, Command, Stop, Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.draft_messages import DraftReady
from orchestrator.protocol.events import Event, MovedOut, Progress
from orchestrator.protocol.frames import ORPHAN_GRACE_S, Adoption, decode_commands, encode
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Gauges, Refused, RoundReport
from orchestrator.worker.host import EngineHost, die_before_the_daemon, end_process_with_its_threads

# ADR 0050: the last events are to get out; nobody waits for more. Not tuned.
_FLUSH_S = 2.0
# What whoever knocks may take to say who it is. ADR 0050. Not tuned.
_KNOCK_S = 2.0
_CREDENTIALS = struct.Struct("3i")


class StandingEvents:
    """What a daemon that comes later must hear: the effective state that was said last. Not thread-safe."""

    def __init__(self) -> None:
        self._last: dict[type[Event], Event] = {}

    def observe_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Ready | DraftReady):
                self._last.pop(Progress, None)
                self._last[type(event)] = event
            elif isinstance(event, Progress | Gauges):
                self._last[type(event)] = event

    def events(self) -> list[Event]:
        return list(self._last.values())


class LiveRequests:
    def __init__(self) -> None:
        self._ids: set[str] = set()

    def observe_commands(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                self._ids.add(command.request_id)
            elif isinstance(command, Cancel):
                self._ids.discard(command.request_id)

    def observe_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, RoundReport):
                for delta in event.deltas:
                    if delta.finish:
                        self._ids.discard(delta.request_id)
            elif isinstance(event, Refused | MovedOut):
                self._ids.discard(event.request_id)

    def cancel_all(self) -> list[Cancel]:
        """Return what ends them all; they are forgotten."""
        ids, self._ids = self._ids, set()
        return [Cancel(each) for each in sorted(ids)]


class DaemonChannel:
    """The host's way to its daemon, whichever that is now. `run_commands` and `run_events` have a thread each."""

    def __init__(self, host: EngineHost, link: socket.socket) -> None:
        self._host = host
        self._link: socket.socket | None = link
        self._lock = threading.Lock()  # of the link, for writing, and of the standing events
        self._standing = StandingEvents()
        self._requests = LiveRequests()
        self._ended = threading.Event()

    def mark_ended(self) -> None:
        """The engine has ended and all it said is sent: the process ends by itself."""
        self._ended.set()

    def run_events(self) -> None:
        """Send events until the engine has ended. What is said while there is no daemon is dropped."""
        for events in self._host.batches():
            self._requests.observe_events(events)
            with self._lock:
                self._standing.observe_events(events)
                if self._link is not None:
                    self._send(self._link, events)

    def _send(self, link: socket.socket, events: Sequence[Event]) -> None:
        """Send events. Where the daemon does not take them any more, whoever reads is told that it is gone."""
        try:
            link.sendall(add_header(encode(events)))
        except OSError as error:
            with suppress(OSError):
                print(f"the daemon takes no events any more: {error}", file=sys.stderr, flush=True)  # noqa: T201
            with suppress(OSError):
                link.shutdown(socket.SHUT_RD)

    def run_commands(self, link: socket.socket, listening: socket.socket | None, digest: str, wait_s: float) -> None:
        """Feed the engine; when there is no daemon any more, end this process, whatever the engine is doing."""
        self._obey_daemon(link)
        while listening is not None:
            self._become_orphan()
            adopted = _await_daemon(listening, digest, wait_s)
            if adopted is None:
                break
            link, wait_s = adopted
            self._greet(link)
            self._obey_daemon(link)
        # The engine may be where it takes no command: whoever waits for the end does not wait for that.
        threading.Thread(target=self._host.obey, args=([Stop()],), name="stop", daemon=True).start()
        self._ended.wait(ORPHAN_GRACE_S)
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(1)

    def _obey_daemon(self, link: socket.socket) -> None:
        for frame in receive_frames(link):
            commands = decode_commands(frame)
            self._requests.observe_commands(commands)
            self._host.obey(commands)

    def _become_orphan(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()
            self._link = None
        _block_on_output(False)
        if cancelled := self._requests.cancel_all():  # without any, nobody waits for an engine that is still loading
            self._host.obey(cancelled)

    def _greet(self, link: socket.socket) -> None:
        """Say to a new daemon what stands; what happens from now on follows."""
        _block_on_output(True)
        with self._lock:
            self._send(link, self._standing.events())
            self._link = link


def main() -> int:
    """Serve one engine over the socket `--fd`; returns the exit code."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's: it stops its workers in order
    parser = argparse.ArgumentParser(prog="python -m orchestrator.worker.local_host", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="an inherited socket to the daemon")
    parser.add_argument("--listen-fd", type=int, help="an inherited socket that listens for the next daemon")
    parser.add_argument("--digest", default="", help="who may take over: whoever wants this worker")
    parser.add_argument("--wait-s", type=float, default=0.0, help="how long to wait without a daemon")
    given = parser.parse_args()
    link = socket.socket(fileno=given.fd)
    listening = None if given.listen_fd is None else socket.socket(fileno=given.listen_fd)
    if listening is None:
        end_with_parent()
    first = next(receive_frames(link), None)
    if first is None:
        return 0
    spec = msgspec.msgpack.decode(first, type=WorkerSpec)
    host = EngineHost(spec.entry, spec.options, spec.cores)
    end_process_with_its_threads()
    die_before_the_daemon()
    channel = DaemonChannel(host, link)
    reading = (link, listening, given.digest, given.wait_s)
    threading.Thread(target=channel.run_commands, args=reading, name="commands", daemon=True).start()
    sender = threading.Thread(target=channel.run_events, name="events", daemon=True)
    sender.start()
    code = host.run()
    sender.join(_FLUSH_S)
    channel.mark_ended()
    return code


def _await_daemon(listening: socket.socket, digest: str, wait_s: float) -> tuple[socket.socket, float] | None:
    """Return the link to the next daemon that wants this worker, and how long to wait for the one behind it; None when
    none has come in time."""
    end_s = time.monotonic() + wait_s
    while (left_s := end_s - time.monotonic()) > 0.0:
        listening.settimeout(left_s)
        try:
            link, _ = listening.accept()
        except OSError:
            continue
        try:
            link.settimeout(_KNOCK_S)
            frame = next(receive_frames(link), None) if _is_ours(link) else None
            wanted = None if frame is None else msgspec.msgpack.decode(frame, type=Adoption)
        except (ValueError, msgspec.MsgspecError):
            wanted = None
        if wanted is not None and wanted.digest == digest:
            link.settimeout(None)
            return link, wanted.wait_s
        link.close()
    return None


def _is_ours(link: socket.socket) -> bool:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _block_on_output(blocking: bool) -> None:
    """Say whether printing waits for a reader: without a daemon there is none, and the engine must not wait."""
    for stream in (1, 2):
        with suppress(OSError):
            os.set_blocking(stream, blocking)


if __name__ == "__main__":
    sys.exit(main())
