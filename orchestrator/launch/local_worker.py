"""A worker process on the daemon's own machine, as the daemon holds it.

A process held by a file descriptor: it is waited for and signalled without its number, which another may get.

Child processes and others are alike here, but for one thing: how a process ended is told to its parent alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from adapters.framing import add_header, read_frame
from orchestrator.errors import WorkerLost
from orchestrator.launch.homes import HomeRecord, WorkerHome, is_alive, read_birth
from orchestrator.machine.process_memory import KILLED_FOR_MEMORY, MemoryKillWatch
from orchestrator.protocol.commands import Command, Retune, Stop
from orchestrator.protocol.events import Event
from orchestrator.protocol.frames import decode_events, encode
from policies.serving.failover.blame import LossKind

KILL_S = 2.0
"""From SIGKILL to the end; only an uninterruptible wait takes longer. Not tuned."""
# From the last event to the end of the process. ADR 0050. Not tuned.
_TEARDOWN_S = 5.0
# From the end of the events to why they ended: failover waits for that. ADR 0050. Not tuned.
_CAUSE_S = 0.5
_TERM_S = 1.0  # from SIGTERM to SIGKILL. Not tuned.
_LAST_WORDS_S = 0.5  # what was printed may come behind the end. Not tuned.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)

_log = logging.getLogger(__name__)


class ProcessHandle:
    """One process, from the event loop that made the handle. `code` is its exit code, or minus the signal's number;
    None before its end, and where it is not our child."""

    def __init__(self, pid: int, descriptor: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.code: int | None = None
        self._descriptor = descriptor
        self._child = child
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._observe_end)

    @classmethod
    def of_child(cls, child: subprocess.Popen[bytes]) -> ProcessHandle:
        """Hold a child process, and reap it at its end. Nobody else may wait for it. Raises OSError."""
        return cls(child.pid, os.pidfd_open(child.pid), child)

    @classmethod
    def find(cls, pid: int, birth: str) -> ProcessHandle | None:
        """Hold the process with this number if it is the one that was born then (see `homes.read_birth`); None where
        that one has ended."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return None
        # The number stands for this process as long as the descriptor does, so what is read now is its own.
        if not is_alive(pid, birth):
            os.close(descriptor)
            return None
        return cls(pid, descriptor)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the process; False where it did not end in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self._ended.is_set()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended."""
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    async def end(self, grace_s: float, term_s: float, kill_s: float) -> bool:
        """Wait so long for the process to end by itself, then after SIGTERM, then after SIGKILL. Returns whether it
        has ended: one in an uninterruptible wait does not."""
        if await self.wait(grace_s):
            return True
        self.send_signal(signal.SIGTERM)
        if await self.wait(term_s):
            return True
        self.send_signal(signal.SIGKILL)
        return await self.wait(kill_s)

    def release(self) -> None:
        """Let go of a process that is still running. Idempotent."""
        if not self._ended.is_set():
            self._close()

    def _observe_end(self) -> None:
        if self._child is not None:
            with suppress(ChildProcessError):
                status = os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)
                if status is None:  # readable a moment before it can be reaped
                    return
                self.code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            self._child.returncode = 0 if self.code is None else self.code  # or it is taken for running
        self._close()
        self._ended.set()

    def _close(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def describe_end(code: int | None) -> str:
    """Return how a process ended, as in "exited with code 1"."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


@dataclass(frozen=True, slots=True)
class StartedProcess:
    name: str
    process: ProcessHandle
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: int
    """The descriptor that its output comes from."""
    home: WorkerHome | None


