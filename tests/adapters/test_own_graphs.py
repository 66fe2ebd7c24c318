"""Directories whose graph is run as it is: what OpenVINO's and onnxruntime-genai's have alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.contract import LayerRange, ModelRefused
from adapters.genai_facts import PADDING_ROWS
from adapters.model_source import check_source, resolve
from adapters.names import OWN_ADAPTERS
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.planning.models import model_at_hand
from tests.support import tiny_models
from tests.support.model_rows import loads_models
from tests.support.own_graphs import FORMS, GENAI, IR, GraphForm, compute

_SAME = ("layers", "hidden", "heads", "vocabulary_size", "matrix_elements", "attention_elements", "read_elements")


@pytest.fixture(scope="module", params=list(FORMS.values()), ids=list(FORMS))
def form(request: pytest.FixtureRequest) -> GraphForm:
    return request.param


def test_it_is_a_source_with_the_sizes_of_its_model(form: GraphForm, own_graph: Path) -> None:
    file = resolve(str(own_graph), Path())
    facts = check_source(str(own_graph), Path(), form.adapter)
    same = check_source(f"{own_graph}-safetensors", Path(), form.adapter)
    assert facts is not None
    assert same is not None
    for name in _SAME:
        assert getattr(facts, name) == getattr(same, name), name
    assert facts.family == form.family
    assert facts.context_length == same.context_length - (PADDING_ROWS if form is GENAI else 0)
    assert facts.count_kv_elements(facts.all_layers) == same.count_kv_elements(same.all_layers)
    assert file.weights_bytes == (own_graph / form.weights_file).stat().st_size


@loads_models(GENAI.adapter, GENAI.title, {"qwen3": "Qwen3ForCausalLM"}, lambda at, name: GENAI.write(at / "ort", name))
@loads_models(IR.adapter, IR.title, {"gemma3": "Gemma3ForCausalLM"}, lambda at, name: IR.write(at / "ir", name))
def test_it_is_linked_and_computes_what_its_graph_does(form: GraphForm, own_graph: Path, tmp_path: Path) -> None:
    prepared = form.prepare(own_graph, tmp_path)
    assert (own_graph / form.weights_file) in {path.resolve() for path in prepared.iterdir()}
    theirs = compute(form.load(Path(f"{own_graph}-safetensors"), tmp_path))
    assert (compute(form.load(own_graph, tmp_path)) == theirs).all()
    with pytest.raises(ModelRefused, match="layers are not cut: leave shards out"):
        form.load(own_graph, tmp_path, LayerRange(0, 2))


@pytest.mark.parametrize("adapter", [name for name in OWN_ADAPTERS if name != "simulated"])
def test_every_other_runtime_refuses_it_with_what_to_set(
    adapter: str, form: GraphForm, own_graph: Path, tmp_path: Path
) -> None:
    if adapter == form.adapter:
        assert check_source(str(own_graph), Path(), adapter) is not None
        return
    with pytest.raises(ModelRefused, match=form.refusal):
        check_source(str(own_graph), Path(), adapter)
    config = tmp_path / "cluster.yaml"
    config.write_text(f"model:\n  source: {own_graph}\n  adapter: {adapter}\n")
    with pytest.raises(ConfigError, match=rf"cluster\.yaml:2: .*Set adapter: {form.adapter}"):
        load_config(config)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("shards: [{layers: 2}, {layers: 2}]", "layers are not cut: leave shards out"),
        ("weights: int8", r"cluster\.yaml:4: model\.weights: .* run as it is; leave this out"),
    ],
)
def test_what_it_cannot_be_is_refused_by_the_configuration(
    keys: str, words: str, form: GraphForm, own_graph: Path, tmp_path: Path
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(f"model:\n  source: {own_graph}\n  adapter: {form.adapter}\n  {keys}\n")
    with pytest.raises(ConfigError, match=words):
        load_config(config)


def test_a_plan_has_one_runtime_for_it_and_its_own_weights(form: GraphForm, own_graph: Path, tmp_path: Path) -> None:
    planned = model_at_hand(str(own_graph), "", Path(), "auto", tmp_path / "store", adapter="auto")
    assert (planned.runtimes, planned.formats("gpu"), planned.whole) == ((form.adapter,), ("as_file",), True)


def test_safetensors_go_before_it(form: GraphForm, own_graph_copy: Path) -> None:
    tiny_models.write_model(own_graph_copy, "llama")
    assert form.graph_file not in {path.name for path in resolve(str(own_graph_copy), Path()).content}
    assert check_source(str(own_graph_copy), Path(), "torch_device") is not None
