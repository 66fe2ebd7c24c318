"""Measures the ways that bytes can go between two workers: there and back, on one host and between two.

    python -m outrider_lab.measure.data_plane [--rounds 300] [--json OUT]

The messages are those that there are: token ids to and from drafts (64 bytes), hidden states between shards (64 KiB are
8 rows of 2,048 floats), pages of a KV cache (4 MiB). What answers sends as much back. The ways are Unix sockets, TCP,
TCP with TLS as between our hosts, shared memory with a byte over a socket, ZeroMQ where `pyzmq` is installed, calls of
a Ray actor, and a compiled graph of Ray. Hosts are network namespaces that it makes (Linux, as root).
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from adapters.hardware import processor
from outrider_lab.bench.cluster.hosts import BenchHosts, make_hosts
from orchestrator.links.address import LinkEndpoint
from orchestrator.links.endpoint import EndpointServer, knock

SIZES = {"ids, 64 B": 64, "hidden states, 64 KiB": 64 << 10, "KV pages, 4 MiB": 4 << 20}
WARM_UP = 20
Exchange = Callable[[bytes], object]
Speaker = Any
"""A connected socket, encrypted or not."""


def receive_exactly(connected: Speaker, count: int) -> bytes:
    """Return so many bytes. Raises EOFError."""
    found = bytearray(count)
    view = memoryview(found)
    while view:
        got = connected.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(found)


def echo(connected: Speaker) -> None:
    """Send back what comes: 8 bytes of length, then as many."""
    with suppress(OSError, EOFError):
        connected.settimeout(None)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            header = receive_exactly(connected, 8)
            connected.sendall(header + receive_exactly(connected, int.from_bytes(header, "big")))


def serve(host: str) -> None:
    """Answer on a Unix socket, by TLS and by plain TCP, each in a thread, until standard input ends."""
    server = EndpointServer(host)
    plain = socket.create_server((host, 0))

    def admit(listening: socket.socket, greet: bool) -> None:
        while True:
            accepted, _ = listening.accept()
            admitted = server.greet(accepted) if greet else accepted
            if admitted is not None:
                threading.Thread(target=echo, args=(admitted,), daemon=True).start()

    for listening in server.listening:
        threading.Thread(target=admit, args=(listening, True), daemon=True).start()
    threading.Thread(target=admit, args=(plain, False), daemon=True).start()
    endpoint = server.endpoint
    told = {
        "addresses": endpoint.addresses,
        "key": endpoint.key.hex(),
        "certificate": endpoint.certificate,
        "plain": [host, plain.getsockname()[1]],
        "zmq": serve_zmq(host),
    }
    print(json.dumps(told), flush=True)
    sys.stdin.read()


def serve_zmq(host: str) -> str:
    """Answer by ZeroMQ in a thread; returns the address, "" where it is not installed."""
    try:
        zmq = importlib.import_module("zmq")
    except ImportError:
        return ""
    answering = zmq.Context.instance().socket(zmq.REP)
    port = answering.bind_to_random_port(f"tcp://{host}")

    def answer() -> None:
        while True:
            answering.send(answering.recv(), copy=False)

    threading.Thread(target=answer, daemon=True).start()
    return f"tcp://{host}:{port}"


def exchange_over(connected: Speaker) -> Exchange:
    """Return an exchange over a connected socket."""
    connected.settimeout(None)
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(data: bytes) -> object:
        connected.sendall(len(data).to_bytes(8, "big") + data)
        return receive_exactly(connected, 8 + len(data))

    return exchange


def exchange_through_memory(connected: Speaker) -> Exchange:
    """Return an exchange that rings, and copies into and out of memory as often as both sides would."""
    memory = mmap.mmap(-1, max(SIZES.values()))

    def exchange(data: bytes) -> object:
        for _ in range(2):
            memory[: len(data)] = data
            data = memory[: len(data)]
        connected.sendall((1).to_bytes(8, "big") + b"!")
        receive_exactly(connected, 9)
        return data

    return exchange


def exchange_over_zmq(address: str) -> Exchange:
    """Return an exchange over ZeroMQ."""
    zmq = importlib.import_module("zmq")
    asking = zmq.Context.instance().socket(zmq.REQ)
    asking.connect(address)

    def exchange(data: bytes) -> object:
        asking.send(data, copy=False)
        return asking.recv()

    return exchange


def measure(exchange: Exchange, rounds: int) -> dict[str, dict[str, float]]:
    """Return p50 and p99 of a way there and back, by what is sent; microseconds."""
    found = {}
    for name, size in SIZES.items():
        data, took_us = os.urandom(size), []
        for number in range(WARM_UP + (rounds if size < 1 << 20 else rounds // 5)):
            started_s = time.perf_counter()
            exchange(data)
            if number >= WARM_UP:
                took_us.append((time.perf_counter() - started_s) * 1e6)
        found[name] = {"p50_us": statistics.median(took_us), "p99_us": statistics.quantiles(took_us, n=100)[98]}
    return found


@contextmanager
def answering(hosts: BenchHosts, number: int) -> Iterator[dict[str, Any]]:
    """Run what answers on a host."""
    command = [sys.executable, "-m", "outrider_lab.measure.data_plane", "--serve", hosts.hosts[number].address]
    start = partial(subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process: subprocess.Popen[str] = hosts.run_on(number, start)
    try:
        yield json.loads(process.stdout.readline() if process.stdout is not None else "")
    finally:
        process.kill()
        process.wait()


def measure_sockets(told: dict[str, Any], rounds: int, *, here: bool) -> dict[str, Any]:
    """Measure all ways but Ray's."""
    key, certificate = bytes.fromhex(told["key"]), told["certificate"]
    unix, tls = ([one for one in told["addresses"] if one.startswith(kind)] for kind in ("unix", "tcp"))
    found = {}
    if here:
        found["Unix socket"] = measure(exchange_over(knock(LinkEndpoint(unix, key))), rounds)
        found["shared memory"] = measure(exchange_through_memory(knock(LinkEndpoint(unix, key))), rounds)
    found["TCP"] = measure(exchange_over(socket.create_connection(tuple(told["plain"]))), rounds)
    found["TCP with TLS"] = measure(exchange_over(knock(LinkEndpoint(tls, key, certificate))), rounds)
    if told["zmq"]:
        found["ZeroMQ"] = measure(exchange_over_zmq(told["zmq"]), rounds)
    return found


