"""Processes of layers are announced by what the last ones held that had the same layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from device_profiles.memory import MeasuredMemory
from device_profiles.store import ProfileStore
from orchestrator.machine.process_memory import peak_rss_bytes
from tests.support.daemon import Daemon, running

ASK: dict[str, Any] = {"model": "small", "max_tokens": 30, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


def write_two_parts(directory: Path, source: Path) -> Path:
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: '{source}', name: small, adapter: openvino_rt, activations: fp32, "
        "shards: [{layers: 1, cores: [0]}, {layers: 1, cores: [0]}]}\n"
        "cluster: {runtime: local}\ndrafts: []\nlimits: {kv_cache: 16 MiB, max_running: 2, max_batch_rows: 64}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{directory}/store'}}\n"
        f"state: {{directory: '{directory}/state'}}\njournal: {{reserve: 1 MiB}}\n"
    )
    return path


def use(daemon: Daemon) -> tuple[list[int], list[int]]:
    """What the processes of layers were announced to hold, and held when all was done."""
    for prompt in ("The sea is", "A ship that sails", "The sea " * 40):
        daemon.client.completions.create(prompt=prompt, **ASK)
    ready = daemon.status()["ready"]
    return ready["part_planned_bytes"], [peak_rss_bytes(pid) for pid in ready["part_pids"]]


@pytest.mark.model
def test_layers_are_announced_by_what_the_last_ones_held(tmp_path: Path, first_layers_path: Path) -> None:
    config = write_two_parts(tmp_path, first_layers_path)
    profiles = ProfileStore(tmp_path / "store" / "profiles")
    with running(config) as daemon:  # it prepares the model and tries its classes, which takes memory of its own
        use(daemon)
    assert not list(profiles.memory())
    with running(config) as daemon:
        _, held = use(daemon)
        assert daemon.stop() == 0
    known: dict[str, MeasuredMemory] = {one.weights.rpartition(", ")[2]: one for one in profiles.memory()}
    assert sorted(known) == ["layers 0 to 0", "layers 1 to 1"]
    first, last = (known[layers] for layers in sorted(known))
    assert [one.layers for one in (first, last)] == [1, 1]
    for measured, peak in zip((first, last), held, strict=True):
        assert measured.announced_bytes < sum(measured.whole.values()), "it has used a part of what was announced"
        assert measured.held_bytes >= 0.99 * peak, "trials before may have used more"
    with running(config) as daemon:
        announced, _ = use(daemon)
    assert announced == [whole_with_surplus(one) for one in (first, last)]


def whole_with_surplus(measured: MeasuredMemory) -> int:
    return sum(measured.whole.values()) + measured.surplus_bytes
