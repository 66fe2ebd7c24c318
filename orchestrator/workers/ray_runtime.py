"""Workers as Ray actors, on this machine or on any node of a Ray cluster. The only module that imports ray.

An actor imports this module, so a remote node needs the same outrider installed as the daemon; nothing is
shipped to it. Events travel back as a streaming generator, commands as actor calls without a reply.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from orchestrator.errors import WorkerError, WorkerLost, WorkerStartFailed
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.frames import decode_events, encode
from orchestrator.workers.host import NODE_ADDRESS, EngineHost, one_line
from orchestrator.workers.messages import Command, Event, Stop
from orchestrator.workers.output import say
from orchestrator.workers.process_end import end_process, read_start_time_s
from orchestrator.workers.ray_settings import NAMESPACE, init_options, probe, restore_environment, set_environment
from policies.serving.failover.blame import LossKind

_START_TIMEOUT_S = 60.0  # bounds the wait for a place and for the actor's process
_CLOSE_GRACE_S = _KILL_TIMEOUT_S = 5.0
_HANGS_AFTER_S = 1.0  # a process that Ray has told to end
_NODE_SHARE = 0.001  # of a node's own resource: binds an actor to it, and leaves room for a thousand
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.+?)(?: Some common causes| There are some|$)", re.MULTILINE)
_NODE_GONE = re.compile(r"node.{0,80}(?:died|dead|was terminated)", re.IGNORECASE | re.DOTALL)
_GROUPS = {"events": 1, "commands": 1}  # a thread each: commands are carried out in their order


class RayCluster:
    """Implements workers.contract.Cluster. `address` "" starts a Ray of its own on this machine and ends it."""

    runtime = "ray"

    def __init__(self, address: str) -> None:
        self._address = address
        self._connected: asyncio.Future[tuple[Any, ExitStack]] | None = None
        self._workers: set[RayWorker] = set()
        # Ray's processes are bound to the *thread* that starts them (PR_SET_PDEATHSIG): it must outlive them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")

    async def open(self) -> None:
        if self._connected is None:
            self._connected = asyncio.wrap_future(self._thread.submit(_connect, self._address))
        try:
            await asyncio.shield(self._connected)  # cancelled: `close` waits for it and takes it down
        except WorkerError:
            self._connected = None
            raise
        finally:
            _take_signals_back()

    async def nodes(self) -> list[str]:
        """See workers.contract.Cluster."""
        if self._connected is None:
            return []
        ray, _ = await asyncio.shield(self._connected)
        return sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])

    async def start(self, spec: WorkerSpec) -> RayWorker:
        """See workers.contract.Cluster."""
        if self._connected is None:
            raise WorkerStartFailed(f"worker {spec.name} cannot be started: the Ray cluster is not open")
        ray, _ = await asyncio.shield(self._connected)
        worker = RayWorker(ray, spec, self._workers.discard)
        self._workers.add(worker)
        try:
            await worker.appear(_START_TIMEOUT_S)
        except BaseException:
            await worker.stop(0.0)
            raise
        return worker

    async def close(self) -> None:
        await asyncio.gather(*(worker.stop(_CLOSE_GRACE_S) for worker in tuple(self._workers)))
        connected, self._connected = self._connected, None
        if connected is not None:
            with suppress(WorkerError):
                _, down = await connected
                await asyncio.wrap_future(self._thread.submit(down.close))
        self._thread.shutdown()


def _connect(address: str) -> tuple[Any, ExitStack]:
    """Import ray and connect, or start it. Returns the module, and what takes all of it down again. Raises WorkerError
    with the way out, and then has changed nothing."""
    if "://" in address:
        raise WorkerError(f"cluster.address {address}: Ray's client protocol is not supported; use HOST:PORT")
    with ExitStack() as down:
        down.callback(restore_environment, set_environment(address))
        try:
            import ray
        except ImportError as error:
            raise WorkerError(f"{error}: pip install ray, or set cluster.runtime: local") from error
        logging.getLogger("ray").setLevel(logging.WARNING)
        logging.getLogger("ray._private.worker").addFilter(_worth_saying)
        try:
            probe(address)
            _read_environment_again()
            ray.init(**init_options(address))
            down.callback(ray.shutdown)
            _log_what_workers_print()
        except Exception as error:
            if not address:
                way_out = "set cluster.runtime: local to do without it"
                raise WorkerError(f"Ray cannot be started: {one_line(error)}; {way_out}") from error
            way_out = "is it running (ray start --head), and does RAY_AUTH_TOKEN match its nodes'?"
            raise WorkerError(f"cannot join Ray at {address}: {one_line(error)}; {way_out}") from error
        return ray, down.pop_all()


def _read_environment_again() -> None:
    """Ray's native code read it when ray was first imported, perhaps for another cluster, or by somebody else."""
    with suppress(ImportError, AttributeError):
        native: Any = importlib.import_module("ray._raylet")
        native.Config.initialize("")
        native.AuthenticationTokenLoader.instance().reset_cache()


