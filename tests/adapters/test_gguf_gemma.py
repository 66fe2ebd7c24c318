"""Gemma 3 from a GGUF file is the same decoder as from its Hugging Face directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from adapters.contract import ModelRefused
from adapters.decoder.from_gguf import GgufWeights
from adapters.hf_directory import open_weights
from adapters.model_checks import check_files
from tests.support import reference_decoder, tiny_models
from tests.support.tiny_gguf import Tiny, add_value, write

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Files of llama.cpp do not state them: six layers a period, and the scale of queries follows the head's size.
SLIDING, FULL = "sliding_attention", "full_attention"
CHANGES: dict[str, Any] = {"sliding_window_pattern": 6, "num_hidden_layers": 7, "query_pre_attn_scalar": 32}


def write_gguf(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], metadata: dict[str, Any] | None = None
) -> Path:
    """Write a Gemma 3 as llama.cpp's converter does: other names, and norms as what is multiplied with."""
    writer = GGUFWriter(str(path), "gemma3")
    for key, value in {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base": config["rope_theta"],
        **(metadata or {}),
    }.items():
        if value is not None:
            add_value(writer, f"gemma3.{key}", value)
    writer.add_string("gemma3.rope.scaling.type", "linear")
    writer.add_float32("gemma3.rope.scaling.factor", config["rope_scaling"]["factor"])
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    for name, values in tensors.items():
        writer.add_tensor(_rename_tensor(name), values + np.float32(1.0) if "norm" in name else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rename_tensor(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if not layer.isdigit():
        return name
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("gemma")
    config = tiny_models.config_of("gemma3", **CHANGES)
    model = tiny_models.write_model(directory / "hf", "gemma3", **CHANGES)
    return model, write_gguf(directory / "m.gguf", config, tiny_models.tensors_of(config))


def test_both_files_give_the_same_decoder(pair):
    directory, file = pair
    expected, weights = open_weights(directory), GgufWeights(file)
    assert weights.spec.windows == (16, 16, 16, 16, 16, 0, 16)
    assert weights.spec.query_scale == pytest.approx(expected.spec.query_scale)
    assert replace(weights.spec, norm_epsilon=1e-6, query_scale=32**-0.5, ropes=expected.spec.ropes) == expected.spec
    for ours, theirs in zip(weights.spec.ropes, expected.spec.ropes, strict=True):
        assert np.allclose(ours.inverse_frequencies, theirs.inverse_frequencies, rtol=1e-6)
    for name in ("embedding", "final_norm", "0.query", "5.key_norm", "6.post_mlp_norm", "3.post_attention_norm"):
        assert np.array_equal(weights.tensor(name).float32(), expected.tensor(name).float32())


@pytest.mark.parametrize(
    ("metadata", "changes"),
    [
        ({"rope.freq_base_swa": 5000.0}, {"rope_local_base_freq": 5000.0}),
        ({"final_logit_softcapping": 6.0}, {"final_logit_softcapping": 6.0}),
        ({"final_logit_softcapping": 0.0}, {}),
        ({"attention.sliding_window_pattern": 3}, {"sliding_window_pattern": 3}),
        ({"attention.sliding_window_pattern": 1}, {"sliding_window_pattern": 1}),
        (
            {"attention.sliding_window_pattern": [True, False, True, True, False, False, True]},
            {"layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, FULL, SLIDING]},
        ),
        ({"attention.sliding_window": 0}, {"layer_types": [FULL] * 7}),
        ({"rope.local.freq_base": 5000.0}, {"rope_local_base_freq": 5000.0}),
        ({"rope.freq_base": None, "rope.global.freq_base": 5e5}, {"rope_theta": 5e5}),
        ({"rope.global.freq_base": 7.0, "rope.freq_base_swa": 5000.0}, {"rope_local_base_freq": 5000.0}),
        ({"mm.tokens_per_image": 256, "vision.block_count": 27, "vision.attention.layer_norm_epsilon": 1e-6}, {}),
    ],
)
def test_what_a_file_says_beyond_the_usual_is_applied(tmp_path, metadata, changes):
    directory = tiny_models.write_model(tmp_path / "hf", "gemma3", **(CHANGES | changes))
    config = tiny_models.config_of("gemma3", **CHANGES)
    file = write_gguf(tmp_path / "m.gguf", config, tiny_models.tensors_of(config), metadata)
    tokens = [int(token) for token in np.random.default_rng(3).integers(4, 260, 40)]
    expected = reference_decoder.logits(open_weights(directory), tokens)
    logits = reference_decoder.logits(GgufWeights(file), tokens)
    assert np.abs(logits - expected).max() < 2e-3 * expected.std()
    plain = reference_decoder.logits(GgufWeights(write_gguf(file, config, tiny_models.tensors_of(config))), tokens)
    assert (np.abs(logits - plain).max() > 0.01 * expected.std()) == bool(changes)


def test_keys_of_the_half_that_sees_are_harmless_to_gemma_alone(tmp_path):
    for key in ("mm.tokens_per_image", "vision.block_count", "rope.global.freq_base"):
        write(tmp_path / "m.gguf", Tiny("llama", layers=1), {key: 256})
        with pytest.raises(ModelRefused, match=rf"llama\.{key}"):
            check_files(tmp_path / "m.gguf", adapter="openvino_rt")


def test_a_tensor_of_the_half_that_sees_is_refused(tmp_path, pair):
    config = tiny_models.config_of("gemma3", **CHANGES)
    for name in ("v.patch_embd.weight", "mm.input_projection.weight"):
        tensors = tiny_models.tensors_of(config) | {name: np.ones((2, 2), np.float32)}
        with pytest.raises(ModelRefused, match=name):
            check_files(
                write_gguf(tmp_path / "m.gguf", config, tensors, {"vision.block_count": 27}), adapter="openvino_rt"
            )


def test_a_norm_that_is_missing_is_named(pair):
    with pytest.raises(ModelRefused, match=r"lacks the tensor blk\.7"):
        GgufWeights(pair[1]).tensor("7.post_mlp_norm")
