"""Several hosts with Ray for a test: network namespaces on a switch, which it makes and removes itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.hosts import end_session, enter_host, join_ray, run_ip

_PORT = 6379
_SUBNETS = 250
_TOKEN_BYTES = 32
_T = TypeVar("_T")


@dataclass(slots=True)
class Host:
    """One host. `node`: Ray's process there."""

    name: str
    address: str
    node: subprocess.Popen[bytes] | None = None


@dataclass(slots=True)
class ManyHosts:
    """The hosts, of which the first has Ray's head. `switch`: the namespace that all cables end in; `directory`:
    Ray's."""

    hosts: list[Host]
    switch: str
    directory: Path

    @property
    def address(self) -> str:
        """Where Ray's head listens."""
        return f"{self.hosts[0].address}:{_PORT}"

    def run_on(self, number: int, function: Callable[[], _T]) -> _T:
        """Run a function as on a host, in a thread of its own; what it starts is on that host, too."""
        with ThreadPoolExecutor(1, initializer=enter_host, initargs=(self.hosts[number].name,)) as pool:
            return pool.submit(function).result()

    def join(self, number: int) -> None:
        """Start a host's Ray node, and wait until it runs."""
        host = self.hosts[number]
        if number == 0:
            (self.directory / "ray_current_cluster").unlink(missing_ok=True)  # Ray would look for that one's processes
            head = ("--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={self.directory}")
            arguments: tuple[str, ...] = head
        else:
            arguments = (f"--address={self.address}",)
        host.node = join_ray(host.name, host.address, self.directory, *arguments, processors=16)

    def cable(self, number: int, state: str) -> None:
        """Plug a host's cable in ("up") or out ("down")."""
        run_ip("-n", self.switch, "link", "set", f"port{number}", state)

    def leave(self, number: int) -> None:
        """Kill everything of Ray on a host, at once."""
        host = self.hosts[number]
        node, host.node = host.node, None
        if node is not None:
            end_session(node)


@contextmanager
def join_hosts(monkeypatch: pytest.MonkeyPatch, count: int, joined: int) -> Iterator[ManyHosts]:
    """Make hosts, of which the first `joined` have Ray; skips the test where this user may not. What joins Ray finds
    its token in the environment."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts are network namespaces, which need Linux, root and iproute2")
    number, switch = os.getpid(), f"ob{os.getpid()}s"
    hosts = [Host(f"ob{number}h{one}", f"10.215.{number % _SUBNETS}.{one + 1}") for one in range(count)]
    for name, value in (
        ("RAY_AUTH_MODE", "token"),
        ("RAY_AUTH_TOKEN", os.urandom(_TOKEN_BYTES).hex()),
        ("RAY_USAGE_STATS_ENABLED", "0"),
    ):
        monkeypatch.setenv(name, value)
    made = ManyHosts(hosts, switch, Path(tempfile.mkdtemp(prefix="ob")))
    try:
        try:
            _lay_switch(switch, hosts)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        for each in range(joined):
            made.join(each)
        yield made
    finally:
        for each in reversed(range(count)):
            made.leave(each)
        for name in (*(host.name for host in hosts), switch):
            with suppress(subprocess.CalledProcessError):
                run_ip("netns", "delete", name)
        shutil.rmtree(made.directory, ignore_errors=True)


def _lay_switch(switch: str, hosts: list[Host]) -> None:
    run_ip("netns", "add", switch)
    run_ip("-n", switch, "link", "add", "switch", "type", "bridge")
    run_ip("-n", switch, "link", "set", "switch", "up")
    for number, host in enumerate(hosts):
        run_ip("netns", "add", host.name)
        port = f"port{number}"
        run_ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        run_ip("-n", switch, "link", "set", port, "master", "switch", "up")
        run_ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run_ip("-n", host.name, "link", "set", "eth0", "up")
        run_ip("-n", host.name, "link", "set", "lo", "up")
        # Ray asks for its address by a way to the internet, and without any it waits for a name server.
        run_ip("-n", host.name, "route", "add", "default", "dev", "eth0")
