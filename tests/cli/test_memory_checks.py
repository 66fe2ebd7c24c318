"""What `config check`, `doctor` and `devices` say of memory: control groups, and KV caches that do not fit."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from gguf import GGUFReader, GGUFWriter

from adapters.device_memory import HostMemory, read_host_memory
from device_profiles.units import GIB, MIB
from orchestrator.daemon.bootstrap import memory_fit
from tests.support.control_groups import memory_group, run_in_group
from tests.support.tiny_gguf import Tiny, add_value, write

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


def write_large(path: Path, elements: int) -> Path:
    """Write a model of so many weights in its MLPs, as a file without content: only heads are read."""
    small = Tiny("llama", layers=1, mlp=_MARK)
    wide = elements // (3 * small.hidden) // 32 * 32
    write(path, small)
    reader = GGUFReader(path)
    writer = GGUFWriter(str(path.with_suffix(".large")), "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama.") or field.name.startswith("tokenizer."):
            value = field.contents()
            add_value(writer, field.name, wide if field.name == "llama.feed_forward_length" else value)
    total = 0
    for tensor in reader.tensors:
        shape = [wide if size == _MARK else int(size) for size in reversed(tensor.shape)]
        size = 4 * math.prod(shape)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size)
        total += size
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    path.with_suffix(".large").replace(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + total + MIB)
    return path


_MARK = 160  # the width of an MLP that is made larger; nothing else is as wide

CASES = {
    "weights": ("model: {source: large.gguf}\n", "model.source", "with [0-9]+ MiB of weights"),
    "kv_cache": ("model: {source: m.gguf}\nlimits: {kv_cache: 14 GiB}\n", "limits.kv_cache", "set ([0-9]+ MiB)"),
    "two models": (
        "model: {source: half.gguf, name: a}\nmodels: [{source: other.gguf, name: b}]\n",
        "models[0].source",
        "with [0-9]+ MiB of weights",
    ),
    "draft and target": (
        "model: {source: half.gguf}\ndrafts: [{method: model, source: other.gguf}]\n",
        "drafts[0].source",
        "with [0-9]+ MiB of weights",
    ),
    "two KV caches": (
        "model: {source: m.gguf}\nlimits: {kv_cache: 8 GiB}\n"
        "drafts: [{method: model, source: m.gguf, kv_cache: 8 GiB}]\n",
        "limits.kv_cache",
        "set ([0-9]+ MiB)",
    ),
    "context": (
        "model: {source: m.gguf, static_shapes: 'on', static_context_tokens: 4096}\n",
        "model.static_context_tokens",
        "set ([0-9]+)",
    ),
    "context beyond the cache": (
        "model: {source: long.gguf, static_shapes: 'on', static_context_tokens: 8192}\nlimits: {kv_cache: 1 MiB}\n",
        "model.static_context_tokens",
        "set ([0-9]+)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_fit_is_one_line_with_a_key_and_a_value_that_does(
    outrider, config: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    limit = Path("/sys/fs/cgroup/outrider/memory.max")
    monkeypatch.setattr(memory_fit, "read_host_memory", lambda: HostMemory(3 * GIB, 3 * GIB, limit))
    write_large(config.with_name("large.gguf"), 10 * GIB)
    for name in ("half.gguf", "other.gguf"):
        write_large(config.with_name(name), 3 * GIB)
    write(config.with_name("long.gguf"), Tiny("llama", layers=1, context=32768))
    text, key, way = CASES[case]
    config.write_text(text)
    done = outrider("config", "check", config)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert f": {key}: " in line
    match = re.search(way, line)
    assert match is not None, line
    assert outrider("plan", "--config", config).stderr.strip() == line
    if match.groups():
        section, _, name = key.partition(".")
        data = yaml.safe_load(text)
        data.setdefault(section, {})[name] = yaml.safe_load(match[1])
        config.write_text(yaml.safe_dump(data))
        assert outrider("config", "check", config).returncode == 0


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


def test_a_store_without_room_is_told_by_its_key_before_anything_is_prepared(
    outrider, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = config.with_name("m.gguf").stat().st_size
    write_config(config, 16)
    bounded = config.read_text().replace("/store'", "/store").replace("/store}", "/store, max_size: 1 KiB}")
    config.write_text(bounded)
    noted = outrider("config", "check", config)
    assert noted.returncode == 0
    (line,) = noted.stderr.strip().splitlines()
    assert f"{config}:4: store.max_size: the models that are converted have" in line
    assert line.endswith("set 1 MiB or more")
    config.write_text(bounded.replace("1 KiB", "1 MiB"))
    assert outrider("config", "check", config).stderr == ""
    free = SimpleNamespace(total=GIB, used=0, free=2 * size - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    (line,) = outrider("config", "check", config).stderr.strip().splitlines()
    assert f"{config}:4: store.directory: preparing models there needs" in line
    assert "free 1 MiB there" in line
