"""Hosts on one machine: network namespaces on a switch, a Ray node in each, on processor cores of their own."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import psutil

from orchestrator.errors import OutriderError

_CLONE_NEWNET = 0x40000000
_START_S = 60.0
_PORT = 6379
_SUBNETS = 250
_TOKEN_BYTES = 32
_PINNED = (
    "import os, sys; cores = {int(one) for one in sys.argv[1].split(',') if one}; "
    "cores and os.sched_setaffinity(0, cores); os.execv(sys.argv[2], sys.argv[2:])"
)
"""A program that runs another one on the cores of its first argument."""
_T = TypeVar("_T")


class HostsError(OutriderError):
    """Hosts cannot be made here; the message says why, and the way out."""


@dataclass(slots=True)
class BenchHost:
    """One host. `cores`: that all its processes run on, empty for all of the machine."""

    name: str
    address: str
    cores: tuple[int, ...] = ()
    node: subprocess.Popen[bytes] | None = None


@dataclass(slots=True)
class BenchHosts:
    """The hosts, of which the first has Ray's head. `token`: what joins Ray needs in its environment. `cable`: what
    lies between the hosts, where that is a process."""

    hosts: list[BenchHost]
    directory: Path
    token: dict[str, str] = field(default_factory=dict)
    cable: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where Ray's head listens."""
        return f"{self.hosts[0].address}:{_PORT}"

    def run_on(self, number: int, function: Callable[[], _T]) -> _T:
        """Run a function as on a host, in a thread of its own; what it starts is on that host, too."""
        host = self.hosts[number]
        return run_on_host(host.name, function, host.cores)

    def join(self, number: int) -> None:
        """Start a host's Ray node unless it is there, and wait until it runs. Raises HostsError."""
        host = self.hosts[number]
        if host.node is not None and host.node.poll() is None:
            return
        arguments: tuple[str, ...]
        if number == 0:
            (self.directory / "ray_current_cluster").unlink(missing_ok=True)  # Ray would look for that one's processes
            arguments = ("--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={self.directory}")
        else:
            arguments = (f"--address={self.address}",)
        log = self.directory / f"{host.name}.log"
        log.unlink(missing_ok=True)  # of an earlier node
        host.node = start_ray(host.name, host.address, log, {**os.environ, **self.token}, *arguments, cores=host.cores)
        deadline_s = time.monotonic() + _START_S
        while "Ray runtime started" not in log.read_text(encoding="utf-8", errors="replace"):
            if host.node.poll() is not None or time.monotonic() > deadline_s:
                told = log.read_text(encoding="utf-8", errors="replace").splitlines()
                raise HostsError(f"Ray did not start on {host.name}: {' | '.join(told[-4:])}")
            time.sleep(0.1)

    def leave(self, number: int) -> None:
        """Kill everything of Ray on a host, at once."""
        host = self.hosts[number]
        node, host.node = host.node, None
        if node is not None:
            end_session(node)

    def close(self) -> None:
        """End Ray on all hosts, the head last, and what lies between them."""
        for number in reversed(range(len(self.hosts))):
            self.leave(number)
        if self.cable is not None:
            self.cable.kill()
            self.cable.wait()


@contextmanager
def make_hosts(
    cores: Sequence[Sequence[int]],
    connect: Callable[[BenchHosts], None] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[BenchHosts]:
    """Make a host for each of these sets of cores, without Ray, and take all away in the end. `connect`: what lays
    cables to their `eth0`, else they are on a switch. `environment`: of Ray. Raises HostsError."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        raise HostsError("hosts are network namespaces, which need Linux, root and iproute2")
    pid, subnet = os.getpid(), os.getpid() % _SUBNETS
    switch = f"ob{pid}s"
    hosts = [
        BenchHost(f"ob{pid}h{number}", f"10.215.{subnet}.{number + 1}", tuple(mine))
        for number, mine in enumerate(cores)
    ]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(_TOKEN_BYTES).hex(), "RAY_USAGE_STATS_ENABLED": "0"}
    directory = Path(tempfile.mkdtemp(prefix="ob"))
    made = BenchHosts(hosts, directory, {**environment, **token})
    try:
        run_ip("netns", "add", switch)
        for host in hosts:
            run_ip("netns", "add", host.name)
        (connect or partial(_connect_by_switch, switch))(made)
        for host in hosts:
            set_address(host.name, host.address)
        yield made
    except subprocess.CalledProcessError as error:
        raise HostsError(f"network namespaces cannot be made here: {error.stderr.decode().strip()}") from error
    finally:
        made.close()
        for name in (*(host.name for host in hosts), switch):
            with suppress(subprocess.CalledProcessError):
                run_ip("netns", "delete", name)
        shutil.rmtree(directory, ignore_errors=True)


def _connect_by_switch(switch: str, made: BenchHosts) -> None:
    run_ip("-n", switch, "link", "add", "switch", "type", "bridge")
    run_ip("-n", switch, "link", "set", "switch", "up")
    for number, host in enumerate(made.hosts):
        port = f"port{number}"
        run_ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        run_ip("-n", switch, "link", "set", port, "master", "switch", "up")


def run_on_host(name: str, function: Callable[[], _T], cores: Sequence[int] = ()) -> _T:
    """Run a function as on a host, in a thread of its own; what it starts is there, and on these cores, too."""

    def enter() -> None:
        enter_host(name)
        if cores:
            os.sched_setaffinity(0, cores)

    with ThreadPoolExecutor(1, initializer=enter) as pool:
        return pool.submit(function).result()


def enter_host(name: str) -> None:
    """Let the calling thread be on a host; sockets and processes that it makes are there too. Raises OSError."""
    with Path("/run/netns", name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def set_address(name: str, address: str) -> None:
    """Give a host whose cable is there its address. Raises CalledProcessError."""
    run_ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    run_ip("-n", name, "link", "set", "eth0", "up")
    run_ip("-n", name, "link", "set", "lo", "up")
    # Ray asks for its address by a way to the internet, and without any it waits for a name server.
    run_ip("-n", name, "route", "add", "default", "dev", "eth0")


def start_ray(
    name: str, address: str, log: Path, environment: dict[str, str], *arguments: str, cores: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start Ray's node of a host on these cores (none: on all). Returns at once; `log` is continued."""
    pinned = (sys.executable, "-c", _PINNED, ",".join(map(str, cores)))
    ray = (str(Path(sys.executable).parent / "ray"), "start", "--block", f"--node-ip-address={address}")
    with log.open("ab") as output:
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", name, *pinned, *ray),
                *("--num-cpus=16", "--object-store-memory=80000000", *arguments),
            ],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill `ray start --block` and the services that it started, which are its session."""
    for each in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(each) == process.pid:
                os.kill(each, signal.SIGKILL)
    process.wait()


def run_ip(*arguments: str) -> None:
    """Run iproute2. Raises CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
