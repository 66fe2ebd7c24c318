"""Workers as subprocesses of the daemon, on its own machine."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from adapters.framing import add_header
from orchestrator.errors import WorkerStartFailed
from orchestrator.launch.homes import (
    HomeRecord,
    WorkerHome,
    list_homes,
    make_home,
    read_guard,
    remove_guard,
    stock_spares,
    write_guard,
)
from orchestrator.launch.local_worker import (
    KILL_S,
    LocalWorker,
    ProcessHandle,
    StartedProcess,
    close_link,
    log_left_behind,
    read_next_frame,
    record_home,
)
from orchestrator.launch.output import follow
from orchestrator.own_packages import with_our_packages
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.draft_messages import ChooseDrafters
from orchestrator.protocol.frames import ORPHAN_GRACE_S, Adoption
from orchestrator.protocol.model_pins import drop_identities

_PACKAGES = ("adapters", "device_profiles", "orchestrator", "policies")
_ROOT = Path(__file__).resolve().parents[2]
_DIGEST_BYTES = 16

# What the environment tells runtimes, loaders and Python; the rest (a terminal, a session) changes no worker.
_TELLING = (
    *("CUDA_", "GOMP_", "HF_", "KMP_", "LD_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENVINO_", "ORT_", "OV_"),
    *("PYTHON", "PYTORCH_", "TBB_", "TORCH_", "OUTRIDER_"),
)
# Of a worker's frames that wait in the daemon. Not tuned: frames are a few hundred bytes.
_READ_AHEAD_BYTES = 1024 * 1024
# What a worker may take to end its rounds when the daemon closes. Not tuned.
_CLOSE_GRACE_S = 5.0
_ANSWER_S = 3.0  # an orphan that does not answer for so long hangs
_PYTHON = (sys.executable, "-P", "-m")
"""-P, like the console script: a directory that happens to be called `adapters` is not ours."""

_log = logging.getLogger(__name__)


def digest_worker(spec: WorkerSpec, environment: Mapping[str, str]) -> str:
    """Return what two workers share exactly where either could take the other's place. `environment`: the worker's.

    The content of their models is left out: a daemon that begins takes what the worker has loaded.
    """
    relevant = sorted((name, value) for name, value in environment.items() if name.startswith(_TELLING))
    whole = msgspec.msgpack.encode((drop_identities(spec), relevant, digest_code()))
    return blake2b(whole, digest_size=_DIGEST_BYTES).hexdigest()


@functools.cache
def digest_code() -> str:
    """Return what changes with the code of this program: the files of its packages, as large and as old as they are,
    and the interpreter."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    digest.update(f"{sys.version}\n{sys.executable}\n".encode())
    for package in _PACKAGES:
        for directory, _, names in sorted(os.walk(_ROOT / package)):
            for name in sorted(names):
                if name.endswith((".py", ".so")):
                    facts = os.stat(os.path.join(directory, name))
                    digest.update(f"{directory}/{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class OrphanPolicy:
    """Workers outlive a daemon that is killed, and wait a while for the next one that has this directory."""

    directory: Path
    wait_s: float


class LocalCluster:
    """Implements protocol.contract.Cluster with subprocesses.

    Without `orphans` they end with the daemon. Start such workers from a thread that lives as long as they do: the
    kernel ends them with it. With `orphans`, whoever opens the cluster has the directory to itself.
    """

    runtime = "local"
    own_node = ""
    away = ""
    members = None

    def __init__(self, orphans: OrphanPolicy | None = None) -> None:
        self._policy = orphans
        self._orphans: list[_Orphan] = []
        self._workers: set[LocalWorker] = set()
        self._ahead: dict[str, _Ahead] = {}  # by name
        self._opened = False
        self._guard: _Guard | None = None

    async def open(self) -> None:
        """Looks for workers that the last daemon left behind."""
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
        return [""]

    async def start(self, spec: WorkerSpec) -> LocalWorker:
        """A worker that the last daemon left behind is adopted, if it is the same."""
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

    def is_left_behind(self, spec: WorkerSpec) -> bool:
        digest = digest_worker(spec, _environment(spec))
        return any(orphan.record.digest == digest for orphan in self._orphans)

    async def start_ahead(self, spec: WorkerSpec) -> None:
        await self.open()
        worker = await self.start(spec)
        self._ahead[spec.name] = _Ahead(worker, digest_worker(spec, _environment(spec)))

    async def close(self) -> None:
        orphans, self._orphans = self._orphans, []
        await asyncio.gather(
            *(worker.stop(_CLOSE_GRACE_S) for worker in tuple(self._workers)),
            *(self._end_orphan(orphan) for orphan in orphans),
        )
        guard, self._guard = self._guard, None
        if guard is not None:
            remove_guard(guard.directory)
            await guard.process.end(0.0, 0.0, KILL_S)
            os.close(guard.pipe)

    def _take_orphan(self, name: str, digest: str) -> _Orphan | None:
        """Return the orphan to adopt; where there is none, one that is in the way of a new worker."""
        same = [orphan for orphan in self._orphans if orphan.record.digest == digest]
        orphan = next(iter(same or [orphan for orphan in self._orphans if orphan.record.name == name]), None)
        if orphan is not None:
            self._orphans.remove(orphan)
        return orphan

    async def _adopt(self, orphan: _Orphan, digest: str) -> LocalWorker | None:
        """Take an orphan over; None where it does not answer, or has ended."""
        assert self._policy is not None  # noqa: S101 -- or there were no orphans
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                link = orphan.home.connect()
                reader, writer = await asyncio.open_connection(sock=link, limit=_READ_AHEAD_BYTES)
                writer.write(add_header(msgspec.msgpack.encode(Adoption(digest, self._policy.wait_s))))
                first = await read_next_frame(reader)
            output = orphan.home.open_output()
        except (OSError, ValueError) as error:  # of which TimeoutError is one
            name, pid = orphan.record.name, orphan.record.pid
            _log.warning("worker %s (pid %d) is not adopted: %s", name, pid, str(error) or "it does not answer")
            first = None
        if first is None or writer is None:
            if writer is not None:
                await close_link(writer)
            return None
        _log.info("worker %s (pid %d) is adopted", orphan.record.name, orphan.record.pid)
        return self._follow(
            StartedProcess(orphan.record.name, orphan.process, reader, writer, output, orphan.home), first
        )

    async def _end_orphan(self, orphan: _Orphan) -> None:
        """End a worker that this daemon has no use for; its memory is wanted."""
        ended = await orphan.process.end(0.0, ORPHAN_GRACE_S, KILL_S)
        _log.info("worker %s (pid %d) of the last daemon is ended", orphan.record.name, orphan.record.pid)
        if not ended:
            log_left_behind(orphan.record.name, orphan.record.pid)
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
                with os.fdopen(printing), ExitStack() as closing:
                    inherited, options = [theirs.fileno()], ["--fd", str(theirs.fileno())]
                    if home is not None and self._policy is not None:
                        listening = closing.enter_context(home.listen())
                        inherited.append(listening.fileno())
                        options += ["--listen-fd", str(listening.fileno()), "--digest", digest]
                        options += ["--wait-s", str(self._policy.wait_s)]
                    process = ProcessHandle.of_child(_popen(options, inherited, printing, environment))
            except OSError as error:
                raise WorkerStartFailed(f"worker {spec.name} cannot be started: {error}") from error
            undo.pop_all()
        if home is not None:
            record_home(home, HomeRecord(spec.name, process.pid, "", digest))
        writer.write(add_header(msgspec.msgpack.encode(spec)))
        return self._follow(StartedProcess(spec.name, process, reader, writer, output, home))

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

    def _follow(self, started: StartedProcess, first: bytes = b"") -> LocalWorker:
        output = asyncio.create_task(
            follow(started.name, started.process.pid, started.output), name=f"output {started.name}"
        )
        worker = LocalWorker(started, output, first, self._workers.discard)
        self._workers.add(worker)
        return worker


@dataclass(frozen=True, slots=True)
class _Orphan:
    home: WorkerHome
    record: HomeRecord
    process: ProcessHandle


@dataclass(frozen=True, slots=True)
class _Ahead:
    worker: LocalWorker
    digest: str
    """Of what was started."""


@dataclass(frozen=True, slots=True)
class _Guard:
    process: ProcessHandle
    pipe: int
    """It tells of our end."""
    directory: Path
    """It has the homes."""


def _start_guard(policy: OrphanPolicy) -> _Guard:
    """Start the guard of this daemon's workers. Raises OSError."""
    heard, pipe = os.pipe()
    with os.fdopen(heard):
        arguments = [*_PYTHON, "orchestrator.launch.guard", str(policy.directory), str(policy.wait_s)]
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
    guard = read_guard(directory)
    last = None if guard is None else ProcessHandle.find(*guard)
    if last is not None:
        await last.end(0.0, 0.0, KILL_S)


def _popen(
    options: list[str], inherited: list[int], printing: int, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process in this thread, as asyncio would; its end is waited for by its ProcessHandle."""
    return subprocess.Popen(
        [*_PYTHON, "orchestrator.worker.local_host", *options],
        pass_fds=inherited,
        stdin=subprocess.DEVNULL,
        stdout=printing,
        stderr=printing,
        env=environment,
        start_new_session=True,  # Ctrl-C on the terminal reaches the daemon alone, from the first instant
    )


def _environment(spec: WorkerSpec) -> dict[str, str]:
    """Return the daemon's environment with the worker's additions, and with our packages importable."""
    return with_our_packages({**os.environ, **spec.environment})
