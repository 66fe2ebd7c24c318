"""The daemon's end of one Ray driver process: starts it, speaks with it, and notices when it or its cluster is away."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from itertools import count
from typing import Protocol

import msgspec

from adapters.framing import ProtocolError, read_frame
from orchestrator.errors import ClusterAway, WorkerError, WorkerStartFailed
from orchestrator.launch import ray_messages as wire
from orchestrator.launch.output import follow, say
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.telemetry import get_logger

AWAY_AFTER_S = 4.0
"""Without an answer of the head, which is asked every second and given two."""

# ADR 0048: a Ray of our own takes 3 s to start; the rest is for a machine with much to do.
_JOIN_TIMEOUT_S = 90.0
_START_TIMEOUT_S = 75.0  # above the driver's own, whose reason says more
_NODES_TIMEOUT_S = 10.0  # not tuned: the driver answers from what it knows
_LEAVE_S = 5.0  # behind it the driver process is killed. Not tuned.
# ADR 0048: of a driver that says nothing.
_TICK_S = 1.0
# Without a word: counted, not timed, as whoever stops the daemon may stop both. ADR 0048.
_HUNG_AFTER_TICKS = 20
_READ_AHEAD_BYTES = 1024 * 1024  # as in launch.local
_LAST_WORDS_S = 1.0  # what was printed may come behind the end. Not tuned.
_DRIVER = "Ray"  # what its own output is logged as

_log = get_logger(__name__)


class ActorEnd(Protocol):
    def take_frame(self, frame: bytes) -> None:
        """A frame of events came."""
        ...

    def take_end(self, how: str, *, host: bool) -> None:
        """No more will come. `host`: its host or its cluster failed, not the worker."""
        ...

    def take_gone(self) -> None:
        """There is no process any more."""
        ...


class DriverLink:
    """One driver process, which has joined. Made by `join_ray`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: asyncio.Task[None],
        node: str,
    ) -> None:
        self.node = node
        """The address of this host in the cluster."""
        self.retired = asyncio.Event()
        """Set when no worker can be started through it any more, for the reason `why`; its workers may go on."""
        self.why = ""
        self.alive: tuple[str, ...] = ()
        self.lost: tuple[str, ...] = ()
        """The hosts that the head knows, and those that it lost."""
        self.ended = asyncio.Event()
        """Set when the process is gone."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._output = output
        self._numbers = count(1)
        self._starting: dict[int, asyncio.Future[wire.Appeared]] = {}
        self._actors: dict[int, ActorEnd] = {}
        self._nodes: list[asyncio.Future[list[str]]] = []
        self._loop = asyncio.get_running_loop()
        self._answered_s = self._loop.time()
        self._ticks = 0
        self._leaving: asyncio.Task[None] | None = None
        self._leave_when_empty = False
        self._tasks = [
            asyncio.create_task(self._read(), name="read the Ray driver"),
            asyncio.create_task(self._tick(), name="watch the Ray driver"),
        ]

    @property
    def silent_s(self) -> float:
        """How long the cluster's head has not answered. Thread-safe."""
        return self._loop.time() - self._answered_s

    def send(self, order: wire.Order) -> None:
        """Queue an order; never blocks. One that is gone drops it."""
        if not self._writer.is_closing():
            self._writer.write(wire.encode(order))

    async def start(self, spec: WorkerSpec, actor: ActorEnd) -> tuple[int, wire.Appeared]:
        """Start an actor and return its number. Raises ClusterAway and WorkerStartFailed; then it is ended, and when
        cancelled too."""
        if self.retired.is_set():
            raise ClusterAway(self.why)
        number = next(self._numbers)
        appeared = self._starting[number] = self._loop.create_future()
        self._actors[number] = actor  # from now on: its frames are close behind its appearance
        self.send(wire.StartActor(number, spec))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                return number, await appeared
        except BaseException as error:
            self.send(wire.EndActor(number))
            self.forget(number)
            if isinstance(error, TimeoutError):
                raise WorkerStartFailed(f"Ray has not answered within {_START_TIMEOUT_S:g} s") from None
            raise
        finally:
            del self._starting[number]

    async def nodes(self) -> list[str]:
        """Return the hosts' addresses. Raises ClusterAway."""
        answer: asyncio.Future[list[str]] = self._loop.create_future()
        self._nodes.append(answer)
        self.send(wire.AskNodes())
        with suppress(TimeoutError):
            async with asyncio.timeout(_NODES_TIMEOUT_S):
                if addresses := await answer:
                    return addresses
        raise ClusterAway(f"Ray has not said within {_NODES_TIMEOUT_S:g} s which hosts it has")

    def forget(self, number: int) -> None:
        self._actors.pop(number, None)
        self._leave_if_empty()

    def retire(self, why: str) -> None:
        """Start nothing more through it, and leave when its last worker is over."""
        if not self.retired.is_set():
            self.why = why
            self.retired.set()
            self.fail_starts(why)
        self._leave_when_empty = True
        self._leave_if_empty()

    def fail_starts(self, why: str) -> None:
        """The head is away: whoever waits for a worker is told now. Others may still be started later."""
        for waiting in self._starting.values():
            if not waiting.done():
                waiting.set_exception(ClusterAway(why))

    async def leave(self) -> None:
        """End the driver process: in order, if it can. What it started ends with it."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(), name="leave Ray")
        await asyncio.shield(self._leaving)

    async def _leave(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._process.wait()
        except TimeoutError:
            self._end_process()
        await asyncio.wait(self._tasks[:1], timeout=_LAST_WORDS_S)
        for task in (*self._tasks, self._output):
            task.cancel()

    def _leave_if_empty(self) -> None:
        if self._leave_when_empty and not self._actors and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(), name="leave Ray")

    async def _read(self) -> None:
        try:
            while True:
                self._take(await _receive(self._reader))
        except ConnectionError:
            self._writer.close()
        except (ProtocolError, msgspec.DecodeError) as error:
            self.why = f"the Ray driver process sent no message: {error}"
            self._end_process()
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        why = self.why or f"the Ray driver process {how}"
        self.ended.set()
        actors, self._actors = self._actors, {}
        self.retire(why)  # before anybody hears of it, and starts another
        for actor in actors.values():
            actor.take_end(f"is lost: {why}", host=True)
            actor.take_gone()

    async def _tick(self) -> None:
        """End a driver process that says nothing any more."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._ticks += 1
            if self._ticks > _HUNG_AFTER_TICKS:
                self.why = self.why or f"the Ray driver process said nothing for {_HUNG_AFTER_TICKS} s and was ended"
                self._end_process()
                return

    def _end_process(self) -> None:
        self._writer.close()
        with suppress(ProcessLookupError):
            self._process.kill()

    def _take(self, notice: wire.Notice) -> None:
        match notice:
            case wire.PassUp(number, frame):
                if (actor := self._actors.get(number)) is not None:
                    actor.take_frame(frame)
            case wire.Answered(head, stale, alive, lost):
                self._ticks = 0
                if stale:
                    self.retire(stale)
                elif head:
                    self._answered_s = self._loop.time()
                    self.alive, self.lost = alive, lost
            case wire.Ended(number, how, host):
                if (actor := self._actors.get(number)) is not None:
                    actor.take_end(how, host=host)
            case wire.Gone(number):
                if (actor := self._actors.get(number)) is not None:
                    actor.take_gone()
            case wire.Printed(worker, pid, lines):
                for line in lines:
                    say(worker, pid, line)
            case _:
                self._take_reply(notice)

    def _take_reply(self, notice: wire.Notice) -> None:
        match notice:
            case wire.Appeared(number) if (waiting := self._starting.get(number)) is not None and not waiting.done():
                waiting.set_result(notice)
            case wire.NotStarted(number, reason, away) if (start := self._starting.get(number)) and not start.done():
                start.set_exception(ClusterAway(reason) if away else WorkerStartFailed(reason))
            case wire.Nodes(addresses):
                answers, self._nodes = self._nodes, []
                for answer in answers:
                    if not answer.done():
                        answer.set_result(addresses)
            case _:
                pass


