"""OpenVINO IR directories: run as they are by openvino_rt, refused by name by all others and where nothing is paged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import registry
from adapters.contract import LayerRange, LoadedModel, LoadOptions, ModelRefused, NumericalClass, Precision, Segment
from adapters.hf_directory import read_ir_facts
from adapters.ir_facts import IR_FILE, IR_WEIGHTS
from adapters.model_source import ModelSource, check_source, resolve
from adapters.model_store import ModelStore
from adapters.names import OWN_ADAPTERS
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer, load_tokenizer
from adapters.variant import Variant
from adapters.vocabulary import vocabulary_in
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.precision import choose_model_precision, sizes_of
from orchestrator.planning.models import model_at_hand
from tests.support import tiny_models
from tests.support.model_rows import loads_models
from tests.support.options import build_options
from tests.support.tiny_ir import write_genai_ir, write_ir

CLASS = NumericalClass(Precision.FP32, Precision.FP16, quantization_group=32, apart=True, segment_rows=2)
OPTIONS = LoadOptions(kv_cache_bytes=1 << 24, slots=2, numerical_class=CLASS)


def silent(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ir(tmp_path_factory.mktemp("ir") / "My Tiny-IR", "gemma3")


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def prepare(store: Path, source: Path, adapter: str = "openvino_rt") -> Path:
    recipe = Variant(registry.get(adapter))
    return ModelStore(store).prepare(resolve(str(source), Path()), recipe, silent, needed_bytes=1)


def load(prepared: Path, layers: LayerRange | None = None) -> LoadedModel:
    adapter: Any = registry.get("openvino_rt")
    return adapter.load_layers(prepared, OPTIONS, layers, silent) if layers else adapter.load(prepared, OPTIONS, silent)


def logits_of(model: LoadedModel) -> np.ndarray:
    rows = model.forward([Segment(0, 0, [5, 6, 7, 8, *range(20, 60)], (0, 44))]).logits.copy()
    model.close()
    return rows


def tokenizer_of(file: ModelSource, store: Path) -> Tokenizer:
    return load_tokenizer(str(ModelStore(store).prepare(file, TokenizerRecipe(), silent)))


def test_it_is_a_source_with_the_sizes_of_its_model(directory: Path) -> None:
    file = resolve(str(directory), Path())
    assert (file.name, {path.name for path in file.content}) == (
        "my-tiny-ir",
        {path.name for path in directory.iterdir()},
    )
    facts = check_source(str(directory), Path(), "openvino_rt")
    same = check_source(f"{directory}-safetensors", Path(), "openvino_rt")
    assert facts is not None
    assert same is not None
    for name in ("family", "layers", "hidden", "heads", "mlp", "vocabulary_size", "context_length", "matrix_elements"):
        expected = getattr(same, name)
        assert getattr(facts, name) == (expected if name != "family" else "gemma3_text"), name
    assert facts.count_kv_elements(facts.all_layers) == same.count_kv_elements(same.all_layers)
    assert facts.read_elements == same.read_elements
    assert file.weights_bytes == (directory / IR_WEIGHTS).stat().st_size


@loads_models(
    "openvino_rt", "OpenVINO IR", {"gemma3": "Gemma3ForCausalLM"}, lambda place, name: write_ir(place / "ir", name)
)
def test_it_is_linked_and_computes_what_its_graph_does(directory: Path, tmp_path: Path) -> None:
    prepared = prepare(tmp_path / "store", directory)
    assert (prepared / "model.bin").resolve() == directory / IR_WEIGHTS
    theirs = logits_of(load(prepare(tmp_path / "store", Path(f"{directory}-safetensors"))))
    assert (logits_of(load(prepared)) == theirs).all()
    with pytest.raises(ModelRefused, match="layers are not cut: leave shards out"):
        load(prepared, LayerRange(0, 2))


def test_another_file_in_it_is_another_model(copy: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    before = store.digest(resolve(str(copy), Path()))
    (copy / "openvino_detokenizer.xml").write_text("which nobody reads")
    assert store.digest(resolve(str(copy), Path())) == before
    with (copy / IR_WEIGHTS).open("r+b") as weights:
        weights.write(b"\x01")
    assert store.digest(resolve(str(copy), Path())) != before


@pytest.mark.parametrize("adapter", [name for name in OWN_ADAPTERS if name not in ("openvino_rt", "simulated")])
def test_every_other_runtime_refuses_it_with_what_to_set(adapter: str, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"OpenVINO's form \(IR\).* Set adapter: openvino_rt\.$"):
        check_source(str(directory), Path(), adapter)
    config = tmp_path / "cluster.yaml"
    config.write_text(f"model:\n  source: {directory}\n  adapter: {adapter}\n")
    with pytest.raises(ConfigError, match=r"cluster\.yaml:2: .*Set adapter: openvino_rt"):
        load_config(config)
    with pytest.raises(ModelRefused):
        prepare(tmp_path / "store", directory, adapter)


def test_a_plan_has_one_runtime_for_it_and_its_own_weights(directory: Path, tmp_path: Path) -> None:
    planned = model_at_hand(str(directory), "", Path(), "auto", tmp_path / "store", adapter="auto")
    assert (planned.runtimes, planned.formats("gpu"), planned.whole) == (("openvino_rt",), ("as_file",), True)
    file, adapter, store = resolve(str(directory), Path()), registry.get("openvino_rt"), ModelStore(tmp_path / "store")
    chosen = choose_model_precision(build_options(tmp_path, str(directory)), adapter, store, file)
    assert chosen is not None
    assert chosen.choice.weights == "as_file"
    assert sizes_of(file).stored == "fp32 (f32)"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("shards: [{layers: 2}, {layers: 2}]", "layers are not cut: leave shards out"),
        ("static_shapes: on", "runs with open shapes alone"),
        ("device: NPU", "runs with open shapes alone"),
        ("weights: int8", r"cluster\.yaml:3: model\.weights: .* run as it is; leave this out"),
    ],
)
def test_what_it_cannot_be_is_refused_by_the_configuration(
    keys: str, words: str, directory: Path, tmp_path: Path
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(f"model:\n  source: {directory}\n  {keys}\n")
    with pytest.raises(ConfigError, match=words):
        load_config(config)


def edit(*pairs: tuple[str, str]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        text = (directory / IR_FILE).read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        (directory / IR_FILE).write_text(text)

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def cut(directory: Path) -> None:
    text = (directory / IR_FILE).read_text()
    (directory / IR_FILE).write_text(text[: len(text) // 2])


def unname_context(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))


RECURRENT = ("past_key_values.1.keypresent.1.key", "cache_params.past.ssm.1")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, "openvino_model.xml: it is no whole graph"),
        (remove(IR_WEIGHTS), "openvino_model.bin is missing"),
        (remove("tokenizer.json"), r"it has no tokenizer\.json\. Write one"),
        (unname_context, "names no max_position_embeddings"),
        (edit(('variable_shape="?,2,?,32"', 'variable_shape="?,2,32,32"')), r"in a state \(past_key_values\."),
        (edit(RECURRENT, ('variable_shape="?,2,?,32"', 'variable_shape="?,64,4"')), r"in a state .* llama_cpp"),
        (edit(('names="beam_idx"', 'names="past_key_values.0.key"')), "come from outside .*--task text-generation"),
        (edit(('type="ReadValue"', 'type="Parameter"')), "keeps no keys and values"),
        (edit(('names="beam_idx"', 'names="token_type_ids"')), "it reads token_type_ids"),
        (edit(('names="input_ids"', 'names="inputs_embeds"')), "it reads no token ids"),
        (edit(('output_names="logits"', 'output_names="last_hidden_state"')), "no decoder of text"),
        (edit(('type="ScaledDotProductAttention"', 'type="Softmax"')), "no ScaledDotProductAttention"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(harm: Callable[[Path], None], words: str, copy: Path) -> None:
    harm(copy)
    with pytest.raises(ModelRefused, match=words) as refusal:
        check_source(str(copy), Path(), "openvino_rt")
    assert "\n" not in str(refusal.value)


def test_safetensors_go_before_it(copy: Path) -> None:
    tiny_models.write_model(copy, "llama")
    assert IR_FILE not in {path.name for path in resolve(str(copy), Path()).content}
    assert check_source(str(copy), Path(), "torch_device") is not None


@pytest.mark.model
def test_openvino_genai_writes_one_whose_tokenizer_is_the_files(first_layers_path: Path, tmp_path: Path) -> None:
    directory = write_genai_ir(first_layers_path, tmp_path / "genai")
    file, gguf = resolve(str(directory), Path()), resolve(str(first_layers_path), Path())
    assert "config.json" not in {path.name for path in file.content}
    assert read_ir_facts(directory).layers == 2
    assert vocabulary_in(file) == vocabulary_in(gguf)
    mine, theirs = tokenizer_of(file, tmp_path / "store"), tokenizer_of(gguf, tmp_path / "store")
    for text in ("Hello  world 1234\n\n\tdon't", "na\u00efve \u6f22\u5b57", "<|im_start|>user\nhi<|im_end|>"):
        assert mine.encode(text, special=True) == theirs.encode(text, special=True)
    messages = [{"role": "user", "content": "Hello"}]
    assert mine.encode_chat(messages) == theirs.encode_chat(messages)
    assert mine.eos_ids == theirs.eos_ids
    loaded = load(prepare(tmp_path / "store", directory))
    assert loaded.capabilities.weights == "int8 (u8)", "of two layers the embedding has most weights"
    assert np.isfinite(logits_of(loaded)).all()
