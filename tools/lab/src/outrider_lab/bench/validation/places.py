"""Real daemons to measure: on this machine alone, and over Ray on hosts that are network namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from orchestrator.daemon.api.question import system_fingerprint
from orchestrator.protocol.ready import Ready
from outrider_lab.bench.cluster.hosts import BenchHosts, make_hosts
from outrider_lab.bench.cluster.served import Served, serve
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.validation.runs import RUNTIME, UNLIKE_RUNTIMES, FaultName, Place

_READY_S, _POLL_S = 240.0, 0.1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RealPlace:
    """A daemon that serves. `workers`: the cores of each. `call` runs a function where the daemon's clients are."""

    place: Place
    url: str
    workers: Sequence[Sequence[int]]
    query: Callable[[str], dict[str, Any]]
    call: Callable[[Callable[[], Any]], Any]
    hosts: BenchHosts | None = None
    cut: list[int] = field(default_factory=list)

    def fail(self, fault: FaultName) -> None:
        """Let something go wrong: it hits the last worker."""
        if fault == "kill_worker":
            os.kill(self._find_pid(), signal.SIGKILL)
        elif self.hosts is not None:
            number = len(self.hosts.hosts) - 1
            if fault == "kill_host":
                self.hosts.leave(number)
            else:
                set_link(self.hosts, number, up=False)
                self.cut.append(number)

    def mend(self) -> None:
        """Put links up again."""
        while self.hosts is not None and self.cut:
            set_link(self.hosts, self.cut.pop(), up=True)

    def measure_restart_s(self) -> float:
        """Return how long it takes until a worker that was killed serves again, with nothing else to do."""
        pid = self._find_pid()
        began_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while self._find_pid() == pid:
            time.sleep(_POLL_S / 2.0)
        self.wait_serving()
        return time.monotonic() - began_s

    def wait_serving(self) -> None:
        """Wait until every worker serves. Raises BenchError."""
        deadline_s = time.monotonic() + _READY_S
        while time.monotonic() < deadline_s:
            replicas = self.call(lambda: self.query("/admin/status"))["replicas"]
            if len(replicas) == len(self.workers) and all(one["phase"] == "ready" for one in replicas):
                return
            time.sleep(_POLL_S)
        raise BenchError(f"{self.place}: not every worker serves within {_READY_S:g} s")

    def find_fingerprint(self, number: int) -> str:
        """Return the `system_fingerprint` of a worker's answers."""
        shown = self.call(lambda: self.query("/admin/status"))["replicas"][number]["ready"]
        parts = dict.fromkeys(("model", "device", "precision", "drafting", "kv", "shards"), shown)
        return system_fingerprint(msgspec.convert({**shown, **parts}, Ready)) or ""

    def _find_pid(self) -> int:
        """Return the process of the last worker. Raises BenchError where none was ever ready."""
        replicas = self.call(lambda: self.query("/admin/status"))["replicas"]
        ready = replicas[-1]["ready"]
        if not ready:
            raise BenchError(f"{self.place}: the last worker never was ready")
        return int(ready["pid"])


def set_link(hosts: BenchHosts, number: int, *, up: bool) -> None:
    """Take a host off the network of all hosts, or put it on again."""
    host = hosts.hosts[number]
    state = "up" if up else "down"
    subprocess.run(["ip", "-n", host.name, "link", "set", "eth0", state], check=True, capture_output=True)
    if up:
        subprocess.run(
            ["ip", "-n", host.name, "route", "add", "default", "dev", "eth0"], check=False, capture_output=True
        )


def split_cores(place: Place) -> list[list[int]]:
    usable = sorted(os.sched_getaffinity(0))
    half = max(1, len(usable) // 2)
    return [usable] if place == "one worker" else [usable[:half], usable[half:] or usable]


def list_runtimes(place: Place) -> list[str]:
    return list(UNLIKE_RUNTIMES) if place == "unlike workers" else [RUNTIME] * len(split_cores(place))


@contextmanager
def open_place(place: Place, base: dict[str, Any], directory: Path) -> Iterator[RealPlace]:
    """Run a daemon until the end of the block. `base`: its configuration. Raises BenchError or HostsError."""
    workers = split_cores(place)
    if place == "three hosts":
        yield from _open_hosts(base, directory, workers)
        return
    config = {**base, "model": {**base["model"], **_place_workers(place, workers)}}
    with serve(None, directory, config) as served:
        found = RealPlace(place, served.url, workers, served.query, _call_here)
        found.wait_serving()
        yield found


def _place_workers(place: Place, workers: Sequence[Sequence[int]]) -> dict[str, Any]:
    placed = [
        {"cores": list(cores), "adapter": name} for cores, name in zip(workers, list_runtimes(place), strict=True)
    ]
    return {"replicas": placed} if len(workers) > 1 else {}


def _call_here(function: Callable[[], _T]) -> _T:
    return function()


def _open_hosts(base: dict[str, Any], directory: Path, workers: Sequence[Sequence[int]]) -> Iterator[RealPlace]:
    """Three hosts: the daemon is on the first, a worker on each of the others."""
    with make_hosts([(), *map(tuple, workers)]) as hosts:
        for number in range(len(hosts.hosts)):
            hosts.join(number)
        replicas = [
            {"host": host.address, "cores": list(cores)} for host, cores in zip(hosts.hosts[1:], workers, strict=True)
        ]
        config = {**base, "model": {**base["model"], "replicas": replicas}}

        def call(function: Callable[[], _T]) -> _T:
            return hosts.run_on(0, function)

        with _serve_on(hosts, directory, config) as served:
            found = RealPlace("three hosts", served.url, workers, served.query, call, hosts)
            found.wait_serving()
            yield found
            found.mend()


@contextmanager
def _serve_on(hosts: BenchHosts, directory: Path, config: dict[str, Any]) -> Iterator[Served]:
    """A daemon on the first host: started, and stopped, from a thread that is there."""
    context = serve(hosts, directory, config)
    served = hosts.run_on(0, context.__enter__)
    try:
        yield served
    finally:
        hosts.run_on(0, lambda: context.__exit__(None, None, None))
