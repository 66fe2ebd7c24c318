"""Runs inside a worker process and knows no Ray: hosts one engine, and carries its frames over a socket.

`EngineHost` is the part that every cluster shares. `main` is the process of the local runtime: frames travel
over an inherited socket, never over stdout, because native libraries print there.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from orchestrator.errors import WorkerStartFailed
from orchestrator.workers.contract import Engine, Step, WorkerSpec
from orchestrator.workers.cores import pin_to_cores
from orchestrator.workers.frames import decode_commands, encode
from orchestrator.workers.messages import Event, Failed, Stop
from orchestrator.workers.pulse import STARTING, PulseEmitter

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""A longer frame can only be a broken stream."""

NODE_ADDRESS = "OUTRIDER_NODE_ADDRESS"
"""The environment variable that says at which address other machines of the cluster reach this worker's."""

THREAD_DIED = 3
"""The exit code of a worker one of whose threads died."""

_ORPHAN_GRACE_S = 1.0
_OOM_SCORE_ABOVE, _MOST_OOM_SCORE = 500, 1000
_FLUSH_S = 2.0
_PR_SET_PDEATHSIG = 1


def load_engine(entry: str, options: dict[str, Any]) -> Engine:
    """Return what `entry` ("package.module:function") makes of the options.

    Raises WorkerStartFailed when there is no such function, and what the function itself raises.
    """
    module_name, colon, function_name = entry.partition(":")
    if not (module_name and colon and function_name):
        raise WorkerStartFailed(f"the worker's entry {entry!r} is not of the form package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise WorkerStartFailed(f"the worker cannot import {entry}: {error}; install outrider where it runs") from error
    return cast(Callable[[dict[str, Any]], Engine], function)(options)


class EventOutbox:
    """Events on their way out. `emit` never waits for the reader; the reader takes all there is as one frame.

    It needs no bound of its own: what may pile up is bounded by the `max_tokens` of the requests taken in.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def emit(self, event: Event) -> None:
        """Queue an event. Thread-safe."""
        self._events.put(event)

    def close(self) -> None:
        """Let `take` return [] once everything queued before has been taken."""
        self._events.put(None)

    def take(self) -> list[Event]:
        """Wait for an event and return it with all queued behind it; [] after `close`. One reader only."""
        event = self._events.get()
        taken: list[Event] = []
        while event is not None:
            taken.append(event)
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return taken
        if taken:
            self._events.put(None)  # the end is told by the next call, on its own
        return taken


class EngineHost:
    """One engine and its way in and out. `run` belongs to one thread, `deliver` and `frames` to one each. The process
    is pinned to `cores` before the engine's module is imported."""

    def __init__(self, entry: str, options: dict[str, Any], cores: Sequence[int] = ()) -> None:
        self._entry = entry
        self._options = options
        self._cores = cores
        self._engine: Engine | None = None
        self._loaded = threading.Event()
        self._outbox = EventOutbox()
        self._pulse = PulseEmitter(self._outbox.emit, self._describe_step)

    def run(self) -> int:
        """Load the engine and run it until it is stopped. Returns the exit code: 1 after an exception."""
        try:
            try:
                pin_to_cores(self._cores)
                self._pulse.start()
                self._engine = load_engine(self._entry, self._options)
            finally:
                self._loaded.set()
            self._engine.run(self._emit)
        except WorkerStartFailed as error:
            self._outbox.emit(Failed(str(error), restartable=False))
            return 1
        except Exception as error:
            traceback.print_exc()
            # An engine that cannot even be built is no better the second time; one that broke may be.
            self._outbox.emit(Failed(one_line(error), restartable=self._engine is not None))
            return 1
        finally:
            self._pulse.stop()
            self._outbox.close()
        return 0

    def _emit(self, event: Event) -> None:
        self._pulse.observe(event)
        self._outbox.emit(event)

    def _describe_step(self) -> Step | None:
        return self._engine.describe_step() if self._engine is not None else STARTING

    def deliver(self, frame: bytes) -> None:
        """Pass on a frame of commands, once the engine is there. Raises msgspec.DecodeError."""
        commands = decode_commands(frame)
        self._loaded.wait()
        if self._engine is not None:
            for command in commands:
                self._engine.submit(command)

    def frames(self) -> Iterator[bytes]:
        """Yield frames of events until the engine has ended. Blocks while there is none."""
        while events := self._outbox.take():
            yield encode(events)


def one_line(error: BaseException) -> str:
    """Return an exception as "Type: first line of its message"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def with_header(frame: bytes) -> bytes:
    """Return a frame as it travels over a socket: its length in 4 bytes, big endian, then the frame."""
    return len(frame).to_bytes(HEADER_BYTES, "big") + frame


def frame_length(header: bytes) -> int:
    """Return the length that a header announces. Raises ValueError when it cannot be one."""
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes was announced")
    return length


def main() -> int:
    """Serve one engine over the socket `--fd`; returns the exit code."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's: it stops its workers in order
    parser = argparse.ArgumentParser(prog="python -m orchestrator.workers.host", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="an inherited socket to the daemon")
    link = socket.socket(fileno=parser.parse_args().fd)
    end_with_parent()
    first = _receive_frame(link)
    if first is None:
        return 0
    spec = msgspec.msgpack.decode(first, type=WorkerSpec)
    host = EngineHost(spec.entry, spec.options, spec.cores)
    ended = threading.Event()
    end_process_with_its_threads()
    die_before_the_daemon()
    threading.Thread(target=_read_commands, args=(link, host, ended), name="commands", daemon=True).start()
    sender = threading.Thread(target=_send_events, args=(link, host), name="events", daemon=True)
    sender.start()
    code = host.run()
    sender.join(_FLUSH_S)
    ended.set()
    return code


def die_before_the_daemon() -> None:
    """Let the kernel choose this process before the daemon, which it inherits its score from, when memory is out."""
    score = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):  # not on Linux, or not allowed: then as before
        score.write_text(str(min(_MOST_OOM_SCORE, int(score.read_text()) + _OOM_SCORE_ABOVE)), encoding="ascii")


