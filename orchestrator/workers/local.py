"""Workers as subprocesses of the daemon, on its own machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from orchestrator.errors import WorkerLost, WorkerStartFailed
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.frames import decode_events, encode
from orchestrator.workers.host import HEADER_BYTES, frame_length, with_header
from orchestrator.workers.messages import Command, Event, Stop
from orchestrator.workers.output import follow
from policies.serving.failover.blame import LossKind

_READ_AHEAD_BYTES = 1024 * 1024
_CLOSE_GRACE_S = 5.0
_TEARDOWN_S = 5.0  # from the last event to the end of the process
_TERM_S = 1.0  # from SIGTERM to SIGKILL
_LAST_WORDS_S = 1.0
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
_PACKAGES_ROOT = Path(__file__).resolve().parents[2]


class LocalCluster:
    """Implements workers.contract.Cluster with subprocesses.

    Start workers from a thread that lives as long as they do: the kernel ends them with it.
    """

    runtime = "local"

    def __init__(self) -> None:
        self._workers: set[LocalWorker] = set()

    async def open(self) -> None:
        """See workers.contract.Cluster. Needs nothing."""

    async def nodes(self) -> list[str]:
        """See workers.contract.Cluster."""
        return [""]

    async def start(self, spec: WorkerSpec) -> LocalWorker:
        """See workers.contract.Cluster."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_AHEAD_BYTES)
            try:
                process, printed = await _spawn(spec, theirs.fileno())  # the last step: it cleans up when cancelled
            except BaseException as error:
                await _close(writer)
                if isinstance(error, OSError):
                    raise WorkerStartFailed(f"worker {spec.name} cannot be started: {error}") from error
                raise
        writer.write(with_header(msgspec.msgpack.encode(spec)))
        output = asyncio.create_task(follow(spec.name, process.pid, printed), name=f"output {spec.name}")
        worker = LocalWorker(spec.name, process, reader, writer, output, self._workers.discard)
        self._workers.add(worker)
        return worker

    async def close(self) -> None:
        """See workers.contract.Cluster."""
        await asyncio.gather(*(worker.stop(_CLOSE_GRACE_S) for worker in tuple(self._workers)))


async def _spawn(spec: WorkerSpec, fd: int) -> tuple[asyncio.subprocess.Process, int]:
    """Return the process, and the pipe that all it prints comes out of."""
    printed, printing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # like the console script: a directory that happens to be called `adapters` is not ours
            "-m",
            "orchestrator.workers.host",
            "--fd",
            str(fd),
            pass_fds=(fd,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=printing,
            stderr=printing,
            env=_environment(spec),
            start_new_session=True,  # Ctrl-C on the terminal reaches the daemon alone, from the first instant
        )
    except BaseException:
        os.close(printed)
        raise
    finally:
        os.close(printing)
    return process, printed


def _environment(spec: WorkerSpec) -> dict[str, str]:
    """Return the daemon's environment with the worker's additions, and with our packages importable."""
    environment = {**os.environ, **spec.environment}
    if _PACKAGES_ROOT.name not in ("site-packages", "dist-packages"):  # a checkout that is not installed
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (known, str(_PACKAGES_ROOT))))
    return environment


class LocalWorker:
    """Implements workers.contract.Worker over a socket pair."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: asyncio.Task[None],
        forget: Callable[[LocalWorker], None],
    ) -> None:
        self.name = name
        self.where = f"local pid {process.pid}"
        self._process = process
        self._reader = reader
        self._writer = writer
        self._output = output
        self._forget = forget
        self._stopping = False

    def send(self, command: Command) -> None:
        """See workers.contract.Worker."""
        self._stopping = self._stopping or isinstance(command, Stop)
        if not self._writer.is_closing():
            self._writer.write(with_header(encode([command])))

    async def events(self) -> AsyncIterator[Event]:
        """See workers.contract.Worker."""
        try:
            while (frame := await self._receive()) is not None:
                for event in decode_events(frame):
                    yield event
        except (ValueError, msgspec.DecodeError) as error:
            await self._reap(0.0)
            raise WorkerLost(f"{self._describe_process()} sent what is no event: {error}") from error
        ended = await self._reap(_TEARDOWN_S)
        if not self._stopping:
            kind: LossKind = "killed" if self._process.returncode in _FROM_OUTSIDE else "crashed"
            raise WorkerLost(f"{self._describe_process()} {ended}", kind)

    async def stop(self, grace_s: float) -> None:
        """See workers.contract.Worker."""
        self.send(Stop())
        await self._reap(grace_s)

    async def _receive(self) -> bytes | None:
        """Return the next frame, None at the end of the stream. Raises ValueError on a broken header."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return await self._reader.readexactly(frame_length(header))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def _reap(self, grace_s: float) -> str:
        """Wait for the process, then make it end; returns how it ended, as in "exited with code 1"."""
        how = ""
        if not await self._ends_within(grace_s):
            how = f"did not end within {grace_s:g} s and was "
            self._signal(signal.SIGTERM)
            if not await self._ends_within(_TERM_S):
                self._signal(signal.SIGKILL)
        code = await self._process.wait()
        # What it said last comes before what is said about it; a grandchild may hold the pipe for ever.
        await asyncio.wait([self._output], timeout=_LAST_WORDS_S)
        self._output.cancel()
        self._forget(self)
        await _close(self._writer)
        return how + _ending(code)

    async def _ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _describe_process(self) -> str:
        return f"worker {self.name} (pid {self._process.pid})"


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