def call_of(ray: Any, call: Callable[[bytes], Any]) -> Exchange:
    """Return an exchange by a call of Ray."""
    return lambda data: ray.get(call(data))


def measure_ray(address: str, other: str, rounds: int) -> dict[str, Any]:
    """Measure calls and compiled graphs of Ray, to an actor on this node and to one on the other; in a process of its
    own, which joins the cluster."""
    ray = importlib.import_module("ray")
    channels = importlib.import_module("ray.dag")
    affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")

    class Echo:
        def answer(self, data: bytes) -> bytes:
            return data

    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
    found: dict[str, Any] = {}
    for where, node in (("one host", nodes[address.partition(":")[0]]), ("two hosts", nodes[other])):
        actor = ray.remote(Echo).options(num_cpus=0, scheduling_strategy=affinity(node, soft=False)).remote()
        found[where] = {"Ray actor call": measure(call_of(ray, actor.answer.remote), rounds)}
        with channels.InputNode() as given:
            graph = actor.answer.bind(given)
        compiled = graph.experimental_compile(_buffer_size_bytes=2 * max(SIZES.values()))
        found[where]["Ray compiled graph"] = measure(call_of(ray, compiled.execute), rounds)
        compiled.teardown()
    ray.shutdown()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--ray", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
        return
    if asked.ray:
        print(json.dumps(measure_ray(asked.ray[0], asked.ray[1], asked.rounds)), flush=True)
        return
    found: dict[str, dict[str, Any]] = {}
    with make_hosts([(), ()]) as hosts:
        for where, number in (("one host", 0), ("two hosts", 1)):
            with answering(hosts, number) as told:
                measuring = partial(measure_sockets, told, asked.rounds, here=number == 0)
                found[where] = hosts.run_on(0, measuring)
        for number in (0, 1):
            hosts.join(number)
        command = [sys.executable, "-m", "outrider_lab.measure.data_plane", "--rounds", str(asked.rounds)]
        command += ["--ray", hosts.address, hosts.hosts[1].address]
        environment = {**os.environ, **hosts.token}
        ran = hosts.run_on(0, partial(subprocess.check_output, command, env=environment))
        for where, ways in json.loads(ran.splitlines()[-1]).items():
            found[where] |= ways
    print(f"there and back on {processor().name}, {os.cpu_count()} cores; p50 and p99, microseconds")
    print(f"{'':<32}" + "".join(f"{name:>26}" for name in SIZES))
    for where, ways in found.items():
        for way, sizes in ways.items():
            cells = "".join(f"{one['p50_us']:>17.0f} {one['p99_us']:>8.0f}" for one in sizes.values())
            print(f"{where + ', ' + way:<32}{cells}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
