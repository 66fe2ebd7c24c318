"""A target in layer shards, from cluster.yaml or a plan to status, in a real daemon whose worker is killed."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_life import collect
from tests.support import tiny_models
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.profiles import GIB, store_simulated_profiles

TINY: dict[str, Any] = {"model": "tiny", "prompt": "hello the hello the hello", "max_tokens": 24}
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 7})
LAYERS = 4
TOY: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 200, "temperature": 0} | {
    "extra_body": {"ignore_eos": True}
}


def write_tiny(directory: Path, store: Path, shards: str = "") -> Path:
    """Write a configuration over a small model. `store`: what others have prepared and measured is there."""
    directory.mkdir(exist_ok=True)
    tiny_models.write_model(directory / "tiny", "qwen3", kind="BF16", num_hidden_layers=LAYERS)
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: tiny, name: tiny, weights: as_file{shards}}}\n"
        "cluster: {runtime: local}\nlimits: {kv_cache: 16 MiB, max_running: 3}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\nstore: {{directory: '{store}'}}\n"
        f"state: {{directory: '{directory}/state'}}\n"
    )
    return path


def list_texts(daemon: Daemon) -> list[str]:
    """What it says to each sampling, drafted for and not: that must be the same."""
    found = []
    for sampling in SAMPLINGS:
        texts = {
            str(daemon.client.completions.create(**TINY, **sampling, extra_body={"speculative_config": how}).choices)
            for how in ({"method": "off"}, {"num_speculative_tokens": 4})
        }
        assert len(texts) == 1
        found.append(daemon.client.completions.create(**TINY, **sampling).choices[0].text)
    return found


def test_shards_serve_and_drafts_change_no_token(tmp_path, shared_store, outrider):
    shards = f", shards: [{{layers: 1}}, {{layers: {LAYERS - 1}}}]"
    with running(write_tiny(tmp_path / "cut", shared_store, shards)) as daemon:
        cut = list_texts(daemon)
        ready = daemon.status()["ready"]
        places = [place.partition(" in ")[0] for place in ready["shards"]]
        assert places == ["layers 0 to 0 on openvino_rt CPU", f"layers 1 to {LAYERS - 1} on openvino_rt CPU"]
        assert ready["row_invariant"]
        shown = " ".join(outrider("status", "--socket", str(daemon.admin))[1].replace("│", " ").split())
        assert f"layers 1 to {LAYERS - 1} on openvino_rt CPU" in shown
    with running(write_tiny(tmp_path / "whole", shared_store)) as daemon:
        whole, its = list_texts(daemon), daemon.status()["ready"]
    assert its["shards"] == []
    if its["class_fingerprint"] == ready["class_fingerprint"]:
        assert cut == whole


def test_shards_of_three_runtimes_are_one_model_that_keeps_its_bits(tmp_path, shared_store):
    names = ("torch_device", "onnx_rt", "openvino_rt")
    counts = (1, 1, LAYERS - 2)
    shards = ", ".join(f"{{adapter: {name}, layers: {count}}}" for name, count in zip(names, counts, strict=True))
    with running(write_tiny(tmp_path, shared_store, f", shards: [{shards}]")) as daemon:
        list_texts(daemon)
        ready = daemon.status()["ready"]
        assert ready["row_invariant"]
        assert ready["adapter"] == "+".join(names)
        assert ready["shards"][1] == "layers 1 to 1 on onnx_rt CPU in fp32, KV cache in fp32"
        assert [line.split()[5] for line in ready["shards"]] == list(names)


def test_streams_at_once_over_two_devices_get_what_the_whole_target_says(tmp_path, plain, monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    asks = [
        TOY | {"prompt": f"{word} sea is"} | SAMPLINGS[number % 2]
        for number, word in enumerate(("the", "a", "my", "no"))
    ]
    config = configuration(tmp_path, script=f"base_ms=2&layers={LAYERS}")
    shards = "[{layers: 1, device: SIM}, {layers: 3, device: SIM.1}]"
    config.write_text(config.read_text().replace("adapter: simulated", f"adapter: simulated, shards: {shards}", 1))
    with running(config) as daemon, ThreadPoolExecutor(len(asks)) as pool:
        texts = list(pool.map(lambda ask: daemon.client.completions.create(**ask).choices[0].text, asks))
        assert [line.split()[6] for line in daemon.status()["ready"]["shards"]] == ["SIM", "SIM.1"]
    assert texts == [plain.client.completions.create(**ask).choices[0].text for ask in asks]


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ("[{layers: 4}]", "c.yaml:1: model.shards: one shard is the whole target"),
        (
            "[{layers: 2}, {layers: 1}]",
            f"c.yaml:1: model.shards: tiny has {LAYERS} layers, and its shards name 3 (2 + 1)",
        ),
        ("[{layers: 2}, {layers: 2, device: NPU}]", "no device 'NPU' here; there is CPU"),
    ],
)
def test_shards_that_cannot_be_are_refused_with_the_reason(tmp_path, shared_store, shards, said):
    config = write_tiny(tmp_path, shared_store, f", shards: {shards}").rename(tmp_path / "c.yaml")
    found = outrider_process("serve", "--config", str(config))
    assert found.returncode == 1
    assert said in found.stderr
    assert "Traceback" not in found.stderr


def test_a_plan_cuts_a_target_that_no_device_can_hold_and_a_killed_worker_costs_no_token(
    tmp_path, plain, monkeypatch, outrider
):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    expected = str(plain.client.completions.create(**TOY).choices[0].text)
    script = f"base_ms=3&layers={LAYERS}"
    store = tmp_path / "store" / "profiles"
    # A device has 1 GiB, and the weights are more than that.
    costs = {"SIM": 3.0, "SIM.1": 3.0}
    store_simulated_profiles(
        store, costs, "toy", script=script, layers=LAYERS, weights_bytes=int(1.2 * GIB), peak_bytes=int(1.3 * GIB)
    )
    config = configuration(tmp_path, script=script, extra="placement: {profile: never}")
    config.write_text(config.read_text().replace("adapter: simulated", "adapter: simulated, device: auto", 1))
    with running(config) as daemon:
        planned = query_daemon(daemon.admin, "/admin/plan")["plan"]["replicas"][0]["shards"]
        assert sorted(one["device"] for one in planned) == ["here/SIM", "here/SIM.1"]
        assert [one["end_layer"] for one in planned][-1] == LAYERS
        ready = daemon.status()["ready"]
        assert len(ready["shards"]) == 2
        pieces: list[str] = []
        started = threading.Event()
        stream = daemon.client.completions.create(**TOY, stream=True)
        reader = threading.Thread(target=collect, args=(stream, pieces, started))
        reader.start()
        assert started.wait(120)
        os.kill(ready["pid"], signal.SIGKILL)
        reader.join(240)
        assert "".join(pieces) == expected
        daemon.wait_for("totals", restarts=1)
        assert daemon.stop() == 0
    never = config.read_text().replace("profile: never", "profile: never, sharding: never")
    config.write_text(never)
    found = outrider_process("serve", "--config", str(config))
    assert found.returncode == 1
    assert "layer shards (`sharding: when_needed`)" in found.stderr


@pytest.mark.slow
def test_a_target_that_no_device_can_hold_is_measured_in_parts_planned_and_served(tmp_path, plain, monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    expected = str(plain.client.completions.create(**TOY).choices[0].text)
    # A device has 1 GiB, and the smallest KV cache is more than that.
    config = configuration(tmp_path, script="base_ms=3&layers=8", extra="limits: {kv_cache: 6 GiB}")
    config.write_text(config.read_text().replace("adapter: simulated", "adapter: simulated, device: auto", 1))
    with running(config) as daemon:
        known = query_daemon(daemon.admin, "/admin/plan")
        (replica,) = known["plan"]["replicas"]
        assert sorted(one["device"] for one in replica["shards"]) == ["here/SIM", "here/SIM.1"]
        assert {one["source"] for one in replica["shards"]} == {"few layers"}
        assert any(line.startswith("toy fits whole on no device: ") for line in known["plan"]["reasons"])
        assert daemon.client.completions.create(**TOY).choices[0].text == expected
        assert len(daemon.status()["ready"]["shards"]) == 2
        assert daemon.stop() == 0
