"""A plan that splits each layer over two GPUs, from cluster.yaml to tokens, in a real daemon that loses one of them.

NVML is a stand-in, and the runtime is torch on the processor, under the names of its devices
(tests/support/split_torch.py). The ranks are real, by gloo; so is everything between them and the client.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapters.model_digests import digest_at_hand
from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_device_replans import find_planned
from tests.daemon.test_foreign_adapters import put_on_path
from tests.daemon.test_shards import list_texts
from tests.daemon.test_tensor_parallel import list_ranks
from tests.support import tiny_models
from tests.support.daemon import Daemon, outrider_process, running
from tests.support.nvidia_machine import change_device
from tests.support.profiles import store_simulated_profiles
from tests.support.split_torch import TWIN, VERSION, write_split_machine
from tests.support.waiting import until

GROUP = "here/CUDA:0+CUDA:1"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_split_machine(tmp_path / "site")
    put_on_path(monkeypatch, tmp_path / "site")
    return tmp_path / "site"


def write_config(site: Path, name: str, device: str, more: str = "") -> Path:
    directory = site / name
    directory.mkdir()
    path = directory / "c.yaml"
    path.write_text(
        f"model: {{source: ../tiny, name: tiny, adapter: split_torch, {device}}}\ndrafts: []\n"
        "cluster: {runtime: local}\nlimits: {kv_cache: 16 MiB, max_running: 3}\nlogging: {format: json}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{site}/store'}}\n"
        f"state: {{directory: '{directory}/state'}}\n{more}"
    )
    return path


def ask_status(daemon: Daemon) -> str:
    return str(daemon.status()["ready"]["split"])


def test_planned_ranks_serve_what_written_ones_do_and_the_gpu_that_is_left_goes_on(tmp_path: Path, site: Path) -> None:
    tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16")
    with running(write_config(tmp_path, "written", "device: 'CUDA:0', tensor_parallel: 2")) as daemon:
        expected, split = list_texts(daemon), ask_status(daemon)
    store_simulated_profiles(
        tmp_path / "store" / "profiles",
        {"CUDA:0": 60.0},
        "tiny",
        adapter="split_torch",
        hardware=TWIN,
        version=VERSION,
        layers=4,
        digest=digest_at_hand("tiny", tmp_path, tmp_path / "store", "split_torch"),
    )
    config = write_config(tmp_path, "planned", "device: auto", "placement: {profile: never, replan_pause_s: 0.2}\n")
    explained = outrider_process("plan", "--explain", "--config", str(config))
    assert explained.returncode == 0, explained.stderr
    assert "split over 2 ranks" in explained.stdout
    assert "no layer split: here/CUDA:" in explained.stdout
    planned = json.loads(outrider_process("plan", "--json", "--config", str(config)).stdout)
    (shard,) = planned["plan"]["replicas"][0]["shards"]
    assert shard["ranks"] == ["here/CUDA:0", "here/CUDA:1"]
    with running(config) as daemon:
        assert find_planned(daemon) == [GROUP]
        ready = daemon.status()["ready"]
        assert (ready["device"], ready["split"]) == ("CUDA:0", split)
        assert "CUDA:0 + CUDA:1" in split
        assert len(list_ranks(ready["pid"])) == 1
        assert list_texts(daemon) == expected
        same = outrider_process("plan", "diff", "--config", str(config))
        assert GROUP not in same.stdout, same.stdout
        losses = query_daemon(daemon.admin, "/admin/plan")["pool"]["losses"]
        assert {"device here/CUDA:0", "device here/CUDA:1"} <= {loss["part"] for loss in losses}
        change_device(site, 1, lost=True)
        until(lambda: find_planned(daemon) == ["here/CUDA:0"])
        daemon.wait_for("ready", device="CUDA:0", split="")
        assert list_texts(daemon)
        assert daemon.stop() == 0
