"""Models that need not stay in memory: what their configuration may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import load_config, parse_config
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import read_text
from orchestrator.daemon.bootstrap.readiness import check_readiness
from orchestrator.daemon.bootstrap.residency import come_and_go, measure_models
from orchestrator.errors import ConfigError
from tests.support.tiny_gguf import Tiny, write

TOY = "source: 'simulated:toy', adapter: simulated, name: toy"


def load(directory: Path, text: str) -> ClusterConfig:
    path = directory / "cluster.yaml"
    path.write_text(text)
    return load_config(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"model: {{{TOY}, idle_s: 5}}\n", "model.idle_s: goes with keep: while_used or keep: on_demand"),
        ("model: {source: 'simulated:toy', adapter: simulated, keep: on_demand}\n", "give it one"),
        (f"model: {{{TOY}, keep: on_demand, device: auto}}\n", "a plan is made with all models in memory"),
        (
            f"model: {{{TOY}, keep: while_used, replicas: {{min: 1, max: 2}}}}\ndevices: {{threads: 1}}\n",
            "load decides",
        ),
        (f"model: {{{TOY}, keep: on_demand}}\nfailover: {{standby: [{{}}]}}\n", "a standby would stay in memory"),
        (f"model: {{{TOY}, keep: often}}\n", "keep"),
    ],
)
def test_what_a_model_that_comes_and_goes_cannot_have_is_refused(tmp_path, text, why):
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    assert why in str(refused.value)
    assert "cluster.yaml:1" in str(refused.value)


def test_an_item_of_models_is_refused_with_its_own_line(tmp_path):
    text = (
        f"model: {{{TOY}}}\nmodels:\n  - source: 'simulated:toy'\n    adapter: auto\n    name: b\n    keep: on_demand\n"
    )
    with pytest.raises(ConfigError, match=r"cluster\.yaml:6: models\[0\]\.keep: on_demand: a plan"):
        load(tmp_path, text)


def write_models(keeps: list[str], memory: str) -> str:
    items = "".join(
        f"  - {{source: 'simulated:toy', adapter: simulated, name: m{number}, keep: {keep}, kv_cache: 2 GiB}}\n"
        for number, keep in enumerate(keeps)
    )
    return f"model: {{{TOY}}}\nmodels:\n{items}limits: {{models_memory: {memory}}}\n"


def test_a_model_that_could_never_have_its_turn_is_refused_with_the_sum(tmp_path):
    config = load(tmp_path, write_models(["on_demand", "always"], "4 GiB"))
    lines = parse_config(read_text(tmp_path / "cluster.yaml"), tmp_path / "cluster.yaml")[1]
    with pytest.raises(ConfigError) as refused:
        check_readiness(config, tmp_path / "cluster.yaml", lines)
    told = str(refused.value)
    assert "cluster.yaml:3: models[0].keep" in told
    for part in ("may have 4.0 GiB", "toy 1.0 GiB (always)", "m1 2.0 GiB (always)", "m0 2.0 GiB (on_demand)"):
        assert part in told
    assert "are 5.0 GiB" in told


def test_models_that_have_turns_fit(tmp_path):
    text = write_models(["on_demand", "while_used", "on_demand"], "4 GiB")
    config = load(tmp_path, text)
    lines = parse_config(text, tmp_path / "cluster.yaml")[1]
    check_readiness(config, tmp_path / "cluster.yaml", lines)
    assert come_and_go(config.targets)
    found = measure_models(config.targets, tmp_path)
    assert found.at_start == [0, 2]
    assert found.unknown == ()


def test_what_a_model_needs_is_known_without_reading_its_weights(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, Tiny("llama"))
    source = f"model: {{source: {path}, name: tiny, keep: on_demand}}\n"
    text = f"{source}limits: {{kv_cache: 1 MiB}}\nstore: {{directory: {tmp_path / 'store'}}}\n"
    (terms,) = measure_models(load(tmp_path, text).targets, tmp_path).terms
    assert sum(terms.needs.values()) > path.stat().st_size // 2
    assert not (tmp_path / "store").exists()  # where a digest would be remembered


def test_what_is_not_known_of_memory_is_told(tmp_path):
    config = load(tmp_path, write_models(["on_demand"], "4 GiB").partition("limits:")[0])
    (unknown,) = measure_models(config.targets, tmp_path).unknown
    assert unknown.endswith("set limits.models_memory")
