"""Workers as subprocesses of the daemon, on its own machine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from adapters.framing import add_header, read_frame
from orchestrator.errors import WorkerLost, WorkerStartFailed
from orchestrator.launch.code_version import digest_code, digest_worker
from orchestrator.launch.homes import (
    HomeRecord,
    WorkerHome,
    list_homes,
    make_home,
    read_birth,
    read_guard,
    remove_guard,
    stock_spares,
    write_guard,
)
from orchestrator.launch.output import follow
from orchestrator.launch.process_handle import ProcessHandle, describe_end
from orchestrator.machine.process_memory import KILLED_FOR_MEMORY, MemoryKillWatch
from orchestrator.own_packages import with_our_packages
from orchestrator.protocol.adoption import ORPHAN_GRACE_S, Adoption
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.draft_messages import ChooseDrafters
from orchestrator.protocol.frames import decode_events, encode
from orchestrator.protocol.messages import Command, Event, Retune, Stop
from policies.serving.failover.blame import LossKind

_READ_AHEAD_BYTES = 1024 * 1024
_CLOSE_GRACE_S = 5.0
_TEARDOWN_S = 5.0  # from the last event to the end of the process
_CAUSE_S = 0.5  # from the end of the events to why they ended: failover waits for that
_TERM_S = 1.0  # from SIGTERM to SIGKILL
_KILL_S = 2.0  # from SIGKILL to the end; only an uninterruptible wait takes longer
_LAST_WORDS_S = 0.5
_ANSWER_S = 3.0  # an orphan that does not answer for so long hangs
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OrphanPolicy:
    """Workers outlive a daemon that is killed, and wait `wait_s` for the next one that has this `directory`."""

    directory: Path
    wait_s: float


class LocalCluster:
    """Implements protocol.contract.Cluster with subprocesses.

    Without `orphans` they end with the daemon. Start such workers from a thread that lives as long as they do: the
    kernel ends them with it. With `orphans`, whoever opens the cluster has the directory to itself.
    """

    runtime = "local"

    def __init__(self, orphans: OrphanPolicy | None = None) -> None:
        self._policy = orphans
        self._orphans: list[_Orphan] = []
        self._workers: set[LocalWorker] = set()
        self._ahead: dict[str, _Ahead] = {}  # by name
        self._opened = False
        self._guard: _Guard | None = None

    async def open(self) -> None:
        """See protocol.contract.Cluster. Looks for workers that the last daemon left behind."""
        if self._policy is None or self._opened:
            return
        self._opened = True
        digest_code()  # of the code as it is now, not as it is when a worker is started again
        try:
            homes = list_homes(self._policy.directory)
            with suppress(OSError):
                stock_spares(self._policy.directory)
            await _end_last_guard(self._policy.directory)
            self._guard = _start_guard(self._policy)
        except OSError as error:
            _log.warning("workers will end with the daemon: %s", error)
            self._policy = None
            return
        for home in homes:
            record = home.read_record()
            process = None if record is None else ProcessHandle.find(record.pid, record.birth)
            if record is None or process is None:
                home.remove()
            else:
                self._orphans.append(_Orphan(home, record, process))

    async def nodes(self) -> list[str]:
        """See protocol.contract.Cluster."""
        return [""]

    @property
    def own_node(self) -> str:
        """See protocol.contract.Cluster."""
        return ""

    @property
    def away(self) -> str:
        """See protocol.contract.Cluster."""
        return ""

    async def start(self, spec: WorkerSpec) -> LocalWorker:
        """See protocol.contract.Cluster. A worker that the last daemon left behind is adopted, if it is the same."""
        environment = _environment(spec)
        digest = digest_worker(spec, environment)
        if (ahead := self._ahead.pop(spec.name, None)) is not None:
            if ahead.digest == digest:
                return ahead.worker
            await ahead.worker.stop(0.0)
        while (orphan := self._take_orphan(spec.name, digest)) is not None:
            try:
                if orphan.record.digest == digest and (adopted := await self._adopt(orphan, digest)) is not None:
                    adopted.send(ChooseDrafters(None))  # nobody has chosen any since this daemon began
                    return adopted
                await self._end_orphan(orphan)
            except asyncio.CancelledError:
                self._orphans.append(orphan)  # for `close`
                raise
        return await self._spawn(spec, digest, environment)

    async def start_ahead(self, spec: WorkerSpec) -> None:
        """See protocol.contract.AheadCluster."""
        await self.open()
        worker = await self.start(spec)
        self._ahead[spec.name] = _Ahead(worker, digest_worker(spec, _environment(spec)))

    async def close(self) -> None:
        """See protocol.contract.Cluster."""
        orphans, self._orphans = self._orphans, []
        await asyncio.gather(
            *(worker.stop(_CLOSE_GRACE_S) for worker in tuple(self._workers)),
            *(self._end_orphan(orphan) for orphan in orphans),
        )
        guard, self._guard = self._guard, None
        if guard is not None:
            remove_guard(guard.directory)
            await guard.process.end(0.0, 0.0, _KILL_S)
            os.close(guard.pipe)

    def _take_orphan(self, name: str, digest: str) -> _Orphan | None:
        """Return the orphan to adopt; where there is none, one that is in the way of a new worker."""
        same = [orphan for orphan in self._orphans if orphan.record.digest == digest]
        found = next(iter(same or [orphan for orphan in self._orphans if orphan.record.name == name]), None)
        if found is not None:
            self._orphans.remove(found)
        return found

    async def _adopt(self, orphan: _Orphan, digest: str) -> LocalWorker | None:
        """Take an orphan over; None where it does not answer, or has ended."""
        assert self._policy is not None  # noqa: S101 -- or there were no orphans
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                link = orphan.home.connect()
                reader, writer = await asyncio.open_connection(sock=link, limit=_READ_AHEAD_BYTES)
                writer.write(add_header(msgspec.msgpack.encode(Adoption(digest, self._policy.wait_s))))
                first = await _read_frame(reader)
            output = orphan.home.open_output()
        except (OSError, ValueError) as error:  # of which TimeoutError is one
            name, pid = orphan.record.name, orphan.record.pid
            _log.warning("worker %s (pid %d) is not adopted: %s", name, pid, str(error) or "it does not answer")
            first = None
        if first is None or writer is None:
            if writer is not None:
                await _close(writer)
            return None
        _log.info("worker %s (pid %d) is adopted", orphan.record.name, orphan.record.pid)
        return self._follow(_Started(orphan.record.name, orphan.process, reader, writer, output, orphan.home), first)

    async def _end_orphan(self, orphan: _Orphan) -> None:
        """End a worker that this daemon has no use for; its memory is wanted."""
        ended = await orphan.process.end(0.0, ORPHAN_GRACE_S, _KILL_S)
        _log.info("worker %s (pid %d) of the last daemon is ended", orphan.record.name, orphan.record.pid)
        if not ended:
            _tell_left_behind(orphan.record.name, orphan.record.pid)
        orphan.home.remove()

    async def _spawn(self, spec: WorkerSpec, digest: str, environment: dict[str, str]) -> LocalWorker:
        ours, theirs = socket.socketpair()
        with ExitStack() as undo, theirs:
            try:
                reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_AHEAD_BYTES)
                undo.callback(writer.close)
                home = self._find_home(spec.name, undo)
                output, printing = os.pipe() if home is None else home.make_output()
                undo.callback(os.close, output)
                with os.fdopen(printing), ExitStack() as doors:
                    inherited, options = [theirs.fileno()], ["--fd", str(theirs.fileno())]
                    if home is not None and self._policy is not None:
                        door = doors.enter_context(home.open_door())
                        inherited.append(door.fileno())
                        options += ["--door", str(door.fileno()), "--digest", digest]
                        options += ["--wait-s", str(self._policy.wait_s)]
                    process = ProcessHandle.of_child(_popen(options, inherited, printing, environment))
            except OSError as error:
                raise WorkerStartFailed(f"worker {spec.name} cannot be started: {error}") from error
            undo.pop_all()
        if home is not None:
            _record(home, HomeRecord(spec.name, process.pid, "", digest))
        writer.write(add_header(msgspec.msgpack.encode(spec)))
        return self._follow(_Started(spec.name, process, reader, writer, output, home))

    def _find_home(self, name: str, undo: ExitStack) -> WorkerHome | None:
        """Return where a new worker lives; None where it is to end with the daemon, as it can live nowhere."""
        if self._policy is None:
            return None
        try:
            home = make_home(self._policy.directory, name)
        except OSError as error:
            _log.warning("worker %s will end with the daemon: %s", name, error)
            return None
        undo.callback(home.remove)
        return home

    def _follow(self, started: _Started, first: bytes = b"") -> LocalWorker:
        output = asyncio.create_task(
            follow(started.name, started.process.pid, started.output), name=f"output {started.name}"
        )
        worker = LocalWorker(started, output, first, self._workers.discard)
        self._workers.add(worker)
        return worker


@dataclass(frozen=True, slots=True)
class _Orphan:
    """A worker without a daemon."""

    home: WorkerHome
    record: HomeRecord
    process: ProcessHandle


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A worker that nobody follows yet. `digest`: of what was started."""

    worker: LocalWorker
    digest: str