class LocalWorker:
    """Implements protocol.contract.Worker over a socket."""

    def __init__(
        self,
        started: StartedProcess,
        output: asyncio.Task[None],
        first: bytes,
        forget: Callable[[LocalWorker], None],
    ) -> None:
        self.name = started.name
        self.where = f"local pid {started.process.pid}"
        self.pids = (started.process.pid,)
        self._started = started
        self._process = started.process
        self._writer = started.writer
        self._output = output
        self._first = first
        self._forget = forget
        self._stopping = False
        self._kills = MemoryKillWatch()
        self._clearing = asyncio.create_task(self._clear(), name=f"clear {self.name}")
        self._ending: asyncio.Task[bool] | None = None

    def send(self, command: Command) -> None:
        self._stopping = self._stopping or isinstance(command, Stop)
        if isinstance(command, Retune) and self._started.home is not None:
            # It is no longer what its spec says: the next daemon is to start another one.
            record_home(self._started.home, HomeRecord(self._started.name, self._started.process.pid, "", ""))
        if not self._writer.is_closing():
            self._writer.write(add_header(encode([command])))

    async def events(self) -> AsyncIterator[Event]:
        """The end is told at once, also while the process is still ending."""
        try:
            if self._first:
                for event in decode_events(self._first):
                    yield event
            while (frame := await read_next_frame(self._started.reader)) is not None:
                self._kills.observe_alive()
                for event in decode_events(frame):
                    yield event
        except (ValueError, msgspec.DecodeError) as error:
            self._begin_end(0.0)
            raise WorkerLost(f"{self._describe_process()} sent what is no event: {error}") from error
        self._begin_end(_TEARDOWN_S)
        ended = await self._wait_end()
        if not self._stopping:
            kind = self._find_kind()
            how = describe_end(self._process.code) if ended else "closed its channel and has not ended yet"
            how = KILLED_FOR_MEMORY if kind == "memory" else how
            raise WorkerLost(f"{self._describe_process()} {how}", kind)

    async def stop(self, grace_s: float) -> None:
        """Bounded: a process that cannot be killed is logged, and left behind."""
        self.send(Stop())
        if not await self._end(grace_s):
            log_left_behind(self.name, self._process.pid)
            return
        await asyncio.wait([self._clearing])

    def _begin_end(self, grace_s: float) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(grace_s), name=f"end {self.name}")

    async def _end(self, grace_s: float) -> bool:
        return await self._process.end(grace_s, _TERM_S, KILL_S)

    async def _wait_end(self) -> bool:
        """Return whether the process has ended by now. What it said last comes before what is said about it."""
        if ended := await self._process.wait(_CAUSE_S):
            await asyncio.wait([self._clearing], timeout=_LAST_WORDS_S)
        return ended

    def _find_kind(self) -> LossKind:
        """Return how the worker was lost. How one ended that was adopted is not known: that says little of what it
        ran."""
        code = self._process.code
        if not self._process.ended or (code is not None and code not in _FROM_OUTSIDE):
            return "crashed"
        return "memory" if code in (None, -signal.SIGKILL) and self._kills.has_kill() else "killed"

    async def _clear(self) -> None:
        """Leave nothing behind, once the process has ended."""
        await self._process.wait()
        # A grandchild may hold the output open for ever.
        await asyncio.wait([self._output], timeout=_LAST_WORDS_S)
        self._output.cancel()
        await asyncio.wait([self._output])
        self._forget(self)
        if self._started.home is not None:
            self._started.home.remove()
        await close_link(self._writer)

    def _describe_process(self) -> str:
        return f"worker {self.name} (pid {self._process.pid})"


async def read_next_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next frame, None at the end of the stream. Raises ProtocolError."""
    try:
        return await read_frame(reader)
    except ConnectionError:
        return None


async def close_link(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def log_left_behind(name: str, pid: int) -> None:
    text = "worker %s (pid %d) does not end, not even when it is killed: it is left behind, with what it holds"
    _log.error(text, name, pid)


def record_home(home: WorkerHome, record: HomeRecord) -> None:
    """Write who lives in a home; without that the worker cannot be adopted, and ends by itself."""
    try:
        home.write_record(msgspec.structs.replace(record, birth=read_birth(record.pid)))
    except OSError as error:
        _log.warning("worker %s (pid %d) could not be adopted: %s", record.name, record.pid, error)
