"""Keeps a Ray node on this host: starts it, and again whenever it ends or its cluster has forgotten it.

`outrider join` keeps one that joins a head, and a daemon with `cluster.head` keeps the head.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from orchestrator.errors import ClusterAway, WorkerError
from orchestrator.launch.node_reports import NodeReport, decode_report
from orchestrator.launch.ray_settings import SessionDirectory, probe, read_token, split_address
from orchestrator.launch.ray_tls import check_encryption, write_certificates

# ADR 0146. Not tuned: a node that comes back within 30 s may wait for a third of them.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
_LOOK_EVERY_S = 1.0  # whether another process is the head yet. Not tuned.
_END_GRACE_S = 5.0  # Ray's own end of a node's processes, which takes a second or two. Not tuned.
_LAST_LINES = 20  # of what `ray start` printed, among which the reason is looked for. Not tuned.

_PROCESS_END = re.compile(r"END (\w+)\.\w+ tail \(exit code\(s\)=(.+)\)")

NodePhase = Literal["waiting", "starting", "joined"]


@dataclass(frozen=True, slots=True)
class NodeState:
    """How a node does. `why`: of one that waits, what ended the last try; `own_address`: by which the others reach this
    host, "" before that is known."""

    phase: NodePhase
    why: str = ""
    own_address: str = ""


def find_way(address: str) -> tuple[str, str]:
    """Return IP:PORT of HOST:PORT, and the address of this host's end of the way there. Raises ClusterAway where there
    is none."""
    place = split_address(address)
    if place is None:
        raise ClusterAway(f"{address} is no HOST:PORT")
    try:
        family, kind, _, _, target = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(target)  # which sends nothing
            head, own = str(target[0]), str(way.getsockname()[0])
    except OSError as error:
        raise ClusterAway(f"there is no way to {address}: {error.strerror or error}") from error
    return f"[{head}]:{place[1]}" if ":" in head else f"{head}:{place[1]}", own


class NodeKeeper:
    """Keeps one node. `address`: the head's. `own_address`: this host's, "" for that of its way to the head, which is
    looked up at each start. `environment`: the node's. `observe` hears each change of state."""

    def __init__(
        self,
        address: str,
        environment: Mapping[str, str],
        observe: Callable[[NodeState], None],
        *,
        own_address: str = "",
        is_head: bool = False,
    ) -> None:
        self._address = address
        self._environment = dict(environment)
        self._observe = observe
        self._own_address = own_address
        self._is_head = is_head
        self._has_joined = False

    async def keep_node(self) -> None:
        """Have a node until cancelled; then it is ended in order. Raises WorkerError where this host can never be a
        node of that cluster as it is. Run it in a thread that lives as long: the kernel ends the node with it."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self._has_joined = False
            try:
                why = await self._run_node()
            except ClusterAway as error:
                why = str(error)
            pause_s = _FIRST_PAUSE_S if self._has_joined else pause_s
            self._observe(NodeState("waiting", why))
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

    async def _run_node(self) -> str:
        """Start a node, and return why it has ended. Raises ClusterAway where there is no head to join, and
        WorkerError."""
        if self._is_head:
            await self._wait_until_free()
        else:
            await probe(self._address)
        head, own_address = await asyncio.to_thread(find_way, self._address)
        own_address = self._own_address or own_address
        self._observe(NodeState("starting", own_address=own_address))
        directory = await asyncio.to_thread(SessionDirectory)
        try:
            environment = await self._encrypt(directory.path, head, own_address)
            process, reports, printed = await self._spawn(head, own_address, str(directory.path), environment)
            lines: deque[str] = deque(maxlen=_LAST_LINES)
            following = asyncio.create_task(_collect(printed, lines), name="output of the Ray node")
            try:
                report = await self._hear(reports, own_address)
                if report is None:
                    await process.wait()
            finally:
                await asyncio.shield(_end_session(process))
                following.cancel()
        finally:
            await asyncio.to_thread(directory.remove)
        if report is None:
            return f"Ray's node ended: {_find_reason(lines)}"
        if report.state == "refused":
            raise WorkerError(f"cannot join {self._address}: {report.why}")
        return report.why

    async def _encrypt(self, directory: Path, head: str, own_address: str) -> Mapping[str, str]:
        """Return the node's environment with its certificates, which a head of others takes. A cluster without a token
        has none. Raises WorkerError and ClusterAway."""
        if self._environment.get("RAY_AUTH_MODE") != "token":
            return self._environment
        token = read_token(self._environment)
        named = split_address(self._address)
        hosts = [own_address, named[0]] if self._is_head and named is not None else [own_address]
        variables = await asyncio.to_thread(write_certificates, directory, token, hosts)
        place = split_address(head)
        if not self._is_head and place is not None:
            await check_encryption(*place, variables)
        return self._environment | variables

    async def _wait_until_free(self) -> None:
        """Wait as long as another process is the head: a daemon's while a command looks at the cluster."""
        with suppress(ClusterAway):
            while True:
                await probe(self._address)
                self._observe(NodeState("joined", own_address=self._own_address))
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _hear(self, reports: asyncio.StreamReader, own_address: str) -> NodeReport | None:
        """Return the report that ends a node; None where it ended without one."""
        while line := await reports.readline():
            try:
                report = decode_report(line)
            except msgspec.DecodeError:
                return None
            if report.state != "joined":
                return report
            self._has_joined = True
            self._observe(NodeState("joined", own_address=own_address))
        return None

    async def _spawn(
        self, head: str, own_address: str, directory: str, environment: Mapping[str, str]
    ) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamReader]:
        """Return the node's process, its reports, and what it prints."""
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "orchestrator.launch.ray_node", "--fd", str(writing)),
                *("--address", head, "--own-address", own_address, "--directory", directory),
                *(["--head"] if self._is_head else []),
                pass_fds=(writing,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C on the terminal reaches the keeper alone
            )
        except OSError as error:
            os.close(reading)
            raise ClusterAway(f"Ray's node cannot be started: {error}") from error
        finally:
            os.close(writing)
        reports = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(reading, "rb")
        )
        assert process.stdout is not None  # noqa: S101 -- a pipe was asked for
        return process, reports, process.stdout


async def _collect(printed: asyncio.StreamReader, lines: deque[str]) -> None:
    with suppress(ValueError):  # a line without end
        while line := await printed.readline():
            if text := line.decode("utf-8", "replace").strip():
                lines.append(text)


def _find_reason(lines: deque[str]) -> str:
    """Return the line that says why Ray's node ended: which process of it did, else its last error, else its last
    line."""
    plain = [line.rpartition(" -- ")[2].strip() for line in lines]
    processes = [f"its {ended[1]} ended with code {ended[2]}" for ended in map(_PROCESS_END.search, plain) if ended]
    errors = [line for line in plain if "Error" in line]
    return [*plain, *errors, *processes][-1] if plain else "it said nothing"


async def _end_session(process: asyncio.subprocess.Process) -> None:
    """End a node's process in order, and then whatever is left of its session: of a node that was killed Ray's workers
    may be."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_GRACE_S):
                await process.wait()
    for pid in await asyncio.to_thread(_list_session, process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()


def _list_session(session: int) -> list[int]:
    """Return the processes of a session."""
    pids: list[int] = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                pids.append(pid)
    return pids