@dataclass(frozen=True, slots=True)
class _Guard:
    """The process of orchestrator.launch.guard. `pipe` tells it of our end, `directory` has its homes."""

    process: ProcessHandle
    pipe: int
    directory: Path


@dataclass(frozen=True, slots=True)
class _Started:
    """A worker process, and all that connects it to the daemon. `output`: the descriptor that its output comes from."""

    name: str
    process: ProcessHandle
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: int
    home: WorkerHome | None


def _start_guard(policy: OrphanPolicy) -> _Guard:
    """Start the guard of this daemon's workers. Raises OSError."""
    heard, pipe = os.pipe()
    with os.fdopen(heard):
        arguments = [
            sys.executable,
            "-P",
            "-m",
            "orchestrator.launch.guard",
            str(policy.directory),
            str(policy.wait_s),
        ]
        environment = with_our_packages(dict(os.environ))
        child = subprocess.Popen(
            arguments,
            stdin=heard,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    process = ProcessHandle.of_child(child)
    try:
        write_guard(policy.directory, process.pid)
    except OSError:  # the next daemon could not end it, and it would end that one's workers
        child.kill()
        os.close(pipe)
        raise
    return _Guard(process, pipe, policy.directory)


async def _end_last_guard(directory: Path) -> None:
    """End the guard of the last daemon: its workers are ours from here on."""
    told = read_guard(directory)
    last = None if told is None else ProcessHandle.find(*told)
    if last is not None:
        await last.end(0.0, 0.0, _KILL_S)


def _popen(
    options: list[str], inherited: list[int], printing: int, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process in this thread, as asyncio would; its end is waited for by its ProcessHandle."""
    return subprocess.Popen(
        # -P, like the console script: a directory that happens to be called `adapters` is not ours
        [sys.executable, "-P", "-m", "orchestrator.worker.local_host", *options],
        pass_fds=inherited,
        stdin=subprocess.DEVNULL,
        stdout=printing,
        stderr=printing,
        env=environment,
        start_new_session=True,  # Ctrl-C on the terminal reaches the daemon alone, from the first instant
    )


def _record(home: WorkerHome, record: HomeRecord) -> None:
    """Write who lives in a home; without that the worker cannot be adopted, and ends by itself."""
    try:
        home.write_record(msgspec.structs.replace(record, birth=read_birth(record.pid)))
    except OSError as error:
        _log.warning("worker %s (pid %d) could not be adopted: %s", record.name, record.pid, error)


def _environment(spec: WorkerSpec) -> dict[str, str]:
    """Return the daemon's environment with the worker's additions, and with our packages importable."""
    return with_our_packages({**os.environ, **spec.environment})


class LocalWorker:
    """Implements protocol.contract.Worker over a socket."""

    def __init__(
        self,
        started: _Started,
        output: asyncio.Task[None],
        first: bytes,
        forget: Callable[[LocalWorker], None],
    ) -> None:
        self.name = started.name
        self.where = f"local pid {started.process.pid}"
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
        """See protocol.contract.Worker."""
        self._stopping = self._stopping or isinstance(command, Stop)
        if isinstance(command, Retune) and self._started.home is not None:
            # It is no longer what its spec says: the next daemon is to start another one.
            _record(self._started.home, HomeRecord(self._started.name, self._started.process.pid, "", ""))
        if not self._writer.is_closing():
            self._writer.write(add_header(encode([command])))

    async def events(self) -> AsyncIterator[Event]:
        """See protocol.contract.Worker. The end is told at once, also while the process is still ending."""
        try:
            if self._first:
                for event in decode_events(self._first):
                    yield event
            while (frame := await _read_frame(self._started.reader)) is not None:
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
        """See protocol.contract.Worker. Bounded: a process that cannot be killed is logged, and left behind."""
        self.send(Stop())
        if not await self._end(grace_s):
            _tell_left_behind(self.name, self._process.pid)
            return
        await asyncio.wait([self._clearing])

    def _begin_end(self, grace_s: float) -> None:
        """Make the process end, in the background."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(grace_s), name=f"end {self.name}")

    async def _end(self, grace_s: float) -> bool:
        return await self._process.end(grace_s, _TERM_S, _KILL_S)

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
        await _close(self._writer)

    def _describe_process(self) -> str:
        return f"worker {self.name} (pid {self._process.pid})"


async def _read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next frame, None at the end of the stream. Raises ProtocolError."""
    try:
        return await read_frame(reader)
    except ConnectionError:
        return None


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def _tell_left_behind(name: str, pid: int) -> None:
    text = "worker %s (pid %d) does not end, not even when it is killed: it is left behind, with what it holds"
    _log.error(text, name, pid)
