"""How soon traffic leaves a device that another program takes half of, and how soon it comes back.

    python -m outrider_lab.measure.shift [--json OUT]

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.cli.daemon_socket import StatusError, query_daemon
from outrider_lab.bench.cluster.served import wait_until
from outrider_lab.bench.cluster.shift import Shift, Traffic, measure_shift

SCRIPT = "base_ms=4&row_ms=1&spin=1"
_READY_WITHIN_S = 90.0


def read_others(admin: Path, core: int) -> float:
    """Return the share of a core that the daemon says other programs take."""
    for device in query_daemon(admin)["devices"]:
        if device["name"] == "here/CPU" and str(core) in device["cores"]:
            return float(device["cores"][str(core)]["others"])
    return 0.0


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
            wait_until(lambda: _serves(admin), _READY_WITHIN_S, f"the daemon serves, see {directory / 'log'}")
            yield str(query_daemon(admin)["api"]), admin
        finally:
            process.send_signal(signal.SIGTERM)


def _serves(admin: Path) -> bool:
    try:
        replicas = query_daemon(admin)["replicas"]
    except StatusError:
        return False
    return len(replicas) == 2 and all(one["phase"] == "ready" for one in replicas)


def measure(directory: Path, cores: tuple[int, int]) -> Shift:
    """Return the times in seconds, and the shares that the second replica had. Raises BenchError."""
    with serve(directory, cores) as (url, admin), Traffic(url, admin, "toy") as traffic:
        return measure_shift(traffic, lambda: "target-1", [cores[1]], lambda: read_others(admin, cores[1]))


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
