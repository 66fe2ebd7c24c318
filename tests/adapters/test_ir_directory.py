"""OpenVINO IR directories: run as they are by openvino_rt, refused by name by all others and where nothing is paged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from adapters import registry
from adapters.hf_directory import read_ir_facts
from adapters.ir_facts import IR_FILE, IR_WEIGHTS
from adapters.model_source import ModelSource, resolve
from adapters.model_store import ModelStore
from adapters.own_tokenizer import TokenizerRecipe
from adapters.tokenizer import Tokenizer, load_tokenizer
from adapters.vocabulary import vocabulary_in
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.fitting.precision import choose_model_precision, sizes_of
from tests.support.options import build_options
from tests.support.own_graphs import IR, GraphForm, compute, expect_refusal
from tests.support.tiny_ir import write_genai_ir


@pytest.fixture(scope="module")
def form() -> GraphForm:
    return IR


def tokenizer_of(file: ModelSource, store: Path) -> Tokenizer:
    return load_tokenizer(str(ModelStore(store).prepare(file, TokenizerRecipe(), lambda *_: None)))


def test_another_file_in_it_is_another_model(own_graph_copy: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    before = store.digest(resolve(str(own_graph_copy), Path()))
    (own_graph_copy / "openvino_detokenizer.xml").write_text("which nobody reads")
    assert store.digest(resolve(str(own_graph_copy), Path())) == before
    with (own_graph_copy / IR_WEIGHTS).open("r+b") as weights:
        weights.write(b"\x01")
    assert store.digest(resolve(str(own_graph_copy), Path())) != before


@pytest.mark.parametrize("keys", ["static_shapes: on", "device: NPU"])
def test_fixed_shapes_are_refused_by_the_configuration(keys: str, own_graph: Path, tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(f"model:\n  source: {own_graph}\n  {keys}\n")
    with pytest.raises(ConfigError, match="runs with open shapes alone"):
        load_config(config)


def test_its_weights_are_those_of_its_graph(own_graph: Path, tmp_path: Path) -> None:
    file, adapter, store = resolve(str(own_graph), Path()), registry.get("openvino_rt"), ModelStore(tmp_path / "store")
    chosen = choose_model_precision(build_options(tmp_path, str(own_graph)), adapter, store, file)
    assert chosen is not None
    assert chosen.choice.weights == "as_file"
    assert sizes_of(file).stored == "fp32 (f32)"


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
def test_what_cannot_be_served_is_refused_by_name(
    harm: Callable[[Path], None], words: str, own_graph_copy: Path
) -> None:
    harm(own_graph_copy)
    expect_refusal(IR, own_graph_copy, words)


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
    loaded = IR.load(directory, tmp_path / "store")
    assert loaded.capabilities.weights == "int8 (u8)", "of two layers the embedding has most weights"
    assert np.isfinite(compute(loaded)).all()
