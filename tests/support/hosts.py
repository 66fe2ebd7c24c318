"""Two hosts on this machine: network namespaces with a cable between them, and a Ray cluster over both."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

_CLONE_NEWNET = 0x40000000
_START_S = 240.0
_MOUNT = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
"""A shell's program that runs its arguments over an empty disk at the first of them."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Hosts:
    """Names of the namespaces, and their addresses; `address` is the Ray cluster's."""

    near: str
    far: str
    near_ip: str
    far_ip: str

    @property
    def address(self) -> str:
        return f"{self.near_ip}:6379"

    def cable(self, state: str) -> None:
        """Plug the cable between them in ("up") or out ("down")."""
        run_ip("-n", self.far, "link", "set", "eth0", state)
        if state == "up":  # the kernel took the way out with the link, and a host's network service would bring it back
            run_ip("-n", self.far, "route", "replace", "default", "dev", "eth0")

    def on_near(self, function: Callable[[], _T]) -> _T:
        """Run a function as on the near host, in a thread of its own."""
        with ThreadPoolExecutor(1, initializer=enter_host, initargs=(self.near,)) as pool:
            return pool.submit(function).result()


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts; skips the test where this user may not."""
    number = os.getpid() % 250
    hosts = Hosts(f"or{os.getpid()}a", f"or{os.getpid()}b", f"10.213.{number}.1", f"10.213.{number}.2")
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    try:
        run_ip("netns", "add", hosts.near)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        run_ip("netns", "add", hosts.far)
        run_ip("-n", hosts.near, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", hosts.far)
        for name, address in ((hosts.near, hosts.near_ip), (hosts.far, hosts.far_ip)):
            run_ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run_ip("-n", name, "link", "set", "eth0", "up")
            run_ip("-n", name, "link", "set", "lo", "up")
            # Ray asks for its address by a way to the internet, and without any it waits for a name server.
            run_ip("-n", name, "route", "add", "default", "dev", "eth0")
        yield hosts
    finally:
        for name in (hosts.near, hosts.far):
            with suppress(subprocess.CalledProcessError):
                run_ip("netns", "delete", name)


class RayNodes:
    """Ray on both hosts, as `ray start` makes it."""

    def __init__(self, hosts: Hosts, directory: Path, far_disk: Path | None = None) -> None:
        self._hosts = hosts
        self._directory = directory
        self._far_disk = far_disk
        self._started: list[subprocess.Popen[bytes]] = []

    def start_head(self) -> None:
        """Start it on the near host. It knows nothing of one before."""
        # Ray would take that one for alive: it looks at processes of all hosts here.
        (self._directory / "ray_current_cluster").unlink(missing_ok=True)
        arguments = ("--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._directory}")
        self._started.insert(0, _start_ray(self._hosts.near, self._hosts.near_ip, self._directory, *arguments))
        _until_it_listens(self._hosts)

    def join_far(self) -> None:
        """Start a node on the far host."""
        arguments = (self._hosts.far, self._hosts.far_ip, self._directory, f"--address={self._hosts.address}")
        self._started.append(join_ray(*arguments, own_disk=self._far_disk))

    def kill_head(self) -> None:
        """End all of Ray on the near host."""
        end_session(self._started.pop(0))

    def end(self) -> None:
        """End all of it."""
        for process in self._started:
            end_session(process)


@contextmanager
def ray_over(hosts: Hosts, *, far: bool = True, far_disk: Path | None = None, **environment: str) -> Iterator[RayNodes]:
    """Start Ray on both. A token is set in this process's environment, for whoever joins; `environment`: the nodes'.
    `far_disk`: a directory in whose place the far host has a disk of its own, which is empty at first."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex(), "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in (*token, *environment)}
    directory = Path(tempfile.mkdtemp(prefix="or"))
    os.environ.update(token | environment)
    nodes = RayNodes(hosts, directory, far_disk)
    try:
        nodes.start_head()
        if far:
            nodes.join_far()
        for name in environment:
            os.environ.pop(name)
        yield nodes
    finally:
        nodes.end()
        shutil.rmtree(directory, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def join_ray(
    host: str, address: str, directory: Path, *arguments: str, own_disk: Path | None = None, processors: int = 4
) -> subprocess.Popen[bytes]:
    """Start Ray's node of a host, with a log in that directory, and wait until it runs; again where it gives up, as it
    does on a busy machine."""
    log, deadline = Path(directory, f"{host}.log"), time.monotonic() + _START_S
    while True:
        process = _start_ray(host, address, directory, *arguments, own_disk=own_disk, processors=processors)
        joined = False
        try:
            joined = _has_joined(process, log, deadline)
        finally:
            if not joined:
                end_session(process)
        if joined:
            return process


def _start_ray(
    host: str, address: str, directory: Path, *arguments: str, own_disk: Path | None = None, processors: int = 4
) -> subprocess.Popen[bytes]:
    ray = str(Path(sys.executable).parent / "ray")
    mounted = ("unshare", "--mount", "sh", "-c", _MOUNT, str(own_disk)) if own_disk is not None else ()
    with Path(directory, f"{host}.log").open("wb") as log:
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", host, *mounted, ray, "start", "--block", f"--node-ip-address={address}"),
                *(f"--num-cpus={processors}", "--object-store-memory=80000000", *arguments),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _until_it_listens(hosts: Hosts) -> None:
    deadline = time.monotonic() + _START_S
    while hosts.on_near(lambda: _refuse(hosts)):
        assert time.monotonic() < deadline, "Ray did not start"
        time.sleep(0.2)


def _has_joined(process: subprocess.Popen[bytes], log: Path, deadline: float) -> bool:
    """Wait until a node runs; False where it has ended instead."""
    while "Ray runtime started" not in (told := log.read_text(encoding="utf-8", errors="replace")):
        assert time.monotonic() < deadline, f"Ray did not join: {told}"
        if process.poll() is not None:
            return False
        time.sleep(0.1)
    return True


def _refuse(hosts: Hosts) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((hosts.near_ip, 6379)) != 0


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End `ray start --block` and the services that it started, which are its session: at once, as nobody is to take
    leave of a head that is being ended too."""
    for each in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(each) == process.pid:
                os.kill(each, signal.SIGKILL)
    process.wait()


def enter_host(namespace: str) -> None:
    """Let the calling thread be on that host; what it starts is there too."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def run_ip(*arguments: str) -> None:
    """Run iproute2. Raises CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
