"""`model.shards`: what is refused, at its line, and how workers are started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.load_options import ShardOptions
from tests.support import tiny_gguf, tiny_models
from tests.support.config import parse_config

HEAD = "model:\n  source: simulated:toy\n  adapter: simulated\n"
TWO = "[{layers: 1}, {layers: 2}]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "  shards: [{layers: 4}]\n", "4: model.shards: one shard is the whole target"),
        (HEAD + "  shards: [{layers: 0}, {layers: 1}]\n", "4: model.shards[0].layers: must be 1 to 10000, not 0"),
        (HEAD + "  shards: [{device: SIM}, {layers: 1}]\n", "4: model.shards[0].layers: is missing"),
        (HEAD + "  shards:\n  - {layers: 1, adaptor: simulated}\n", "5: model.shards[0].adaptor: unknown key"),
        (HEAD + "  shards: [{layers: 1, adapter: vulkan}, {layers: 1}]\n", "4: model.shards[0].adapter: must be"),
        (HEAD + "  shards: [{layers: 1, adapter: auto}, {layers: 1}]\n", "4: model.shards[0].adapter: must be"),
        (
            HEAD + "  shards: [{layers: 1, adapter: onnx_rt}, {layers: 1}]\n",
            "4: model.shards[0].adapter: 'simulated:toy' does not go with adapter 'onnx_rt'",
        ),
        (
            HEAD + "  shards: [{layers: 1, adapter: llama_cpp}, {layers: 1}]\n",
            "4: model.shards[0].adapter: llama_cpp loads whole models, and no ranges of layers; name onnx_rt, "
            "openvino_rt or torch_device",
        ),
        (HEAD + f"  device: auto\n  shards: {TWO}\n", "5: model.shards: a plan chooses shards where the device is"),
        (
            HEAD + f"  shards: {TWO}\ndrafts:\n- {{method: model, source: 'simulated:toy', adapter: auto}}\n",
            "6: drafts[0]: no plan is made beside model.shards; name the draft's adapter and device",
        ),
        (
            HEAD + f"  static_shapes: on\n  shards: {TWO}\n",
            "5: model.shards: graphs of fixed shape hold whole targets",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_at_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert f"c.yaml:{said}" in str(refused.value)


@pytest.mark.parametrize(("first", "refused"), [("", True), (", adapter: onnx_rt", False)])
def test_a_runtime_of_whole_models_runs_no_shard_that_names_none(tmp_path: Path, first: str, refused: bool) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.Tiny("llama", layers=2))
    path = tmp_path / "c.yaml"
    path.write_text(
        "model:\n  source: tiny.gguf\n  adapter: llama_cpp\n"
        f"  shards: [{{layers: 1{first}}}, {{layers: 1, adapter: onnx_rt}}]\n"
    )
    if not refused:
        load_config(path)
        return
    said = "c.yaml:4: model.shards: llama_cpp loads whole models, and no ranges of layers; set adapter: onnx_rt"
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(path)


@pytest.mark.parametrize(("shards", "wrong"), [("1, 2", "3 (1 + 2)"), ("2, 2, 1", "5 (2 + 2 + 1)"), ("1, 3", "")])
@pytest.mark.parametrize("further", [False, True])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_layers_that_the_model_has_not_are_refused_at_their_line(
    tmp_path: Path, shards: str, wrong: str, further: bool, kind: str
) -> None:
    if kind == "file":
        tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.Tiny("llama", layers=4))
    else:
        tiny_models.write_model(tmp_path / "tiny", "qwen3", kind="BF16", num_hidden_layers=4)
    source = "tiny.gguf" if kind == "file" else "tiny"
    layers = ", ".join(f"{{layers: {one}}}" for one in shards.split(", "))
    model = f"source: {source}\n  shards: [{layers}]\n"
    path = tmp_path / "c.yaml"
    path.write_text(
        HEAD + f"  name: toy\nmodels:\n- name: tiny\n  {model}" if further else f"# cut\n\nmodel:\n  {model}"
    )
    if not wrong:
        load_config(path)
        return
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    place = "8: models[0].shards" if further else "5: model.shards"
    assert f"c.yaml:{place}: {source} has 4 layers, and its shards name {wrong}; name each once" in str(refused.value)


def test_a_shard_has_what_the_model_has_where_it_says_nothing(tmp_path: Path) -> None:
    config = parse_config(
        "model: {source: 'simulated:toy', adapter: simulated, device: SIM,\n"
        "  shards: [{layers: 1}, {layers: 2, device: SIM.1, threads: 3}]}\n",
        Path("c.yaml"),
    )
    assert engine_options(config, tmp_path).model.shards == [
        ShardOptions("simulated", "SIM", 1),
        ShardOptions("simulated", "SIM.1", 2, 3),
    ]