def _log_what_workers_print() -> None:
    """Take over from Ray, which prints workers' output to ours. Where Ray is built otherwise it goes on printing."""
    with suppress(ImportError, AttributeError):
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        dispatcher.remove_handler("ray_print_logs")
        dispatcher.remove_handler(NAMESPACE)
        dispatcher.add_handler(NAMESPACE, _log_printed)


def _log_printed(batch: dict[str, Any]) -> None:
    """Log a batch of lines, in Ray's thread. Ray's own services send some too, with a name where the pid should be."""
    pid = batch.get("pid")
    if isinstance(pid, int) or str(pid).isdecimal():
        for line in batch.get("lines", ()):
            say(str(batch.get("actor_name") or "actor"), int(str(pid)), str(line))


def _worth_saying(record: logging.LogRecord) -> bool:  # that Ray leaves SIGTERM alone is what we want
    return "SIGTERM handler is not set" not in record.getMessage()


def _take_signals_back() -> None:
    """Put the daemon's handler back: Ray's native code takes over SIGTERM and prints a trace on it."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


class HostActor:
    """The actor: an engine host whose engine runs in a thread of its own."""

    def __init__(self, entry: str, options: dict[str, Any], cores: list[int]) -> None:
        import ray

        os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        self._host = EngineHost(entry, options, cores)
        self._code = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._code = self._host.run()

    def place(self) -> tuple[str, str, int, float]:
        """Return the node's address and id, the process's, and when it began."""
        import ray

        pid = os.getpid()
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), pid, read_start_time_s(pid)

    def submit(self, frame: bytes) -> None:
        self._host.deliver(frame)

    def events(self) -> Iterator[bytes]:
        yield from self._host.frames()

    def exit_code(self) -> int:
        """Wait for the engine's end and return how it ended, as a process would."""
        self._thread.join()
        return self._code


