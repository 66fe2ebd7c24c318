"""The process that drives Ray for the daemon: it joins or starts a cluster, and passes frames to and from actors.

It is a process of its own because of Ray's native code: that blocks the caller while the cluster's head is away, ends
its process when it loses patience, and takes over signals. docs/adr/0048-ray-in-a-process-of-its-own.md has what was
seen. It, `ray_actor` and `ray_jobs` alone import ray. Run as `python -m orchestrator.launch.ray_driver`.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from adapters.framing import receive_frames
from adapters.libllama import VARIABLE
from adapters.parent_process import end_with_parent
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.errors import ClusterAway, WorkerError
from orchestrator.launch import ray_messages as wire
from orchestrator.launch.node_reports import CARD_KEY, write_card
from orchestrator.launch.process_end import end_process
from orchestrator.launch.ray_actor import CONCURRENCY_GROUPS, HostActor
from orchestrator.launch.ray_places import NODE_SHARE, Places
from orchestrator.launch.ray_settings import JOB_SERVER_WAY_OUT, NAMESPACE, WAY_OUT, init_options
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.worker.host import one_line

_PASSED_ON = (VARIABLE,)
"""Variables of the daemon's environment that every worker gets, on whatever host."""
START_TIMEOUT_S = 60.0
"""Bounds the wait for a place and for the actor's process, while the head answers. ADR 0048. Not tuned."""
HANGS_AFTER_S = 1.0
"""A process that was told to end. ADR 0017. Not tuned."""
# For a task on the process's own node that ends it (ADR 0017). Not tuned.
KILL_TIMEOUT_S = 5.0

# ADR 0048: the head is asked every second.
_ANSWER_EVERY_S = 1.0
# ADR 0048: and given two, so that it counts as away after four.
_ANSWER_TIMEOUT_S = 2.0
_EXIT_CODE_TIMEOUT_S = 5.0  # why a worker ended is worth no longer wait. Not tuned.
# ADR 0048: a busy host's kernel answers within it.
_REACH_TIMEOUT_S = 1.0
_APPEARS_WITHIN_S = 5.0  # a host: the cluster may be a few seconds old. Not tuned.
_UNEXPECTED = 2  # Ray's NodeDeathInfo.UNEXPECTED_TERMINATION
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.+?)(?: Some common causes| There are some|$)", re.MULTILINE)


