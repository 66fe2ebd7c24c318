"""A stream whose host is drained goes on another host, with its KV pages, and no token differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_shard_workers import ASK, SAMPLINGS, stream_while
from tests.support.daemon import Daemon, configuration, running
from tests.support.many_hosts import ManyHosts, join_hosts
from tests.support.waiting import until

PROMPT = "the sea is " * 60
"""Long enough that to compute it again costs more than to move it."""


@pytest.mark.slow
@pytest.mark.ray
def test_a_drained_hosts_streams_move_with_their_pages(
    tmp_path: Path, plain: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [plain.client.completions.create(**ASK | {"prompt": PROMPT}, **one).choices[0].text for one in SAMPLINGS]
    with join_hosts(monkeypatch, 2, 2) as hosts:
        hosts.run_on(0, lambda: drain_each(tmp_path, hosts, expected))


def drain_each(directory: Path, hosts: ManyHosts, expected: list[str]) -> None:
    replicas = [f"{{host: {host.address}}}" for host in hosts.hosts]
    config = configuration(directory, script="base_ms=15&row_ms=2", runtime="ray", replicas=f"[{', '.join(replicas)}]")
    config.write_text(config.read_text().replace("runtime: ray", f"address: '{hosts.address}'"))
    with running(config) as daemon:
        until(lambda: len([one for one in daemon.status()["replicas"] if one["phase"] == "ready"]) == 2, 60.0)
        for this, other in ((0, 1), (1, 0)):
            before = count_moved_pages(daemon)
            hold(daemon, hosts, other, "cordoned")  # so that the streams begin on the host that is drained

            def drain(this: int = this, other: int = other) -> None:
                hold(daemon, hosts, other, "")
                hold(daemon, hosts, this, "draining")

            assert stream_while(daemon, drain, prompt=PROMPT) == expected
            assert count_moved_pages(daemon) > before, daemon.status()["kv_moves"]
            hold(daemon, hosts, this, "")


def hold(daemon: Daemon, hosts: ManyHosts, number: int, state: str) -> None:
    name = hosts.hosts[number].address
    query_daemon(daemon.admin, "/admin/hold", {"kind": "host", "name": name, "state": state, "model": None})


def count_moved_pages(daemon: Daemon) -> int:
    return sum(moves["pages"] for moves in daemon.status()["kv_moves"])
