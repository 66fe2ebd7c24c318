"""The section `models`: each item is a target of its own, and what is wrong in it is told with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from orchestrator.config.model import ClusterConfig
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options

HEAD = "model: {source: 'simulated:toy', adapter: simulated, name: first}\nmodels:\n"
ONE = "  - source: 'simulated:toy?shift=1'\n    adapter: simulated\n    name: second\n"


def load(directory: Path, text: str) -> ClusterConfig:
    path = directory / "cluster.yaml"
    path.write_text(text)
    return load_config(path)


def test_each_target_is_a_configuration_of_its_own(tmp_path):
    own = (
        "    drafts: []\n    kv_cache: 64 MiB\n    max_running: 2\n    cores: [0]\n    threads: 1\n"
        "    slo: {ttft_ms: 500}\n    speculation: {num_speculative_tokens: 3}\n"
        "    failover: {standby: [{threads: 1}]}\n"
    )
    common = "limits: {max_waiting: 7}\ncanary: {share: 0.1, speculation: {method: fixed}}\nfailover: {standby: [{}]}\n"
    config = load(
        tmp_path, HEAD + ONE + own + "  - {source: 'simulated:toy', adapter: simulated, name: third}\n" + common
    )
    first, second, third = config.targets
    assert [one.model.name for one in config.targets] == ["first", "second", "third"]
    assert [one.number for one in config.targets] == [0, 1, 2]
    assert (second.limits.kv_cache, second.limits.max_running, second.limits.max_waiting) == (64 << 20, 2, 7)
    assert (second.devices.cores, second.devices.threads, first.devices.cores) == ([0], 1, [])
    assert (second.slo.ttft_ms, third.slo.ttft_ms) == (500, 0)
    assert second.speculation.num_speculative_tokens == 3
    assert [one.canary.share for one in config.targets] == [0.1, 0.0, 0.0]
    assert [len(one.failover.standby) for one in config.targets] == [1, 1, 0]
    options = engine_options(second, tmp_path)
    assert (options.model.name, options.max_running, options.model.threads, options.drafters) == ("second", 2, 1, [])


def test_a_file_with_one_model_is_its_own_target(tmp_path):
    config = load(tmp_path, "model: {source: 'simulated:toy', adapter: simulated}\n")
    assert config.targets == (config,)


# (text behind HEAD, line, what the message must hold)
WRONG = [
    (ONE.replace("second", "first"), 5, ["models[0].name", "'first' is the name of another model", "line 1"]),
    (ONE + ONE, 8, ["models[1].name", "models[0].name in line 5"]),
    (ONE.replace("    name: second\n", ""), 3, ["models[0].name: is missing"]),
    (ONE + "    canary: {share: 0.1}\n", 6, ["models[0].canary: unknown key"]),
    (ONE + "    devices: {cores: [0]}\n", 6, ["models[0].devices: unknown key; write cores, threads here"]),
    (ONE + "    kv_cash: 1 MiB\n", 6, ["models[0].kv_cash", "did you mean 'kv_cache'"]),
    (ONE + "    max_running: 0\n", 6, ["models[0].max_running: must be 1 to 1024, not 0"]),
    (ONE + "    placement: {concurrency: 3}\n", 6, ["models[0].placement: goes with a plan"]),
    (ONE + "    slo: {late: refuse}\n", 6, ["models[0].slo.late: goes with slo.ttft_ms"]),
    (ONE + "    speculation: {min_speculative_tokens: 20}\n", 6, ["models[0].speculation.min_speculative_tokens"]),
    (ONE + "    replicas: [{cors: [1]}]\n", 6, ["models[0].replicas[0].cors: unknown key", "'cores'"]),
    (ONE + "    replicas: [{host: a}]\n", 6, ["models[0].replicas[0].host: goes with Ray"]),
    (ONE + "    cores: [0]\n    replicas: 2\n", 6, ["models[0].cores: are one worker's", "models[0].replicas"]),
    (ONE + "    cores: [4000]\n", 6, ["models[0].cores: this machine has no core 4000"]),
    (ONE + "    drafts:\n    - {method: suffx}\n", 7, ["models[0].drafts[0].method", "'suffix'"]),
    (ONE + "    drafts:\n    - {method: suffix, max_mach: 3}\n", 7, ["models[0].drafts[0].max_mach", "'max_match'"]),
    (ONE + "    drafts:\n    - {method: model, source: x.gguf}\n", 7, ["models[0].drafts[0].source"]),
    (
        ONE + "    drafts:\n    - {method: model, source: 'simulated:toy', adapter: simulated, overlap: never}\n",
        7,
        ["models[0].drafts[0].overlap: goes with process: own"],
    ),
    ("  - {source: nowhere.gguf, name: b}\n", 3, ["models[0].source: nowhere.gguf"]),
]


@pytest.mark.parametrize(("text", "line", "words"), WRONG)
def test_what_is_wrong_is_told_with_its_place(tmp_path, text, line, words):
    with pytest.raises(ConfigError) as found:
        load(tmp_path, HEAD + text)
    message = str(found.value)
    assert f"cluster.yaml:{line}: " in message
    for word in words:
        assert word in message


def test_the_first_model_needs_a_name_where_there_are_others(tmp_path):
    with pytest.raises(ConfigError, match=r"cluster.yaml:1: model.name: is missing: requests choose among"):
        load(tmp_path, HEAD.replace(", name: first", "") + ONE)


def test_show_prints_what_holds_for_each(tmp_path, outrider):
    path = tmp_path / "cluster.yaml"
    path.write_text(HEAD + ONE + "    kv_cache: 64 MiB\nspeculation: {num_speculative_tokens: 5}\n")
    shown = " ".join(outrider("config", "show", str(path)).stdout.split())
    assert "models[0].name │ second" in shown
    assert "models[0].kv_cache │ 64 MiB" in shown
    assert "models[0].max_running │ 16" in shown
    assert "models[0].speculation.num_speculative_tokens │ 5" in shown
