"""Workers as Ray actors, on this machine or on any node of a Ray cluster.

Ray itself runs in a process of its own, `ray_driver`: nothing it does can block or end the daemon. When its cluster
goes away, workers that still run go on and new ones are refused at once. A new driver process joins when it is back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import msgspec

from orchestrator.errors import ClusterAway, WorkerError, WorkerLost, WorkerStartFailed
from orchestrator.launch.own_head import OwnHead
from orchestrator.launch.process_end import end_process
from orchestrator.launch.ray_link import AWAY_AFTER_S, DriverLink, join_ray
from orchestrator.launch.ray_messages import Appeared, EndActor, Join, PassDown
from orchestrator.launch.ray_settings import SessionDirectory, driver_environment, probe
from orchestrator.machine.process_memory import KILLED_FOR_MEMORY, MemoryKillWatch
from orchestrator.protocol.commands import Command, Stop
from orchestrator.protocol.contract import ClusterMembers, WorkerSpec
from orchestrator.protocol.events import Event
from orchestrator.protocol.frames import decode_events, encode
from orchestrator.telemetry import get_logger
from policies.serving.failover.blame import LossKind

PATIENCE_S = 2.5
"""From the first attempt that failed to the last: with the one before and the one after it, 2.5 to 4 s."""

# ADR 0048: twice a second.
_EVERY_S = 0.5
# ADR 0048. Not tuned: a kernel answers within milliseconds.
_ATTEMPT_S = 1.0
_CLOSE_GRACE_S = _KILL_TIMEOUT_S = 5.0  # as in launch.local and ray_driver
_HANGS_AFTER_S = 1.0  # a process that Ray has told to end
# ADR 0048: whether something listens at the address of a cluster that is away.
_LOOK_EVERY_S = 0.5
_RAY_WANTS_MEMORY = "running low on memory"  # in its words for a worker that its memory monitor ended
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0  # between attempts to join again

_log = get_logger(__name__)


async def wait_until_cut_off(ip: str, port: int) -> float:
    """Return for how many seconds a host has not answered, once that is too long.

    A busy host answers, and so does one whose process is stopped or dead: only connecting to the port is tried, and a
    refusal is an answer. Where this process stood still meanwhile, one attempt fails and the next does not.
    """
    loop = asyncio.get_running_loop()
    silent_since_s: float | None = None
    while True:
        began_s = loop.time()
        if await _answers(ip, port):
            silent_since_s = None
            await asyncio.sleep(_EVERY_S)
            continue
        silent_since_s = began_s if silent_since_s is None else silent_since_s
        if loop.time() - silent_since_s >= PATIENCE_S:
            return loop.time() - silent_since_s
        await asyncio.sleep(max(0.0, began_s + _EVERY_S - loop.time()))


async def _answers(ip: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_ATTEMPT_S):
            _, writer = await asyncio.open_connection(ip, port)
    except ConnectionRefusedError:
        return True
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


class RayCluster:
    """Implements protocol.contract.Cluster. `address` "" starts a Ray of its own on this machine and ends it.

    `has_token`: whether the Ray at the address asks for a token; one that does not is joined only where this says so.
    `jobs`: a Ray of its own takes jobs too. `head`: it keeps the head at the address, which is this machine's.
    Open it in a thread that lives as long as it does: the kernel ends the driver process with it.
    """

    runtime = "ray"

    def __init__(self, address: str, *, has_token: bool = True, jobs: bool = False, head: bool = False) -> None:
        self._address = address
        self._head = OwnHead(address, needs_token=has_token) if head else None
        self._has_token = has_token
        self._jobs = jobs
        self._link: DriverLink | None = None
        self._older: set[DriverLink] = set()  # whose workers go on
        self._seen: set[str] = set()
        self._missed: set[str] = set()  # hosts of heads before this one, which have not come to it
        self._why = "the Ray cluster is not open"
        self._keeping: asyncio.Task[None] | None = None
        self._workers: set[RayWorker] = set()
        self._watches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        if self._keeping is None:
            if self._head is not None:
                await self._head.open()
            try:
                self._link = await self._join()
            except BaseException:
                await self._close_head()
                raise
            self._keeping = asyncio.create_task(self._keep_joined(), name="keep Ray joined")

    async def nodes(self) -> list[str]:
        return [] if self._keeping is None else await self._require_link("hosts").nodes()

    @property
    def own_node(self) -> str:
        return self._link.node if self._link is not None else ""

    @property
    def away(self) -> str:
        if self._keeping is None:
            return ""
        if self._link is None:
            return f"Ray is away: {self._why}"
        return self._describe_silence(self._link) if self._link.silent_s > AWAY_AFTER_S else ""

    @property
    def members(self) -> ClusterMembers | None:
        if not self._address:
            return None
        link = self._link
        if link is None or not link.alive:
            return ClusterMembers(self._address)
        return ClusterMembers(self._address, link.alive, tuple(sorted(self._find_lost(link))))

    async def start(self, spec: WorkerSpec) -> RayWorker:
        if self._keeping is None:
            raise WorkerStartFailed(f"worker {spec.name} cannot be started: {self._why}")
        worker = RayWorker(spec.name, self._require_link(f"worker {spec.name}"), self._forget)
        self._workers.add(worker)
        try:
            await worker.appear(spec)
        except BaseException:
            await worker.stop(0.0)
            raise
        self._watch(worker)
        return worker

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        await asyncio.gather(*(worker.stop(_CLOSE_GRACE_S) for worker in tuple(self._workers)))
        links = [link for link in (self._link, *self._older) if link is not None]
        await asyncio.gather(*(link.leave() for link in links))
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        self._link, self._keeping, self._why = None, None, "the Ray cluster is not open"
        if self._leaving:
            await asyncio.wait(self._leaving)
        await self._close_head()

    async def _close_head(self) -> None:
        if self._head is not None:
            await self._head.close()

    def _require_link(self, purpose: str) -> DriverLink:
        """Return the link to start workers through. Raises ClusterAway where there is none now."""
        link = self._link
        if link is None or self.away:
            raise ClusterAway(f"{purpose}: {self.away or self._why}")
        return link

    def _describe_silence(self, link: DriverLink) -> str:
        where = f" at {self._address}" if self._address else ""
        way_out = "it is started again" if self._head is not None else "is it running (ray start --head)?"
        return f"Ray's head{where} has not answered for {link.silent_s:.0f} s; {way_out}"

    async def _join(self) -> DriverLink:
        if "://" in self._address:
            raise WorkerError(f"cluster.address {self._address}: Ray's client protocol is not supported; use HOST:PORT")
        environment = driver_environment(
            self._address, has_token=self._has_token, environment=os.environ, jobs=self._jobs
        )
        if self._head is not None:
            environment |= self._head.variables
        await probe(self._address)
        directory = None if self._address else await asyncio.to_thread(SessionDirectory)
        try:
            order = Join(self._address, str(directory.path) if directory else "", self._jobs)
            link = await join_ray(order, environment)
        except BaseException:
            if directory is not None:
                directory.remove()
            raise
        leaving = asyncio.create_task(self._clear_behind(link, directory), name="clear behind Ray")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return link

    async def _clear_behind(self, link: DriverLink, directory: SessionDirectory | None) -> None:
        await link.ended.wait()
        self._older.discard(link)
        if directory is not None:
            await asyncio.to_thread(directory.remove)

    async def _keep_joined(self) -> None:
        """Watch the link, and have a new one when it is of no use any more: this task alone changes it."""
        while True:
            link = self._link
            if link is None or link.silent_s > AWAY_AFTER_S:
                await self._wait_until_back()
                continue
            self._seen.update(link.alive)
            self._missed.difference_update(link.alive)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await link.retired.wait()
                    self._give_up(link, link.why)

    async def _wait_until_back(self) -> None:
        """Until the link's head answers again, or another driver process has joined what answers in its place."""
        link, pause_s = self._link, _FIRST_PAUSE_S
        if link is not None:
            self._why = self._describe_silence(link)
            link.fail_starts(self._why)
            if not self._address:  # it is ours, and will not come back by itself
                self._give_up(link, "its head died")
        _log.warning("ray away", reason=self._why)
        while self._link is None or self._link.silent_s > AWAY_AFTER_S:
            joining = asyncio.create_task(self._join(), name="join Ray again")
            try:
                await self._wait_for_either(joining)
            finally:
                if not joining.done():
                    joining.cancel()
                    await asyncio.wait([joining])
            if not joining.cancelled() and joining.exception() is None:
                if self._link is not None:
                    self._give_up(self._link, "another driver process has joined")
                self._link = joining.result()
            elif not joining.cancelled():
                self._why = str(joining.exception())
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        _log.info("ray back", workers=len(self._workers))

    async def _wait_for_either(self, joining: asyncio.Task[DriverLink]) -> None:
        """Wait until another driver process has joined, or has not, or the head answers the one that there is."""
        while not joining.done():
            await asyncio.wait([joining], timeout=_LOOK_EVERY_S)
            if self._link is not None:
                if self._link.retired.is_set():
                    self._give_up(self._link, self._link.why)
                elif self._link.silent_s <= AWAY_AFTER_S:
                    return

    def _give_up(self, link: DriverLink, why: str) -> None:
        link.retire(why)
        self._missed = self._find_lost(link) | {*link.alive}
        self._why, self._link = link.why, None
        if not link.ended.is_set():
            self._older.add(link)

    def _find_lost(self, link: DriverLink) -> set[str]:
        """Return the hosts that were there since this daemon began, and went without a leave."""
        return (self._missed | (self._seen & {*link.lost})) - {*link.alive}

    def _watch(self, worker: RayWorker) -> None:
        """See that the worker is lost when its host is cut off."""
        at = worker.host
        if at is not None and at not in self._watches:
            self._watches[at] = asyncio.create_task(self._watch_host(at), name=f"watch host {at[0]}")

    async def _watch_host(self, at: tuple[str, int]) -> None:
        silent_s = await wait_until_cut_off(*at)
        self._watches.pop(at, None)
        for worker in tuple(self._workers):
            if worker.host == at:
                worker.lose(f"is lost: host {at[0]} is cut off, it has not answered for {silent_s:.1f} s")

    def _forget(self, worker: RayWorker) -> None:
        self._workers.discard(worker)
        for at in [at for at in self._watches if not any(worker.host == at for worker in self._workers)]:
            self._watches.pop(at).cancel()


