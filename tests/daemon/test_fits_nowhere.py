"""A real model that neither of two hosts has room for: measured in parts, cut by its ends, and true to the whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from device_profiles.units import MIB
from orchestrator.cli.daemon_socket import query_daemon
from orchestrator.machine.process_memory import peak_rss_bytes
from tests.daemon.test_shard_workers import SAMPLINGS, kill_part, list_hosts, stream_while
from tests.support.daemon import running
from tests.support.many_hosts import ManyHosts, join_hosts

STATED_MIB = 600
"""Of each host: 570 may be filled, and the whole model needs more."""
ASK: dict[str, Any] = {"model": "small", "prompt": "The sea is", "max_tokens": 60, "extra_body": {"ignore_eos": True}}


def write_small(directory: Path, store: Path, source: Path, placed: str, more: str) -> Path:
    directory.mkdir()
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: '{source}', name: small, adapter: openvino_rt, device: {placed}}}\n"
        f"drafts: []\nlimits: {{kv_cache: 256 MiB, max_running: 4, max_batch_rows: 128}}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{store}'}}\n"
        f"state: {{directory: '{directory}/state'}}\njournal: {{reserve: 1 MiB}}\n{more}"
    )
    return path


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.model
def test_a_model_that_fits_on_neither_host_is_cut_over_both_and_says_what_the_whole_says(
    tmp_path: Path, shared_store: Path, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_small(tmp_path / "whole", shared_store, default_model_path, "CPU", "cluster: {runtime: local}\n")
    with running(config) as daemon:
        whole = [daemon.client.completions.create(**ASK, **one).choices[0].text for one in SAMPLINGS]
        bits = daemon.status()["ready"]["class_fingerprint"]
    with join_hosts(monkeypatch, 2, 2) as hosts:
        stated = [
            f"  - {{name: {name}, address: {host.address}, devices: [{{device: CPU, memory: {STATED_MIB} MiB}}]}}\n"
            for name, host in zip(("near", "far"), hosts.hosts, strict=True)
        ]
        more = f"cluster: {{address: '{hosts.address}'}}\nhosts:\n{''.join(stated)}placement: {{drift_tolerance: 9}}\n"
        config = write_small(tmp_path / "cut", shared_store, default_model_path, "auto", more)
        hosts.run_on(0, lambda: serve_over_hosts(config, hosts, whole, bits))


def serve_over_hosts(config: Path, hosts: ManyHosts, whole: list[str], bits: str) -> None:
    with running(config) as daemon:
        (replica,) = query_daemon(daemon.admin, "/admin/plan")["plan"]["replicas"]
        first, last = replica["shards"]
        assert {first["source"], last["source"]} == {"few layers"}
        assert (first["first_layer"], first["end_layer"]) == (0, last["first_layer"])
        assert first["memory"]["workspace"] < last["memory"]["workspace"], "logits are the last one's"
        assert all(sum(shard["memory"].values()) <= STATED_MIB * MIB for shard in (first, last))
        ready = daemon.status()["ready"]
        cut = [daemon.client.completions.create(**ASK, **one).choices[0].text for one in SAMPLINGS]
        assert cut == whole or ready["class_fingerprint"] != bits
        part = ready["part_pids"][-1]
        networks = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in (ready["pid"], part)}
        assert len(networks) == 2, "a part is on each host, in any order: they are alike"
        assert list_hosts(daemon)[-1] in {host.address for host in hosts.hosts}
        check_held(ready["pid"], sum(first["memory"].values()))
        check_held(part, sum(last["memory"].values()))
        assert stream_while(daemon, lambda: kill_part(hosts, part), **ASK) == cut


def check_held(pid: int, planned_bytes: int) -> None:
    """A process of layers has held what the plan says, which has room for all logits of a forward."""
    held = peak_rss_bytes(pid)
    assert held <= 1.1 * planned_bytes, (held, planned_bytes)
    assert planned_bytes <= 1.2 * held, (held, planned_bytes)
