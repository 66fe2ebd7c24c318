"""Three hosts, one file: they are found and measured, the plan runs over them, and hosts join and leave in service."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_life import collect
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.many_hosts import ManyHosts, join_hosts
from tests.support.profiles import store_simulated_profiles
from tests.support.waiting import until

GREEDY: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 150, "temperature": 0}
SEEDED: dict[str, Any] = GREEDY | {"temperature": 0.8, "seed": 7}
LONG: dict[str, Any] = SEEDED | {"max_tokens": 600}
FOUND_WITHIN_S = 240.0


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManyHosts]:
    """Three hosts, with Ray on the first two."""
    with join_hosts(monkeypatch, 3, 2) as made:
        yield made


def write_config(directory: Path, hosts: ManyHosts) -> Path:
    extra = (
        f"hosts:\n  - {{name: near, address: here, zone: a}}\n"
        f"  - {{name: far, address: {hosts.hosts[1].address}, zone: b}}\n"
        f"links:\n  between: [{{hosts: [near, far], rtt_ms: 0.2, gbit_per_s: 10}}]\n"
        "placement: {concurrency: 6}\n"
    )
    script = "base_ms=2&row_ms=4"
    store = directory / "store" / "profiles"
    store_simulated_profiles(store, {"SIM": 6.0}, script=script, hardware_name="simulated device", more_row_ms=4.0)
    path = configuration(directory, script=script, runtime="ray", replicas="3", extra=extra)
    text = path.read_text().replace("runtime: ray", f"address: '{hosts.address}'")
    path.write_text(text.replace("adapter: simulated", "adapter: simulated, device: auto", 1))
    return path


def places(daemon: Daemon) -> list[str]:
    """Where targets really run: the hosts' addresses."""
    return sorted(part.split()[2] for part in daemon.status()["worker"].split(", ") if part.startswith("ray node"))


@pytest.mark.slow
@pytest.mark.ray
def test_hosts_are_found_planned_joined_and_lost_without_a_token(tmp_path: Path, plain: Daemon, hosts: ManyHosts):
    expected = {
        name: plain.client.completions.create(**ask).choices[0].text
        for name, ask in (("greedy", GREEDY), ("seeded", SEEDED), ("long", LONG))
    }
    hosts.run_on(0, lambda: serve_over_hosts(tmp_path, hosts, expected))


def serve_over_hosts(directory: Path, hosts: ManyHosts, expected: dict[str, str]) -> None:
    near, far, late = (host.address for host in hosts.hosts)
    config = write_config(directory, hosts)
    with running(config) as daemon:
        until(lambda: places(daemon) == sorted([near, far]), FOUND_WITHIN_S)
        plan = query_daemon(daemon.admin, "/admin/plan")
        assert {replica["shards"][0]["host"] for replica in plan["plan"]["replicas"]} == {"here", far}
        for ask, name in ((GREEDY, "greedy"), (SEEDED, "seeded")):
            for _ in range(3):
                assert daemon.client.completions.create(**ask).choices[0].text == expected[name]
        proposed = outrider_process("plan", "--config", str(config), "--json")
        assert proposed.returncode == 0, proposed.stderr
        assert {one["shards"][0]["host"] for one in json.loads(proposed.stdout)["plan"]["replicas"]} == {"here", far}
        shown = {host["host"]: host for host in daemon.status()["hosts"]}
        assert shown["here"]["name"] == "near"
        assert shown[far]["zone"] == "b"
        hosts.join(2)
        until(lambda: late in places(daemon), FOUND_WITHIN_S)
        assert outputs_while_a_host_leaves(daemon, hosts) == [expected["long"]] * 6
        until(lambda: places(daemon) == sorted([near, late]), FOUND_WITHIN_S)
        assert far not in {host["host"] for host in daemon.status()["hosts"]}
        assert daemon.client.completions.create(**SEEDED).choices[0].text == expected["seeded"]


def outputs_while_a_host_leaves(daemon: Daemon, hosts: ManyHosts) -> list[str]:
    """Return what six streams said while the second host was killed."""
    texts: list[list[str]] = [[] for _ in range(6)]
    readers = []
    for pieces in texts:
        started = threading.Event()
        stream = daemon.client.completions.create(**LONG, stream=True)
        reader = threading.Thread(target=collect, args=(stream, pieces, started))
        reader.start()
        readers.append((reader, started))
    for _, started in readers:
        assert started.wait(120)
    time.sleep(0.3)
    hosts.leave(1)
    for reader, _ in readers:
        reader.join(240)
    return ["".join(pieces) for pieces in texts]
