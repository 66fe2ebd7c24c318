"""`config check` and `doctor` name the libraries that a format of weights needs, as a load does."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from adapters import registry
from adapters.contract import AdapterUnavailable, StaticShapes
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from orchestrator.cli.doctor import examine
from orchestrator.config.load import load_config, parse_config
from orchestrator.daemon.bootstrap.readiness import check_readiness
from orchestrator.errors import ConfigError
from orchestrator.fitting.precision import variant
from tests.support.tiny_gguf import Tiny, write

MODEL = "model:\n  source: m.gguf\n  name: first\n"


@pytest.fixture
def write_config(tmp_path: Path):
    write(tmp_path / "m.gguf", Tiny("llama", layers=2), {"general.type": "model"})

    def write_lines(*lines: str) -> Path:
        path = tmp_path / "c.yaml"
        kept = f"store: {{directory: {tmp_path}/store}}\nstate: {{directory: {tmp_path}/state}}\n"
        path.write_text(MODEL + "\n".join(lines) + "\n" + kept)
        return path

    return write_lines


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the libraries that quantise."""
    real = importlib.metadata.distribution

    def find(name: str) -> importlib.metadata.Distribution:
        if name in ("torchao", "nncf"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "distribution", find)


def check(path: Path) -> list[str]:
    config, lines = load_config(path), parse_config(path.read_text(), path)[1]
    try:
        check_readiness(config, path, lines)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def meet(adapter: str, weights: str, path: Path) -> str:
    """Return what a load of the model says."""
    recipe = variant(registry.get_for(adapter, "CPU", StaticShapes()), weights)
    with pytest.raises(AdapterUnavailable) as refused:
        ModelStore(path.parent / "store").prepare(resolve("m.gguf", path.parent), recipe, lambda stage, done: None)
    return str(refused.value)


@pytest.mark.parametrize(
    ("adapter", "weights", "command"),
    [
        ("torch_device", "int8", "outrider extras install torch quantize"),
        ("torch_device", "int4", "outrider extras install torch quantize"),
        ("torch_device", "fp8", "outrider extras install torch quantize"),
        ("openvino_rt", "int8", "outrider extras install quantize"),
        ("openvino_rt", "int4", "outrider extras install quantize"),
    ],
)
@pytest.mark.usefixtures("bare")
def test_a_format_without_its_library_is_refused_at_its_line(write_config, adapter, weights, command):
    path = write_config(f"  adapter: {adapter}", f"  weights: {weights}")
    (line,) = check(path)
    assert line == f"{path}:5: model.weights: {meet(adapter, weights, path)}"
    assert command in line
    assert [one.found for one in examine(path) if one.verdict == "fail"] == [line]


@pytest.mark.usefixtures("bare")
def test_whatever_is_loaded_here_is_looked_at(write_config):
    path = write_config(
        "  weights: int4",
        "  shards: [{layers: 1}, {layers: 1, adapter: torch_device}]",
        "drafts:",
        "  - {method: model, source: m.gguf, weights: int8}",
        "failover:",
        "  standby: [{adapter: torch_device}]",
        "models:",
        "  - {source: m.gguf, name: other, adapter: torch_device, weights: int8}",
    )
    places = [line.split(":")[1:3] for line in check(path)]
    assert places == [
        ["4", " model.weights"],
        ["5", " model.shards[0].weights"],
        ["5", " model.shards[1].weights"],
        ["7", " drafts[0].weights"],
        ["9", " failover.standby[0].weights"],
        ["11", " models[0].weights"],
    ]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "lines", [("  weights: as_file",), ("  adapter: torch_device",), ("  static_shapes: 'on'", "  weights: int8")]
)
def test_what_needs_no_such_library_passes(write_config, lines):
    assert check(write_config(*lines)) == []


@pytest.mark.parametrize("adapter", ["torch_device", "llama_cpp"])
def test_static_shapes_that_a_runtime_lacks_are_refused_at_their_line(write_config, adapter):
    path = write_config(f"  adapter: {adapter}", "  weights: int8", "  static_shapes: 'on'")
    assert check(path) == [f"{path}:6: model.static_shapes: {adapter} has no static shapes; openvino_rt has them"]


@pytest.mark.parametrize("weights", ["fast", "int8", "int4", "fp8", "bf16", "fp16", "fp32"])
def test_a_runtime_of_the_files_own_weights_has_no_others(write_config, weights):
    lines = ("  adapter: llama_cpp", f"  weights: {weights}", "failover:", "  standby: [{adapter: llama_cpp}]")
    path = write_config(*lines)
    said = f"weights in {weights}: llama.cpp runs a file's own; leave weights at auto, or take a file that has them"
    assert check(path) == [f"{path}:5: model.weights: {said}", f"{path}:7: failover.standby[0].weights: {said}"]
    assert check(write_config(lines[0], "  weights: as_file")) == []


@pytest.mark.parametrize("adapter", ["llama_cpp", "openvino_rt", "onnx_rt", "torch_device"])
def test_some_runtimes_have_a_copy_for_drafts_alone(write_config, adapter):
    draft = f"  - {{method: model, source: m.gguf, adapter: {adapter}, weights: draft}}"
    path = write_config("  adapter: llama_cpp", "drafts:", draft)
    problems = check(path)
    if adapter in ("llama_cpp", "openvino_rt"):
        assert problems == []
    else:
        assert len(problems) == 1
        assert problems[0].startswith(f"{path}:6: drafts[0].weights: weights in draft: ")
    with pytest.raises(ConfigError, match="weights"):
        check(write_config("  adapter: llama_cpp", "  weights: draft"))


@pytest.mark.parametrize("adapter", ["llama_cpp", "onnx_rt", "torch_device"])
def test_other_formats_than_a_runtime_has_are_refused_at_their_lines(write_config, adapter):
    path = write_config(
        f"  adapter: {adapter}",
        "  activations: fp16",
        "drafts:",
        f"  - {{method: model, source: m.gguf, adapter: {adapter}, kv_cache_precision: 8bit}}",
        "failover:",
        "  standby: [{kv_cache_precision: 8bit}, {adapter: openvino_rt, activations: auto}]",
    )
    first, draft, standby, its = check(path)
    assert first.startswith(f"{path}:5: model.activations: activations fp16: {adapter} computes in ")
    assert first.endswith("; ask for one of these, or leave them at auto")
    said = f"kv_cache_precision 8bit: {adapter} has none on CPU; leave it at auto"
    assert draft == f"{path}:7: drafts[0].kv_cache_precision: {said}"
    assert standby == f"{path}:9: failover.standby[0].activations: {first.partition('activations: ')[2]}"
    assert its == f"{path}:9: failover.standby[0].kv_cache_precision: {said}"
    assert check(write_config(f"  adapter: {adapter}", "  activations: fp32")) == []


@pytest.mark.parametrize("adapter", ["torch_device", "openvino_rt"])
def test_what_is_installed_passes(write_config, adapter):
    assert check(write_config(f"  adapter: {adapter}", "  weights: int8")) == []