class RayWorker:
    """Implements protocol.contract.Worker with one actor. Implements ray_link.ActorEnd."""

    def __init__(self, name: str, link: DriverLink, forget: Callable[[RayWorker], None]) -> None:
        self.name = name
        self.where = "ray"
        self.pids: tuple[int, ...] = ()
        self.host: tuple[str, int] | None = None
        """Where its host is to answer; None on this one."""
        self.unreserved = ""
        """Why its place is not kept from other tenants of the cluster; "" where it is, or none was asked for."""
        self._link = link
        self._forget = forget
        self._number = 0
        self._place: Appeared | None = None
        self._stopping = False
        self._cut_off = False
        self._ended = asyncio.Event()
        self._gone = asyncio.Event()
        self._killing: asyncio.Task[None] | None = None
        self._kind: LossKind = "crashed"
        self._kills = MemoryKillWatch()
        self._frames: asyncio.Queue[bytes | str] = asyncio.Queue()  # a text is how it ended

    async def appear(self, spec: WorkerSpec) -> None:
        """Wait for the actor's process. Raises ClusterAway and WorkerStartFailed."""
        try:
            self._number, self._place = await self._link.start(spec, self)
        except WorkerError as error:
            raise type(error)(f"worker {self.name}: {error}") from error
        place = self._place
        self.where = f"ray node {place.ip} pid {place.pid}"
        self.pids = (place.pid,)
        self.host = None if place.here else (place.ip, place.port)
        self.unreserved = place.unreserved
        if place.unreserved:
            _log.warning("place not reserved", worker=self.name, reason=place.unreserved)

    def send(self, command: Command) -> None:
        self._stopping = self._stopping or isinstance(command, Stop)
        if self._place is not None and not self._ended.is_set():
            self._link.send(PassDown(self._number, encode([command])))

    async def events(self) -> AsyncIterator[Event]:
        while isinstance(frame := await self._frames.get(), bytes):
            try:
                events = decode_events(frame)
            except msgspec.DecodeError as error:
                self._kill()
                raise WorkerLost(f"worker {self.name} ({self.where}): no event: {error}") from error
            for event in events:
                yield event
        self._kill()
        if not self._stopping:
            raise WorkerLost(f"worker {self.name} ({self.where}) {frame}", self._kind)

    async def stop(self, grace_s: float) -> None:
        self.send(Stop())
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s if self._place is not None else 0.0):
                await self._ended.wait()
        await asyncio.shield(self._kill())

    def lose(self, how: str) -> None:
        """End the events now: its host is cut off. Its process is ended when that can be reached again."""
        self._cut_off = True
        self.take_end(how, host=True)
        self.take_gone()

    def take_frame(self, frame: bytes) -> None:
        self._kills.observe_alive()
        self._frames.put_nowait(frame)

    def take_end(self, how: str, *, host: bool) -> None:
        if not self._ended.is_set():  # Ray does not say by which signal; what an engine does itself it has told before
            self._kind = "host" if host else "crashed" if how.startswith("exited") else "killed"
            if _RAY_WANTS_MEMORY in how:
                self._kind = "memory"
            elif self._kind == "killed" and self.host is not None:  # nobody counts what its kernel ends
                how = f"{how}; if memory was short on host {self.host[0]}, its kernel's log says so (dmesg)"
            elif self._kind == "killed" and self._place is not None and self._kills.has_kill():
                self._kind, how = "memory", KILLED_FOR_MEMORY
        self._ended.set()
        self._frames.put_nowait(how)

    def take_gone(self) -> None:
        self._gone.set()

    def _kill(self) -> asyncio.Task[None]:
        """Begin to end this actor's process. Whoever wants that waits for the same end."""
        self._killing = self._killing or asyncio.create_task(self._kill_actor(), name=f"kill {self.name}")
        return self._killing

    async def _kill_actor(self) -> None:
        place = self._place
        if place is not None:
            self._link.send(EndActor(self._number))
            if not self._cut_off:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_HANGS_AFTER_S + _KILL_TIMEOUT_S):
                        if place.here:
                            limits = (place.pid, place.began_s, _HANGS_AFTER_S, _KILL_TIMEOUT_S)
                            await asyncio.to_thread(end_process, *limits)
                        await self._gone.wait()
                        await self._ended.wait()
            self._link.forget(self._number)
        self._forget(self)
