"""How soon traffic leaves a device that another program takes half of, and how soon it comes back.

    python tools/measure_shift.py [--json OUT]

It starts a daemon over the simulated model with two replicas on cores of their own, which compute for their time. A
busy loop then runs on the second core. It prints how long three things take:

    seen_s    the daemon says that the core is taken
    shift_s   at most a quarter of the newest requests go there
    back_s    at least a quarter go there again, from the end of the loop on

Needs two cores that nothing else uses.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from orchestrator.cli.daemon_socket import StatusError, query_daemon

AT_ONCE = 4
NEWEST = 16
FEW = 0.25
SCRIPT = "base_ms=4&row_ms=1&spin=1"
_TOKENS = 12
_READY_WITHIN_S = 90.0
_WITHIN_S = 60.0


class Traffic:
    """Requests, `at_once` at a time, each with a prompt of its own. `newest`: the replicas that had the last ones."""

    def __init__(self, url: str, admin: Path, at_once: int = AT_ONCE) -> None:
        self._url, self._admin = url, admin
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._sent = 0
        self.newest: deque[str] = deque(maxlen=NEWEST)
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(at_once)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(30.0)

    def share_of(self, replica: str) -> float:
        """Return the share of the newest requests that went to a replica; below 0 before there are enough."""
        newest = list(self.newest)
        return newest.count(replica) / len(newest) if len(newest) == NEWEST else -1.0

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60.0) as client:
            while not self._ended.is_set():
                with self._lock:
                    self._sent += 1
                    number = self._sent
                body = {"model": "toy", "prompt": f"{number} sheep in the field", "max_tokens": _TOKENS}
                answer = client.post("/completions", json={**body, "ignore_eos": True})
                answer.raise_for_status()
                routes = query_daemon(self._admin, f"/admin/explain/{answer.json()['id']}")["routes"]
                self.newest.append(routes[0]["replica"])


def wait_until(met: Callable[[], bool], within_s: float = _WITHIN_S) -> float:
    """Wait until it is so; returns after how many seconds, or below 0 where it never was."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < within_s:
        if met():
            return time.monotonic() - begun_s
        time.sleep(0.2)
    return -1.0


def read_others(admin: Path, core: int) -> float:
    """Return the share of a core that the daemon says other programs take."""
    for device in query_daemon(admin)["devices"]:
        if device["name"] == "here/CPU" and str(core) in device["cores"]:
            return float(device["cores"][str(core)]["others"])
    return 0.0


@contextmanager
def compete(core: int, programs: int = 1) -> Iterator[None]:
    """Run busy loops on a core."""
    loop = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(programs)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def write_configuration(directory: Path, cores: tuple[int, int]) -> Path:
    """Write a cluster.yaml with a replica on each core."""
    path = directory / "cluster.yaml"
    replicas = ", ".join(f"{{cores: [{core}]}}" for core in cores)
    path.write_text(
        f"model: {{source: 'simulated:toy?{SCRIPT}', adapter: simulated, name: toy, replicas: [{replicas}]}}\n"
        "drafts: []\n"
        f"cluster: {{runtime: local, orphan_wait_s: 0}}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\n"
        f"store: {{directory: '{directory}/store'}}\n"
        f"state: {{directory: '{directory}/state'}}\n",
        encoding="utf-8",
    )
    return path


@contextmanager
def serve(directory: Path, cores: tuple[int, int]) -> Iterator[tuple[str, Path]]:
    """Run a daemon; yields its address and its admin socket once both replicas serve."""
    config, admin = write_configuration(directory, cores), directory / "admin.sock"
    command = [sys.executable, "-m", "orchestrator.cli.main", "serve", "--config", str(config)]
    with (directory / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            if wait_until(lambda: _serves(admin), _READY_WITHIN_S) < 0:
                raise SystemExit(f"the daemon does not serve:\n{(directory / 'log').read_text()}")
            yield str(query_daemon(admin)["api"]), admin
        finally:
            process.send_signal(signal.SIGTERM)


def _serves(admin: Path) -> bool:
    try:
        replicas = query_daemon(admin)["replicas"]
    except StatusError:
        return False
    return len(replicas) == 2 and all(one["phase"] == "ready" for one in replicas)


def measure(directory: Path, cores: tuple[int, int]) -> dict[str, float]:
    """Return the times in seconds, below 0 for what never came, and the shares that the second replica had."""
    with serve(directory, cores) as (url, admin), Traffic(url, admin) as traffic:
        wait_until(lambda: traffic.share_of("target-1") >= FEW)
        time.sleep(5.0)
        found = {"share_before": traffic.share_of("target-1"), "others_before": read_others(admin, cores[1])}
        bound = (1.0 + found["others_before"]) / 2.0 if found["others_before"] > FEW else FEW
        with compete(cores[1]):
            begun_s = time.monotonic()
            found["seen_s"] = wait_until(lambda: read_others(admin, cores[1]) >= bound)
            left_s = wait_until(lambda: 0.0 <= traffic.share_of("target-1") <= FEW)
            found["shift_s"] = time.monotonic() - begun_s if left_s >= 0 else -1.0
            time.sleep(5.0)
            found |= {"share_during": traffic.share_of("target-1"), "others_during": read_others(admin, cores[1])}
        found["back_s"] = wait_until(lambda: traffic.share_of("target-1") >= FEW)
        return found


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    print(f"load average before: {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), (cores[0], cores[1]))
    for name, value in found.items():
        print(f"{name:>14} {value:6.2f}")
    if asked.json:
        asked.json.write_text(json.dumps({name: round(value, 3) for name, value in found.items()}) + "\n")


if __name__ == "__main__":
    main()