class RayWorker:
    """Implements workers.contract.Worker with one actor."""

    def __init__(self, ray: Any, spec: WorkerSpec, forget: Callable[[RayWorker], None]) -> None:
        self._ray = ray
        self.name = spec.name
        self.where = "ray"
        self._forget = forget
        self._pid, self._began_s = 0, 0.0
        self._node = ""
        self._on_this_node = False
        self._stopping = False
        self._ended = asyncio.Event()
        self._killing: asyncio.Task[None] | None = None
        self._frames: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        options: dict[str, Any] = {"num_cpus": spec.cpus, "max_restarts": 0, "max_task_retries": 0}
        if spec.node:
            options["resources"] = {f"node:{spec.node}": _NODE_SHARE}
        if spec.environment:
            options["runtime_env"] = {"env_vars": dict(spec.environment)}
        actor = ray.remote(concurrency_groups=_GROUPS, **options)(HostActor)
        self._actor = actor.remote(spec.entry, spec.options, spec.cores)
        self._submit = self._actor.submit.options(num_returns=0, concurrency_group="commands")

    async def appear(self, timeout_s: float) -> None:
        """Wait for the actor's process and begin to read its events. Raises WorkerStartFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                ip, self._node, self._pid, self._began_s = await self._actor.place.remote()
        except TimeoutError:
            raise WorkerStartFailed(
                f"worker {self.name}: no Ray node had a place for it within {timeout_s:g} s (see ray status)"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise WorkerStartFailed(f"worker {self.name}: {reason(error)}") from error
        self.where = f"ray node {ip} pid {self._pid}"
        self._on_this_node = self._node == self._ray.get_runtime_context().get_node_id()
        stream = self._actor.events.options(num_returns="streaming", concurrency_group="events").remote()
        pump = (stream, asyncio.get_running_loop())
        threading.Thread(target=self._pump, args=pump, name=f"events {self.name}", daemon=True).start()

    def send(self, command: Command) -> None:
        """See workers.contract.Worker."""
        self._stopping = self._stopping or isinstance(command, Stop)
        if not self._ended.is_set():
            with suppress(self._ray.exceptions.RayError):
                self._submit.remote(encode([command]))

    async def events(self) -> AsyncIterator[Event]:
        """See workers.contract.Worker."""
        while isinstance(frame := await self._frames.get(), bytes):
            try:
                events = decode_events(frame)
            except msgspec.DecodeError as error:
                await self._kill()
                raise WorkerLost(f"worker {self.name} ({self.where}): no event: {error}") from error
            for event in events:
                yield event
        ended = f"died: {reason(frame)}" if frame is not None else await self._exit()
        # Ray does not say by which signal; what an engine does itself it has told before.
        kind: LossKind = "crashed" if ended.startswith("exited") else "killed"
        if frame is not None and _NODE_GONE.search(str(frame)):
            kind = "host"
        await self._kill()
        if not self._stopping:
            raise WorkerLost(f"worker {self.name} ({self.where}) {ended}", kind) from frame

    async def stop(self, grace_s: float) -> None:
        """See workers.contract.Worker."""
        self.send(Stop())
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s if self._pid else 0.0):
                await self._ended.wait()
        await self._kill()

    def _pump(self, stream: Iterator[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Carry frames to the event loop, from a thread: half the CPU time of Ray's own asyncio iteration."""
        end: Exception | None = None
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            try:
                for reference in stream:
                    loop.call_soon_threadsafe(self._frames.put_nowait, self._ray.get(reference))
            except Exception as error:
                end = error
            finally:
                loop.call_soon_threadsafe(self._end, end)

    def _end(self, end: Exception | None) -> None:
        self._ended.set()
        self._frames.put_nowait(end)

    async def _exit(self) -> str:
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                return f"exited with code {await self._actor.exit_code.remote()}"
        except (TimeoutError, self._ray.exceptions.RayError):
            return "ended"

    async def _kill(self) -> None:
        """End this actor's process, and wait until it is gone. Whoever wants that waits for the same end."""
        self._killing = self._killing or asyncio.create_task(self._kill_actor(), name=f"kill {self.name}")
        await asyncio.shield(self._killing)

    async def _kill_actor(self) -> None:
        self._forget(self)
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor, no_restart=True)
        if self._pid:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HANGS_AFTER_S + _KILL_TIMEOUT_S):
                    await self._end_process()
                    await self._ended.wait()

    async def _end_process(self) -> None:
        """Ray asks the process itself to end, and one that is stopped does not hear it: it is killed from outside, on
        its own node. Where that one cannot be reached now, this happens when it can again."""
        limits = (self._pid, self._began_s, _HANGS_AFTER_S, _KILL_TIMEOUT_S)
        if self._on_this_node:
            await asyncio.to_thread(end_process, *limits)
            return
        there = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self._node, soft=False)
        task = self._ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(end_process)
        with suppress(self._ray.exceptions.RayError):  # the node is gone, and all its processes with it
            await task.remote(*limits)


def reason(error: Exception) -> str:
    """Return what a Ray error says, in one line; its texts run over a page and hide the cause."""
    if found := _EXIT_DETAIL.search(text := str(error)):
        return found[1].strip()
    return ([type(error).__name__] + [line.strip() for line in text.splitlines() if line.strip()])[-1]