class Driver:
    """Carries out orders. Each method that may wait for Ray runs in a thread of its own; `pass_down` never waits."""

    def __init__(self, ray: Any, link: Link) -> None:
        self._ray = ray
        self._link = link
        self._node = str(ray.get_runtime_context().get_node_id())
        self._actors: dict[int, Any] = {}
        self._submits: dict[int, Any] = {}
        self._nodes: dict[int, str] = {}
        self._places: dict[int, tuple[str, int]] = {}
        self._processes: dict[int, tuple[int, float]] = {}
        self._ended: set[int] = set()
        self._unreserved: dict[int, str] = {}
        self._places_kept = Places(ray, ray.util.get_node_ip_address(), self._count_gpus)
        self._changing = threading.Lock()
        self._head = ray._private.worker.global_worker.gcs_client
        self.head_answers = True
        self.leaving = threading.Event()

    def answer(self) -> None:
        """Tell every second whether the head answers, until this process takes its leave."""
        while not self.leaving.wait(_ANSWER_EVERY_S):
            answer = self._ask_head()
            self.head_answers = answer.head and not answer.stale
            self._link.send(answer)

    def leave_card(self) -> None:
        """Leave this host's versions with the head, for hosts that want to join."""
        with suppress(self._ray.exceptions.RayError):
            card = write_card(self._ray.__version__)
            self._head.internal_kv_put(CARD_KEY, card, True, NAMESPACE.encode(), timeout=_ANSWER_TIMEOUT_S)

    def list_nodes(self) -> None:
        try:
            addresses = sorted({node.node_manager_address for node in self._alive()})
        except self._ray.exceptions.RayError:
            addresses = []
        self._link.send(wire.Nodes(addresses))

    def start(self, number: int, spec: WorkerSpec) -> None:
        """Start an actor, then follow it until it has ended."""
        try:
            if spec.node not in ("", THIS_NODE):
                self._require_host(spec.node)
            stream = self._appear(number, self._create(number, spec))
        except ClusterAway as error:
            self._link.send(wire.NotStarted(number, str(error), away=True))
        except self._ray.exceptions.GetTimeoutError:
            reason = f"no Ray node had a place for it within {START_TIMEOUT_S:g} s (see ray status)"
            self._link.send(wire.NotStarted(number, reason))
        except Exception as error:
            answer = self._ask_head()
            away = not answer.head or bool(answer.stale)  # no fault of the worker's
            silent = "" if answer.head else "Ray's head does not answer; is it running (ray start --head)?"
            self._link.send(wire.NotStarted(number, answer.stale or silent or reason_of(error), away))
        else:
            self._follow(number, stream)

    def pass_down(self, number: int, frame: bytes) -> None:
        """Hand a frame to an actor; to one that is gone, nothing."""
        if (submit := self._submits.get(number)) is not None:
            with suppress(self._ray.exceptions.RayError):
                submit.remote(frame)

    def end(self, number: int) -> None:
        """End an actor's process, and send when it is gone."""
        with self._changing:
            self._ended.add(number)
            actor = self._actors.pop(number, None)
        if actor is not None:
            self._end_actor(number, actor)
        self._link.send(wire.Gone(number))
        self._places_kept.leave(number)

    def _ask_head(self) -> wire.Answered:
        here = self._ray.NodeID.from_hex(self._node)
        try:
            if self._head.check_alive([here], timeout=_ANSWER_TIMEOUT_S)[0]:
                return wire.Answered(True, "", *self._list_hosts())
        except self._ray.exceptions.AuthenticationError:
            return wire.Answered(head=True, stale="the head at this address is that of another cluster now")
        except self._ray.exceptions.RayError:
            return wire.Answered(head=False)
        return wire.Answered(head=True, stale="the Ray node of this host has left the cluster")

    def _list_hosts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the addresses of the hosts that are there, and of those that went without a leave. Raises RayError."""
        nodes = self._head.get_all_node_info(timeout=_ANSWER_TIMEOUT_S).values()
        alive = {node.node_manager_address for node in nodes if node.state == node.ALIVE}
        last = {node.node_manager_address: node for node in sorted(nodes, key=lambda node: node.start_time_ms)}
        lost = {address for address, node in last.items() if node.death_info.reason == _UNEXPECTED} - alive
        return tuple(sorted(alive)), tuple(sorted(lost))

    def _alive(self) -> list[Any]:
        """Not by `ray.nodes`: that waits for the head, and ends this process where another cluster's answers."""
        nodes = self._head.get_all_node_info(timeout=_ANSWER_TIMEOUT_S).values()
        return [node for node in nodes if node.state == node.ALIVE]

    def _count_gpus(self, ip: str) -> int:
        """Return how many GPUs Ray counts on a host. Raises RayError where the head does not tell."""
        totals = (node.resources_total for node in self._alive() if node.node_manager_address == ip)
        return int(sum(total.get("GPU", 0.0) for total in totals))

    def _require_host(self, ip: str) -> None:
        """Raise ClusterAway where a host is not in the cluster, or cannot be reached: Ray would wait for it."""
        deadline_s = time.monotonic() + _APPEARS_WITHIN_S
        while True:
            nodes = {node.node_manager_address: node.node_manager_port for node in self._alive()}
            if ip in nodes or time.monotonic() > deadline_s:
                break
            time.sleep(_ANSWER_EVERY_S)
        if ip not in nodes:
            hosts = ", ".join(sorted(nodes)) or "none"
            raise ClusterAway(f"host {ip} is not in the Ray cluster now, which has {hosts}; run `outrider join` on it")
        try:
            socket.create_connection((ip, nodes[ip]), _REACH_TIMEOUT_S).close()
        except ConnectionRefusedError:
            pass  # the host is there; of its node Ray will tell
        except OSError as error:
            raise ClusterAway(f"host {ip} cannot be reached: {error}") from error

    def _create(self, number: int, spec: WorkerSpec) -> Any:
        options: dict[str, Any] = {"num_cpus": spec.cpus, "max_restarts": 0, "max_task_retries": 0}
        strategy, self._unreserved[number] = self._places_kept.take(number, spec)
        if strategy is not None:
            options |= {"num_cpus": 0, "scheduling_strategy": strategy}
        elif spec.node == THIS_NODE:
            strategies = self._ray.util.scheduling_strategies
            options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(self._node, soft=False)
        elif spec.node:
            options["resources"] = {f"node:{spec.node}": NODE_SHARE}
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | spec.environment
        if environment:
            options["runtime_env"] = {"env_vars": environment}
        kind = self._ray.remote(concurrency_groups=CONCURRENCY_GROUPS, **options)(HostActor)
        actor = kind.remote(spec.entry, spec.options, spec.cores)  # waits as long as the head is away
        with self._changing:
            if number not in self._ended:
                self._actors[number] = actor
                return actor
        self._ray.kill(actor, no_restart=True)
        raise WorkerError("it was ended before it appeared")

    def _appear(self, number: int, actor: Any) -> Iterator[Any]:
        ip, node, pid, began_s = self._ray.get(actor.place.remote(), timeout=START_TIMEOUT_S)
        self._nodes[number], self._processes[number] = node, (pid, began_s)
        self._submits[number] = actor.submit.options(num_returns=0, concurrency_group="commands")
        ports = {node.node_id.hex(): node.node_manager_port for node in self._alive()}
        self._places[number] = ip, ports.get(node, 0)
        here, unreserved = node == self._node, self._unreserved.pop(number, "")
        self._link.send(wire.Appeared(number, *self._places[number], pid, began_s, here=here, unreserved=unreserved))
        stream: Iterator[Any] = actor.events.options(num_returns="streaming", concurrency_group="events").remote()
        return stream

    def _follow(self, number: int, stream: Iterator[Any]) -> None:
        try:
            for reference in stream:
                self._link.send(wire.PassUp(number, self._ray.get(reference)))
        except Exception as error:
            self._link.send(wire.Ended(number, f"died: {reason_of(error)}", host=not self._has_node(number)))
        else:
            self._link.send(wire.Ended(number, self._exit(number)))

    def _has_node(self, number: int) -> bool:
        """Whether a worker's Ray node is still there: where it is not, its workers died of that."""
        try:
            socket.create_connection(self._places[number], _REACH_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def _exit(self, number: int) -> str:
        actor = self._actors.get(number)
        try:
            if actor is not None:
                code = self._ray.get(actor.exit_code.remote(), timeout=_EXIT_CODE_TIMEOUT_S)
                return f"exited with code {code}"
        except self._ray.exceptions.RayError:
            pass
        return "ended"

    def _end_actor(self, number: int, actor: Any) -> None:
        """Ray asks the process itself to end, and one that is stopped does not hear it. That is killed from outside, on
        its own node, by the daemon where that is this host. Where it cannot be reached, this happens when it can."""
        self._submits.pop(number, None)
        node, process = self._nodes.pop(number, ""), self._processes.pop(number, None)
        errors = (self._ray.exceptions.RayError, ValueError)
        if not self.head_answers and self._end_from_inside(actor):  # `ray.kill` goes by the head
            return
        if node == self._node:
            self._link.send(wire.Gone(number))
        with suppress(*errors):
            self._ray.kill(actor, no_restart=True)
        if process is None or node == self._node:
            return
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        task = self._ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(end_process)
        with suppress(*errors):  # the node is gone, and all its processes with it
            self._ray.get(task.remote(*process, HANGS_AFTER_S, KILL_TIMEOUT_S))

    def _end_from_inside(self, actor: Any) -> bool:
        """Let the process end itself; returns whether it is gone."""
        try:
            self._ray.get(actor.end.options(concurrency_group="ending").remote(), timeout=HANGS_AFTER_S)
        except self._ray.exceptions.GetTimeoutError:
            return False
        except self._ray.exceptions.RayError:
            return True
        return False


class Link:
    """The socket to the daemon. `send` is thread-safe; a daemon that is gone is found by whoever reads."""

    def __init__(self, socket_: socket.socket) -> None:
        self._socket = socket_
        self._sending = threading.Lock()

    def send(self, notice: wire.Notice) -> None:
        """Send a message, in order with those of other threads."""
        with self._sending, suppress(OSError):
            self._socket.sendall(wire.encode(notice))


def join(order: wire.Join) -> tuple[Any, str]:
    """Import ray and join, or start it; returns the module, and where it takes jobs. Raises WorkerError with the way
    out."""
    address = order.address
    try:
        import ray
    except ImportError as error:
        raise WorkerError(f"{error}: {WAY_OUT}") from error
    logging.getLogger("ray").setLevel(logging.WARNING)
    if order.jobs:
        _require_job_server()
    try:
        context = ray.init(**init_options(address, order.directory, jobs=order.jobs))
    except Exception as error:
        if not address:
            way_out = "set cluster.runtime: local to do without it"
            raise WorkerError(f"Ray cannot be started: {one_line(error)}; {way_out}") from error
        way_out = "is it running (ray start --head), and does RAY_AUTH_TOKEN match its nodes'?"
        raise ClusterAway(f"cannot join Ray at {address}: {one_line(error)}; {way_out}") from error
    return ray, f"http://{context.dashboard_url}" if order.jobs and context.dashboard_url else ""


def _require_job_server() -> None:
    """Raise WorkerError where Ray's job server lacks a library: Ray itself would start without it, and say nothing."""
    try:
        for name in ("ray.dashboard.optional_deps", "ray.dashboard.modules.job.job_head"):
            importlib.import_module(name)
    except ImportError as error:
        raise WorkerError(f"Ray's job server cannot run: {error}; {JOB_SERVER_WAY_OUT}") from error


def reason_of(error: Exception) -> str:
    """Return what a Ray error says, in one line; its texts run over a page and hide the cause."""
    if detail := _EXIT_DETAIL.search(text := str(error)):
        return detail[1].strip()
    return ([type(error).__name__] + [line.strip() for line in text.splitlines() if line.strip()])[-1]


def _pass_on_what_workers_print(link: Link) -> None:
    """Take over from Ray, which prints workers' output to ours. Where Ray is built otherwise it goes on printing."""

    def pass_on(batch: dict[str, Any]) -> None:  # Ray's own services send some too, with a name where the pid should be
        pid = str(batch.get("pid"))
        if pid.isdecimal():
            lines = [str(line) for line in batch.get("lines", ())]
            link.send(wire.Printed(str(batch.get("actor_name") or "actor"), int(pid), lines))

    with suppress(ImportError, AttributeError):
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        dispatcher.remove_handler("ray_print_logs")
        dispatcher.add_handler(NAMESPACE, pass_on)


def main() -> int:
    """Serve one daemon over the socket `--fd`; returns the exit code."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's: it takes its workers down in order
    parser = argparse.ArgumentParser(prog="python -m orchestrator.launch.ray_driver", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="an inherited socket to the daemon")
    connection = socket.socket(fileno=parser.parse_args().fd)
    end_with_parent()
    link = Link(connection)
    first = next(receive_frames(connection), None)
    if first is None:
        return 0
    order = wire.decode_order(first)
    assert isinstance(order, wire.Join)  # noqa: S101 -- the protocol
    try:
        # Ray's processes are bound to the *thread* that starts them: this one, which outlives them.
        ray, job_server = join(order)
    except WorkerError as error:
        link.send(wire.NotJoined(str(error), away=isinstance(error, ClusterAway)))
        return 1
    _pass_on_what_workers_print(link)
    driver = Driver(ray, link)
    link.send(wire.Joined(job_server, ray.util.get_node_ip_address()))
    threading.Thread(target=driver.answer, name="answer", daemon=True).start()
    _in_thread("card", driver.leave_card)
    _carry_out_orders(connection, driver)
    driver.leaving.set()
    if driver.head_answers:  # Ray would wait for it, to take leave
        ray.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever other threads wait for


def _carry_out_orders(connection: socket.socket, driver: Driver) -> None:
    """Until the daemon has closed its end."""
    for frame in receive_frames(connection):
        match wire.decode_order(frame):
            case wire.PassDown(number, commands):
                driver.pass_down(number, commands)
            case wire.StartActor(number, spec):
                _in_thread(f"worker {number}", driver.start, number, spec)
            case wire.EndActor(number):
                _in_thread(f"end {number}", driver.end, number)
            case wire.AskNodes():
                _in_thread("nodes", driver.list_nodes)
            case _:
                pass


def _in_thread(name: str, target: Any, *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, name=name, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
