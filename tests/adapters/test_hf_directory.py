"""A Hugging Face directory is served whole or refused by name; nothing in it can run code."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.contract import ModelRefused
from adapters.decoder.from_safetensors import SafetensorsWeights
from adapters.hf_directory import model_files, open_weights, read_json
from adapters.model_source import check_source, resolve
from adapters.model_store import ModelStore
from adapters.safetensors_file import Stored, read_tensors
from tests.adapters.test_model_store import CopyRecipe, Said
from tests.support import tiny_models


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_models.write_model(tmp_path / "My Tiny-Model", "llama3", shards=2)


def test_a_directory_is_a_source(tiny: Path) -> None:
    source = resolve(tiny.name, tiny.parent)
    assert (source.path, source.name, source.source) == (tiny, "my-tiny-model", tiny.name)
    assert {path.name for path in source.content} == {path.name for path in tiny.iterdir()}


def test_an_artefact_belongs_to_the_content_of_all_files(tiny: Path, store_root: Path) -> None:
    class Names(CopyRecipe):
        def prepare(self, source: Path, target: Path, progress: Any) -> None:
            self.runs += 1
            (target / "names").write_text(source.name)

    store, recipe, said = ModelStore(store_root), Names(), Said()
    first = store.prepare(resolve(str(tiny), Path()), recipe, said)
    assert len([stage for stage in said.stages if stage.startswith("reading")]) == len(list(tiny.iterdir()))
    (tiny / "notes.txt").write_text("not part of the model")
    moved = tiny.rename(tiny.parent / "elsewhere")
    assert store.prepare(resolve(str(moved), Path()), recipe, said) == first
    (moved / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert store.prepare(resolve(str(moved), Path()), recipe, said) != first
    assert recipe.runs == 2


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).write_text(text)

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    return write("config.json", json.dumps(tiny_models.config_of("llama3", **changes)))


def write_pickle(directory: Path) -> None:
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    (directory / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80\x04")


SHARD = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (remove("config.json"), ["no config.json"]),
        (remove("tokenizer.json"), ["no tokenizer.json", "save_pretrained"]),
        (remove("model.safetensors.index.json"), ["no model.safetensors"]),
        (remove(SHARD), [SHARD, "is missing", "2 files"]),
        (write_pickle, ["pytorch_model-00001-of-00002.bin", "pickle", "never opened", "save_pretrained"]),
        (write("config.json", "{"), ["config.json", "no JSON"]),
        (write("config.json", "[]"), ["config.json", "no JSON object"]),
        (write("model.safetensors.index.json", "{}"), ["index.json", "no safetensors"]),
        (write("model.safetensors.index.json", '{"weight_map": {"a": "../x.safetensors"}}'), ["index.json"]),
        (write("model.safetensors.index.json", '{"weight_map": {"a": "x.bin"}}'), ["index.json"]),
        (config(architectures=["PhiForCausalLM"]), ["PhiForCausalLM", "Qwen3ForCausalLM"]),
        (config(architectures=["X"], auto_map={"AutoModel": "x.X"}), ["auto_map", "never run"]),
        (config(architectures=None), ["no architecture"]),
        (config(vocab_size=...), ["vocab_size", "missing"]),
        (config(num_hidden_layers="4"), ["num_hidden_layers", "'4'"]),
        (config(num_key_value_heads=3), ["num_key_value_heads", "4 heads"]),
        (config(head_dim=1 << 40), ["head_dim", "at most"]),
        (config(hidden_act="relu"), ["hidden_act", "relu"]),
        (config(attention_bias=True), ["attention_bias"]),
        (config(quantization_config={"quant_method": "gptq"}), ["quantization_config"]),
        (config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), ["rope_scaling", "dynamic"]),
        (config(rope_scaling={"rope_type": "llama3", "factor": 2.0}), ["rope_scaling", "low_freq_factor"]),
        (config(rope_scaling={"full_attention": None}), ["rope_scaling", "full_attention"]),
        (config(partial_rotary_factor=0.5, rope_scaling={"partial_rotary_factor": 0.5}), ["partial_rotary_factor"]),
        (config(layer_types=["chunked_attention"] * 4), ["layer_types"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tiny: Path, harm: Callable[[Path], None], words: list[str]) -> None:
    harm(tiny)
    with pytest.raises(ModelRefused) as caught:
        check_source(str(tiny), Path(), "openvino_rt")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["weights.bin", "weights.pt", "model.safetensors"])
def test_one_file_of_a_model_is_no_source(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(ModelRefused, match=r"never opened|holds weights only"):
        resolve(name, tmp_path)


def test_an_id_without_its_prefix_is_told_the_prefix(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="write hf:org/name"):
        resolve("org/name", tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 97}, ["model.layers.0.mlp.gate_proj.weight", "do not belong together"]),
        ({"num_hidden_layers": 5}, ["model.layers.4.self_attn.q_proj.weight"]),
        ({"num_hidden_layers": 3}, ["tensors that a llama model does not have", "model.layers.3"]),
        ({"architectures": ["Qwen3ForCausalLM"]}, ["q_norm"]),
        ({"tie_word_embeddings": False}, ["lm_head.weight"]),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(tiny: Path, changes: dict[str, Any], words: list[str]) -> None:
    config(**changes)(tiny)
    with pytest.raises(ModelRefused) as caught:
        open_weights(tiny)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_text_half_of_a_model_that_sees(tmp_path: Path) -> None:
    plain = tiny_models.write_model(tmp_path / "plain", "gemma3")
    text = read_json(plain / "config.json")
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text | {"architectures": None}}
    tensors = read_tensors(plain / "model.safetensors")
    picture = {"vision_tower.x.weight": next(iter(tensors.values()))}
    both = SafetensorsWeights(outer, {f"language_model.{name}": t for name, t in tensors.items()} | picture, "seeing")
    assert both.spec == open_weights(plain).spec
    assert np.array_equal(both.tensor("2.down").values, open_weights(plain).tensor("2.down").values)


def test_gemmas_norms_and_scale(tmp_path: Path) -> None:
    """Norms multiply with 1 + w; the embedding scale has the embedding's precision: sqrt(1152) is 34 in bfloat16."""
    changes = {"hidden_size": 1152, "num_hidden_layers": 1}
    stored = tiny_models.tensors_of(tiny_models.config_of("gemma3", **changes))["model.norm.weight"]
    for kind, scale in [("F32", float(np.float32(np.sqrt(1152)))), ("F16", 33.9375), ("BF16", 34.0)]:
        weights = open_weights(tiny_models.write_model(tmp_path / kind, "gemma3", kind=kind, **changes))
        assert weights.spec.embedding_scale == scale
        assert weights.tensor("final_norm").values == pytest.approx(1.0 + stored, abs=0.01)
        assert weights.tensor("final_norm").values.dtype == np.float32


