"""What `config check`, `doctor` and `devices` say of memory: control groups, and KV caches that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapters.device_memory import read_host_memory
from device_profiles.units import GIB, MIB
from tests.support.control_groups import memory_group, run_in_group
from tests.support.tiny_gguf import Tiny, write

CLI = ("-m", "orchestrator.cli.main")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write(tmp_path / "m.gguf", Tiny("llama", layers=1), {"general.type": "model"})
    return tmp_path / "cluster.yaml"


def write_config(path: Path, kv_cache_mib: int, more: str = "") -> Path:
    store = f"store: {{directory: {path.parent / 'store'}}}\nstate: {{directory: {path.parent / 'state'}}}\n"
    path.write_text(f"model: {{source: m.gguf, name: first}}\nlimits:\n  kv_cache: {kv_cache_mib} MiB\n{store}{more}")
    return path


def test_a_kv_cache_of_which_no_part_fits_is_refused_by_its_line(outrider, config: Path) -> None:
    total_mib = read_host_memory().total_bytes // MIB
    done = outrider("config", "check", write_config(config, 5 * total_mib))
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert f"{config}:3: limits.kv_cache: a KV cache of " in line
    assert "and nor does a quarter of it" in line
    assert line.endswith("or less")


@pytest.mark.parametrize(("times", "part"), [(1.5, "half"), (3.0, "a quarter")])
def test_a_kv_cache_that_will_be_halved_is_told_and_no_error(outrider, config: Path, times: float, part: str) -> None:
    total_mib = read_host_memory().total_bytes // MIB
    done = outrider("config", "check", write_config(config, int(times * total_mib)))
    assert done.returncode == 0, done.stderr
    assert f"{config}:3: limits.kv_cache: " in done.stderr
    assert f": {part} of it is loaded" in done.stderr


def test_a_kv_cache_that_fits_is_not_mentioned(outrider, config: Path) -> None:
    assert "kv_cache" not in outrider("config", "check", write_config(config, 16)).stderr


def test_a_drafts_and_another_models_kv_cache_are_checked_too(outrider, config: Path) -> None:
    huge = 5 * read_host_memory().total_bytes // MIB
    more = (
        f"drafts:\n  - method: model\n    source: m.gguf\n    kv_cache: {huge} MiB\n"
        f"models:\n  - source: m.gguf\n    name: other\n    kv_cache: {huge} MiB\n"
    )
    error = outrider("config", "check", write_config(config, 16, more)).stderr
    assert f"{config}:9: drafts[0].kv_cache: a KV cache of " in error
    assert f"{config}:13: models[0].kv_cache: a KV cache of " in error


def test_a_real_control_group_is_what_commands_speak_of(config: Path) -> None:
    with memory_group(3 * GIB) as group:
        checked = run_in_group(group, *CLI, "config", "check", str(write_config(config, 14 * 1024)))
        done = run_in_group(group, *CLI, "doctor", "--json")
        devices = run_in_group(group, *CLI, "devices", "--json")
    assert checked.returncode == 1
    assert "does not fit into the 3.0 GiB that" in checked.stderr
    (memory,) = [one for one in json.loads(done.stdout) if one["name"] == "memory"]
    assert f"of 3.0 GiB that {group}" in memory["found"]
    processors = [one for one in json.loads(devices.stdout) if one.get("device") == "CPU"]
    assert processors
    assert {one["memory_total_bytes"] for one in processors} == {3 * GIB}
    assert all(0 < one["memory_free_bytes"] < 3 * GIB for one in processors)
