"""Two hosts on this machine, with a cable that can be cut or slowed, and a Ray cluster whose nodes can be lost."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from outrider_lab.bench.cluster.hosts import end_session, run_ip, run_on_host, set_address, start_ray
from outrider_lab.chaos.relay import DEVICE
from outrider_lab.chaos.relay import TUN as TUN
from outrider_lab.chaos.service import ChaosError

_START_S = 60.0
_PORT = 6379
_T = TypeVar("_T")


@dataclass(slots=True)
class RayHosts:
    """The hosts' names and addresses, the relay between them, and Ray's node on each."""

    near: str
    far: str
    near_ip: str
    far_ip: str
    directory: Path
    environment: dict[str, str]
    cable: subprocess.Popen[bytes] | None = None
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Where Ray's head listens."""
        return f"{self.near_ip}:{_PORT}"

    def on_near(self, function: Callable[[], _T]) -> _T:
        """Run a function as on the near host, in a thread of its own."""
        return run_on_host(self.near, function)

    def relay(self, order: str) -> None:
        """Tell the cable what to do: `cut`, `up` or `delay MILLISECONDS`."""
        assert self.cable is not None  # noqa: S101  # two_hosts has set it
        assert self.cable.stdin is not None  # noqa: S101  # as above
        self.cable.stdin.write(f"{order}\n".encode())
        self.cable.stdin.flush()

    def start_head(self) -> None:
        """Start Ray's head on the near host, and wait until it listens. Raises ChaosError."""
        self._start(self.near, self.near_ip, "--head", f"--port={_PORT}", "--include-dashboard=false")
        deadline = time.monotonic() + _START_S
        while self.on_near(self._refuses):
            if time.monotonic() > deadline:
                log = (self.directory / f"{self.near}.log").read_text(encoding="utf-8", errors="replace")
                raise ChaosError(f"Ray's head did not start: {' | '.join(log.splitlines()[-8:])}")
            time.sleep(0.2)

    def start_node(self) -> None:
        """Start Ray's node on the far host, unless it is there."""
        known = self.nodes.get(self.far)
        if known is None or known.poll() is not None:
            self._start(self.far, self.far_ip, f"--address={self.address}")

    def kill_head(self) -> None:
        """Kill everything of Ray on the near host."""
        end_session(self.nodes[self.near])

    def kill_node(self) -> None:
        """Kill everything of Ray on the far host."""
        end_session(self.nodes[self.far])

    def restart_head(self) -> None:
        """Start a head again. It knows nothing of the far node, which is ended before and started again behind it.

        Ray looks for a head among all processes of the machine, and would take the far node for one of the near host.
        """
        end_session(self.nodes[self.far])
        self.start_head()
        self.start_node()

    def _start(self, host: str, address: str, *arguments: str) -> None:
        log, environment = self.directory / f"{host}.log", {**os.environ, **self.environment}
        self.nodes[host] = start_ray(host, address, log, environment, f"--temp-dir={self.directory}", *arguments)

    def _refuses(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self.near_ip, _PORT)) != 0


@contextmanager
def two_hosts(environment: dict[str, str]) -> Iterator[RayHosts]:
    """Make two hosts with Ray over both, and take all of it away in the end. Raises ChaosError."""
    number = os.getpid() % 250
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex(), "RAY_USAGE_STATS_ENABLED": "0"}
    names = (f"oc{os.getpid()}a", f"oc{os.getpid()}b")
    hosts = RayHosts(
        *(*names, f"10.214.{number}.1", f"10.214.{number}.2"),
        Path(tempfile.mkdtemp(prefix="oc")),
        {**environment, **token},
    )
    try:
        for name in names:
            run_ip("netns", "add", name)
        hosts.cable = _lay_cable(hosts)
        for name, address in ((hosts.near, hosts.near_ip), (hosts.far, hosts.far_ip)):
            set_address(name, address)
        hosts.start_head()
        hosts.start_node()
        yield hosts
    except subprocess.CalledProcessError as error:
        raise ChaosError(f"hosts cannot be made here: {error.stderr.decode().strip()}") from error
    finally:
        for process in hosts.nodes.values():
            end_session(process)
        if hosts.cable is not None:
            hosts.cable.kill()
            hosts.cable.wait()
        for name in names:
            with suppress(subprocess.CalledProcessError):
                run_ip("netns", "delete", name)
        shutil.rmtree(hosts.directory, ignore_errors=True)


def _lay_cable(hosts: RayHosts) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider_lab.chaos.relay", hosts.near, hosts.far, DEVICE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None  # noqa: S101  # it is a pipe
    if not process.stdout.readline():
        raise ChaosError("the relay between the hosts did not start")
    return process
