"""Layers of a target in processes of their own: what they say, and that one that is killed or hangs costs no token."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_life import collect
from tests.daemon.test_shards import LAYERS, list_texts, write_tiny
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.many_hosts import ManyHosts, join_hosts

ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 300, "extra_body": {"ignore_eos": True}}
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 7})

_CUT_S = 20.0


def write_toy(directory: Path, shards: str, **options: Any) -> Path:
    path = configuration(directory, script=f"base_ms=8&layers={LAYERS}", **options)
    path.write_text(path.read_text().replace("name: toy,", f"name: toy, shards: {shards},", 1))
    return path


def test_layers_in_two_processes_say_what_one_says(tmp_path: Path, shared_store: Path):
    shards = f", shards: [{{layers: 1, cores: [0]}}, {{layers: {LAYERS - 1}, cores: [0]}}]"
    with running(write_tiny(tmp_path / "cut", shared_store, shards)) as daemon:
        cut = list_texts(daemon)
        ready = daemon.status()["ready"]
        assert ready["row_invariant"]
        assert len(set(ready["part_pids"]) | {ready["pid"]}) == 3
        parts = ", ".join(f"local pid {pid}" for pid in ready["part_pids"])
        assert daemon.status()["replicas"][0]["worker"] == f"local pid {ready['pid']} with {parts}"
        path = tmp_path / "cut" / "cluster.yaml"
        path.write_text(path.read_text() + "speculation: {method: fixed, num_speculative_tokens: 2}\n")
        query_daemon(daemon.admin, "/admin/reload", {"check": False}, answer_s=120.0)
        tuned = daemon.status()["ready"]
        assert (tuned["max_depth"], tuned["pid"]) == (2, ready["pid"]), "a live worker takes it, its parts too"
        assert list_texts(daemon) == cut
        for pid, line in zip(ready["part_pids"], ready["shards"], strict=True):
            assert line.endswith(f"(pid {pid})")
            assert psutil.Process(pid).cpu_affinity() == [0]
        assert daemon.stop() == 0
        assert not any(map(psutil.pid_exists, ready["part_pids"]))
    with running(write_tiny(tmp_path / "whole", shared_store)) as daemon:
        whole, its = list_texts(daemon), daemon.status()["ready"]
    if its["class_fingerprint"] == ready["class_fingerprint"]:
        assert cut == whole


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_shard_that_is_killed_or_stopped_costs_a_pause_and_no_token(tmp_path: Path, plain: Daemon, how: int):
    expected = [plain.client.completions.create(**ASK, **one).choices[0].text for one in SAMPLINGS]
    with running(write_toy(tmp_path, "[{layers: 1}, {layers: 3, cores: [0]}]")) as daemon:
        before = daemon.status()["ready"]
        (part,) = before["part_pids"]
        assert stream_while(daemon, lambda: os.kill(part, how)) == expected
        daemon.wait_for("totals", restarts=1)
        after = daemon.status()["ready"]
        assert after["part_pids"] != before["part_pids"]
        assert daemon.stop() == 0
        assert not any(map(psutil.pid_exists, [part, *after["part_pids"]]))


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        ("{layers: 3, host: 10.0.0.2}", "model.shards[1].host: goes with Ray"),
        ("{layers: 2, cores: [0]}", "has 4 layers, and its shards name 3 (1 + 2)"),
        ("{layers: 3, cores: [0], device: SIM.7}", "target-shard-1: simulated sees no device 'SIM.7' here"),
    ],
)
def test_shards_in_processes_that_cannot_be_are_refused_with_the_reason(tmp_path: Path, shard: str, said: str):
    found = outrider_process("serve", "--config", str(write_toy(tmp_path, f"[{{layers: 1}}, {shard}]")))
    assert found.returncode == 1
    assert said in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_a_target_over_two_hosts_says_what_one_says_and_loses_no_token_with_a_shard_or_its_host(
    tmp_path: Path, plain: Daemon, monkeypatch: pytest.MonkeyPatch
):
    expected = [plain.client.completions.create(**ASK, **one).choices[0].text for one in SAMPLINGS]
    with join_hosts(monkeypatch, 2, 2) as hosts:
        hosts.run_on(0, lambda: serve_over_hosts(tmp_path, hosts, expected))


def write_over_hosts(directory: Path, address: str, far: str) -> Path:
    """Write a configuration of a target with a layer on the host that it is on and three on another one."""
    config = write_toy(directory, f"[{{layers: 1, host: here}}, {{layers: 3, host: {far}}}]", runtime="ray")
    config.write_text(config.read_text().replace("runtime: ray", f"address: '{address}'"))
    return config


def list_hosts(daemon: Daemon) -> list[str]:
    """Return the hosts of a target's shards."""
    return [line.rpartition("(")[2].split()[0] for line in daemon.status()["ready"]["shards"]]


def list_toy_texts(daemon: Daemon, how: dict[str, Any], **changes: Any) -> list[str]:
    """What it says to each sampling, drafted for in that way."""
    body = {**ASK["extra_body"], "speculative_config": how}
    asks = [{**ASK, **sampling, **changes, "extra_body": body} for sampling in SAMPLINGS]
    return [daemon.client.completions.create(**ask).choices[0].text for ask in asks]


def serve_over_hosts(directory: Path, hosts: ManyHosts, expected: list[str]) -> None:
    near, far = (host.address for host in hosts.hosts)
    with running(write_over_hosts(directory, hosts.address, far)) as daemon:
        assert list_hosts(daemon) == [near, far]
        for how in ({"method": "off"}, {"num_speculative_tokens": 4}):
            assert list_toy_texts(daemon, how) == expected
        for fault in (kill_part, stop_part, cut_cable, lose_host):
            part = daemon.status()["ready"]["part_pids"][1]
            assert stream_while(daemon, partial(fault, hosts, part)) == expected, fault.__name__
            assert daemon.status()["ready"]["part_pids"][1] != part, fault.__name__


def kill_part(_: ManyHosts, part: int) -> None:
    os.kill(part, signal.SIGKILL)


def stop_part(_: ManyHosts, part: int) -> None:
    os.kill(part, signal.SIGSTOP)


def cut_cable(hosts: ManyHosts, _: int) -> None:
    """Until the host counts as cut off."""
    hosts.cable(1, "down")
    time.sleep(_CUT_S)
    hosts.cable(1, "up")


def lose_host(hosts: ManyHosts, _: int) -> None:
    hosts.leave(1)
    hosts.join(1)


def stream_while(daemon: Daemon, happens: Callable[[], None], **asked: Any) -> list[str]:
    """Return what streams say, in the midst of which something happens."""
    texts: list[list[str]] = [[] for _ in SAMPLINGS]
    readers = []
    for sampling, pieces in zip(SAMPLINGS, texts, strict=True):
        started = threading.Event()
        stream = daemon.client.completions.create(**ASK | asked, **sampling, stream=True)
        readers.append((threading.Thread(target=collect, args=(stream, pieces, started)), started))
        readers[-1][0].start()
    for _, started in readers:
        assert started.wait(120)
    happens()
    for reader, _ in readers:
        reader.join(240)
    return ["".join(pieces) for pieces in texts]