def test_tensors_are_mapped_and_not_read(tiny: Path) -> None:
    weights = open_weights(tiny)
    assert isinstance(weights.tensor("0.query").values, np.memmap)
    assert weights.label == "fp32"


def test_other_elements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"F8_E4M3.*BF16"):
        Stored("w", tmp_path / "x.safetensors", "F8_E4M3", (2, 2), 0).values()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    directory = tiny_models.write_model(tmp_path, "llama3", num_hidden_layers=1)
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    for length in [*range(300), *range(300, len(raw), 997), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(ModelRefused, match=r"model\.safetensors: it is no whole"):
            open_weights(directory)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_head_is_served_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    directory = tmp_path / "model"
    if not directory.exists():
        tiny_models.write_model(directory, "llama3", num_hidden_layers=1)
        (tmp_path / "whole").write_bytes((directory / "model.safetensors").read_bytes())
    raw = bytearray((tmp_path / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 1500))] = data.draw(st.integers(0, 255))
    (directory / "model.safetensors").write_bytes(raw)
    with suppress(ModelRefused):  # any other exception fails the test
        for name in ("embedding", "0.query", "final_norm"):
            open_weights(directory).tensor(name)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention"]), inner)
        ),
    ),
    data=st.data(),
)
def test_a_strange_config_is_served_or_refused(tiny: Path, value: Any, data: st.DataObject) -> None:
    written = tiny_models.config_of(data.draw(st.sampled_from(sorted(tiny_models.CONFIGS))))
    written[data.draw(st.sampled_from(sorted(written)))] = value
    (tiny / "config.json").write_text(json.dumps(written))
    with suppress(ModelRefused):
        model_files(tiny)