async def join_ray(order: wire.Join, environment: dict[str, str]) -> DriverLink:
    """Start a driver process and let it join, or start a Ray. Raises ClusterAway and WorkerError with the way out."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_AHEAD_BYTES)
        try:
            process, printed = await _spawn(theirs.fileno(), environment)
        except BaseException as error:
            writer.close()
            if isinstance(error, OSError):
                raise WorkerError(f"the Ray driver process cannot be started: {error}") from error
            raise
    output = asyncio.create_task(follow(_DRIVER, process.pid, printed), name="output of the Ray driver")
    writer.write(wire.encode(order))
    try:
        async with asyncio.timeout(_JOIN_TIMEOUT_S):
            answer = await _receive(reader)
    except BaseException as error:
        writer.close()
        with suppress(ProcessLookupError):
            process.kill()
        code = await asyncio.shield(asyncio.ensure_future(process.wait()))
        await asyncio.wait([output], timeout=_LAST_WORDS_S)
        where = f"join Ray at {order.address}" if order.address else "start Ray"
        if isinstance(error, TimeoutError):
            raise ClusterAway(f"cannot {where}: no answer within {_JOIN_TIMEOUT_S:g} s") from None
        if isinstance(error, ConnectionError):
            raise ClusterAway(
                f"cannot {where}: the Ray driver process ended with code {code}; see its output"
            ) from None
        raise
    if isinstance(answer, wire.NotJoined):
        writer.close()
        await process.wait()
        raise (ClusterAway if answer.away else WorkerError)(answer.reason)
    assert isinstance(answer, wire.Joined)  # noqa: S101 -- the protocol
    if answer.job_server:
        _log.info("ray takes jobs", address=answer.job_server)
    return DriverLink(process, reader, writer, output, answer.node)


async def _receive(reader: asyncio.StreamReader) -> wire.Notice:
    """Return the next message. Raises ConnectionError at the end, ProtocolError and msgspec.DecodeError."""
    return wire.decode_notice(await read_frame(reader))


async def _spawn(fd: int, environment: dict[str, str]) -> tuple[asyncio.subprocess.Process, int]:
    printed, printing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "orchestrator.launch.ray_driver", "--fd", str(fd)),
            pass_fds=(fd,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=printing,
            stderr=printing,
            env=environment,
            start_new_session=True,  # Ctrl-C on the terminal reaches the daemon alone
        )
    except BaseException:
        os.close(printed)
        raise
    finally:
        os.close(printing)
    return process, printed