def end_process_with_its_threads() -> None:
    """End this process, with a reason, when any of its threads ends by an exception: it would decode for nobody."""
    threading.excepthook = _end_process


def _end_process(failed: threading.ExceptHookArgs) -> None:
    error = failed.exc_value or failed.exc_type()
    traceback.print_exception(error)
    name = failed.thread.name if failed.thread is not None else "unknown"
    print(f"the thread {name} died, and the worker with it: {one_line(error)}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(THREAD_DIED)


def end_with_parent() -> None:
    """Ask the kernel to kill this process with the daemon: the only way out of native code that hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _read_commands(link: socket.socket, host: EngineHost, ended: threading.Event) -> None:
    """Feed the engine; when the daemon is gone, end this process, whatever the engine is doing."""
    while (frame := _receive_frame(link)) is not None:
        host.deliver(frame)
    host.deliver(encode([Stop()]))
    ended.wait(_ORPHAN_GRACE_S)
    sys.stderr.flush()
    os._exit(1)


def _send_events(link: socket.socket, host: EngineHost) -> None:
    """Carry events to the daemon. Where it does not take them any more, the reader is told that it is gone."""
    for frame in host.frames():
        try:
            link.sendall(with_header(frame))
        except OSError as error:
            print(f"the daemon takes no events any more: {error}", file=sys.stderr, flush=True)  # noqa: T201
            with suppress(OSError):
                link.shutdown(socket.SHUT_RD)
            return


def _receive_frame(link: socket.socket) -> bytes | None:
    """Return the next frame; None at the end of the stream. Raises ValueError on a broken header."""
    header = _receive(link, HEADER_BYTES)
    return None if header is None else _receive(link, frame_length(header))


def _receive(link: socket.socket, length: int) -> bytes | None:
    data = bytearray(length)
    view, have = memoryview(data), 0
    while have < length:
        try:
            count = link.recv_into(view[have:])
        except OSError:
            return None
        if count == 0:
            return None
        have += count
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main())
