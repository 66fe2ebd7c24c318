"""What stands in config.json is what transformers makes of it, or is refused by its name."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapters.contract import ModelRefused
from adapters.decoder import hf_config
from adapters.decoder.hf_config import ConfigReader, read_spec
from adapters.hf_directory import model_files, open_weights
from tests.support import reference_decoder, tiny_models

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = tiny_models.LLAMA3_ROPE
ODD_VALUES = ["x", -1, 0, 10**400, 1e300, math.nan, math.inf, True, [], {}, [1], {"a": 1}, "1.0"]
TOKENS = [int(token) for token in np.random.default_rng(4).integers(4, 260, 40)]
# Read by transformers' classes, and without effect on what an inference over text computes.
HARMLESS = {
    *("_attn_implementation", "attention_dropout", "pad_token_id", "use_cache", "get_text_config"),
    *("vision_config", "image_token_id", "mm_tokens_per_image", "text_config"),
}


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_no_value_of_a_key_is_more_than_refused(name):
    config = tiny_models.config_of(name)
    keys = [*config, "layer_types", "rope_scaling", "rope_parameters", "draft_vocab_size", "text_config", "mlp_bias"]
    keys += ["use_sliding_window", "partial_rotary_factor", "original_max_position_embeddings", "attention_bias"]
    refused = [refusal for key in keys for value in ODD_VALUES if (refusal := find_refusal(config | {key: value}))]
    assert [refusal for refusal in refused if not refusal.startswith("config.json: ")] == []
    assert len(refused) > 100


def find_refusal(config: dict[str, Any]) -> str:
    try:
        read_spec(config, "config.json")
    except ModelRefused as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_where_windows_begin_is_asked_only_where_there_are_some(family):
    idle = tiny_models.config_of(family, use_sliding_window=False, sliding_window=16, max_window_layers=None)
    assert set(read_spec(idle, "config.json")[1].windows) == {0}
    with pytest.raises(ModelRefused, match="max_window_layers"):
        read_spec(idle | {"use_sliding_window": True}, "config.json")


@pytest.mark.parametrize("scaling", [YARN | {"beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 1.0}, LLAMA3])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_no_value_inside_a_rope_is_more_than_refused(scaling, where):
    keys = [*scaling, "beta_slow", "attention_factor", "truncate", "rope_theta", "partial_rotary_factor"]
    ropes = [scaling | {key: value} for key in keys for value in [*ODD_VALUES, None]]
    refusals = [find_refusal(tiny_models.config_of("qwen3", **{where: rope})) for rope in ropes]
    assert [refusal for refusal in refusals if refusal and not refusal.startswith(f"config.json: {where}: ")] == []
    numbers = [key for key in scaling if key != "rope_type"]
    for key in numbers:
        with pytest.raises(ModelRefused, match=rf"{where}: {key} is 'x'"):
            read_spec(tiny_models.config_of("qwen3", **{where: scaling | {key: "x"}}), "config.json")


@pytest.mark.parametrize(
    ("scaling", "trained", "context"),
    [
        (YARN, 128, 512),
        (YARN, 512, 512),
        (YARN, 2048, 2048),
        ({"type": "yarn", "factor": 2.0}, 256, 512),
        (YARN | {"factor": None}, 1024, 1024),
        ({"rope_type": "linear", "factor": 4.0}, 256, 256),
        (LLAMA3, 256, 256),
    ],
)
def test_yarn_extends_the_context(scaling, trained, context):
    config = tiny_models.config_of("qwen3", rope_scaling=scaling, max_position_embeddings=trained)
    assert read_spec(config, "config.json")[1].context_length == context


def test_yarns_factor_follows_from_the_contexts_where_it_is_left_out():
    left = tiny_models.config_of("qwen3", rope_scaling=YARN | {"factor": None}, max_position_embeddings=512)
    named = tiny_models.config_of("qwen3", rope_scaling=YARN, max_position_embeddings=512)
    assert read_spec(left, "config.json") == read_spec(named, "config.json")


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_an_output_layer_that_is_not_the_embedding_is_used(tmp_path, name):
    directory = tiny_models.write_model(tmp_path / name, name, tie_word_embeddings=True)
    tied = reference_decoder.logits(open_weights(directory), TOKENS)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, path)
    assert open_weights(directory).spec.tied_embeddings
    save_file(tensors | {"lm_head.weight": np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)}, path)
    weights = open_weights(directory)
    assert not weights.spec.tied_embeddings
    assert np.allclose(reference_decoder.logits(weights, TOKENS), np.roll(tied, 1, axis=1), atol=1e-4)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"][:-1]}, path)
    with pytest.raises(ModelRefused, match=r"lm_head\.weight has the shape"):
        open_weights(directory, heads_only=True)


@pytest.mark.reference
@pytest.mark.filterwarnings("default")  # theirs
def test_transformers_uses_that_output_layer_too(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch==2.13.0")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    directory = tiny_models.write_model(tmp_path / "llama3", "llama3")
    tensors = load_file(directory / "model.safetensors")
    other = np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)
    save_file(tensors | {"lm_head.weight": other}, directory / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(reference_decoder.logits(open_weights(directory), TOKENS) - theirs).max() < 2e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"])
def test_every_key_that_transformers_computes_with_is_read(family, monkeypatch):
    """A key that their class reads and ours does not would be passed over."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = set(re.findall(r"\bconfig\.(\w+)", inspect.getsource(module))) - HARMLESS
    read: set[str] = set()

    class Recorder(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

    plain = ConfigReader
    monkeypatch.setattr(hf_config, "ConfigReader", lambda values, where: plain(Recorder(values), where))
    kinds = ["full_attention", "sliding_attention"] * 2
    read_spec(tiny_models.config_of(family, layer_types=kinds, sliding_window=16), "config.json")
    decided = {"hidden_act"} if family == "gemma" else set()  # hf_config says why
    assert theirs - read - decided == set()


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_weight_that_is_no_number_is_named(tmp_path, kind, number):
    name = "model.layers.1.mlp.up_proj.weight"
    directory = tiny_models.write_model(tmp_path / "m", "llama")
    tensors = load_file(directory / "model.safetensors")
    tensors[name][3, 7] = number
    if kind == "BF16":
        raw = {key: (value.view(np.uint32) >> 16).astype(np.uint16) for key, value in tensors.items()}
        tiny_models.save_bfloat16(raw, directory / "model.safetensors")
    else:
        tiny_models.save_mixed(tensors, directory / "model.safetensors", dict.fromkeys(tensors, kind))
    weights = open_weights(directory)
    weights.tensor("1.gate")
    what = "NaN" if np.isnan(number) else "an infinity"
    with pytest.raises(ModelRefused, match=rf"model\.safetensors: the tensor {name}: it holds {what}"):
        weights.tensor("1.up")


def test_an_index_that_was_left_beside_a_whole_file_is_not_read(tmp_path: Path):
    """transformers reads model.safetensors where it is there."""
    directory = tiny_models.write_model(tmp_path / "m", "llama", shards=2)
    expected = open_weights(directory).tensor("3.down").values
    whole = tiny_models.write_model(tmp_path / "whole", "llama")
    (directory / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes())
    for part in directory.glob("model-*.safetensors"):
        part.unlink()
    assert directory / "model.safetensors.index.json" not in model_files(directory)
    assert np.array_equal(open_weights(directory).tensor("3.down").values, expected)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelRefused, match="names no safetensors files"):
        model_files(directory)
