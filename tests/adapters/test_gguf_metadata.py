"""What a GGUF file's metadata says of the computation is applied as llama.cpp does, or refused by its name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from adapters.contract import ModelRefused
from adapters.decoder.from_gguf import GgufWeights
from adapters.decoder.hf_config import read_spec
from adapters.decoder.spec import DecoderSpec
from adapters.model_checks import check_files
from tests.support import reference_decoder, tiny_models
from tests.support.tiny_gguf import Tiny, logits, write

LLAMA = Tiny("llama", vocabulary=32)
TOKENS = [3, 9, 30, 1, 7, 7, 20, 5, 2, 11]
ODD_VALUES = ["x", -1, 0, 2**31, math.nan, math.inf, -1.5, True, False, [], [1, 2], ["x"], [1.5]]


def write_file(path: Path, tiny: Tiny = LLAMA, **metadata: Any) -> Path:
    known = {key: metadata.pop(key) for key in list(metadata) if value_is_signed(metadata[key])}
    write(path, tiny, metadata | {key: float(value) for key, value in known.items()})
    return path


def check_decoder(path: Path) -> DecoderSpec:
    """Check a file for our own graphs, whatever else runs here."""
    spec = check_files(path, adapter="openvino_rt")
    assert isinstance(spec, DecoderSpec)
    return spec


def value_is_signed(value: Any) -> bool:
    """A negative number has no place in the unsigned integers that files have."""
    return type(value) is int and value < 0


@pytest.mark.parametrize(
    ("metadata", "divisor", "magnitude"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0, 1.0),
        ({"rope.scale_linear": 2.0}, 2.0, 1.0),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4.0, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0, 1.0),
        ({"rope.scaling.attn_factor": 1.5}, 1.0, 1.5),
        ({"rope.scaling.factor": 3.0, "rope.scaling.attn_factor": 0.5}, 3.0, 0.5),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scalings_of_the_rope_are_applied(tmp_path, family, metadata, divisor, magnitude):
    tiny = Tiny(family, vocabulary=32)
    arrays = write(tmp_path / "m.gguf", tiny, metadata)
    scaled = arrays | {"rope_freqs.weight": np.full(tiny.head_dim // 2, divisor, np.float32)}
    for name in arrays:
        if name.endswith("attn_q.weight"):
            scaled[name] = arrays[name] * np.float32(magnitude**2)  # of queries and keys both
    expected = logits(tiny, scaled, TOKENS)
    found = reference_decoder.logits(GgufWeights(tmp_path / "m.gguf"), TOKENS)
    assert np.abs(found - expected).max() < 1e-3 * expected.std()
    changed = (divisor, magnitude) != (1.0, 1.0)
    assert (np.abs(expected - logits(tiny, arrays, TOKENS)).max() > 0.01 * expected.std()) == changed


@pytest.mark.parametrize("attention_factor", [None, 1.25])
def test_yarn_is_what_config_json_means_by_it(tmp_path, attention_factor):
    path = write_file(
        tmp_path / "m.gguf",
        Tiny("qwen3", vocabulary=32, qk_norm=True, context=512),
        **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256},
        **({"rope.scaling.attn_factor": attention_factor} if attention_factor else {}),
    )
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    _, expected = read_spec(tiny_models.config_of("qwen3", rope_scaling=scaling), "config.json")
    decoder = check_decoder(path)
    assert decoder.context_length == expected.context_length == 1024
    assert decoder.ropes[0].inverse_frequencies == pytest.approx(expected.ropes[0].inverse_frequencies, rel=1e-6)
    assert decoder.ropes[0].magnitude == pytest.approx(expected.ropes[0].magnitude * (attention_factor or 1.0))


def test_a_context_that_yarn_extends_beyond_what_models_count_is_damage(tmp_path):
    damage = {"rope.scaling.type": "yarn", "rope.scaling.factor": 1e20, "rope.scaling.original_context_length": 256}
    with pytest.raises(ModelRefused, match=r"m\.gguf: .*qwen3\.rope.*extends the context to 256000"):
        check_decoder(write_file(tmp_path / "m.gguf", Tiny("qwen3", vocabulary=32, qk_norm=True), **damage))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("rope.scaling.yarn_log_multiplier", 0.1), ("rope.scaling.yarn_beta_fast", 16.0), ("logit_scale", 8.0)],
        *[("attention.scale", 0.05), ("attention.causal", False), ("attention.clamp_kqv", 8.0)],
        *[("attention.shared_kv_layers", 2), ("attention.scale", 0.17), ("nextn_predict_layers", 1)],
        *[("final_logit_softcapping", 30.0), ("attention.sliding_window_pattern", 6), ("rope.freq_base_swa", 1e4)],
        *[("attn_logit_softcapping", 50.0), ("expert_count", 8), ("a.key.of.tomorrow", 1), ("embedding_scale", 12.0)],
        *[("rope.dimension_sections", [16, 24, 24, 0]), ("residual_scale", 0.2), ("attention.head_count", [4, 2])],
        *[("rope.scaling.type", "longrope"), ("attention.key_length", 64), ("attention.value_length", 64)],
    ],
)
def test_what_would_be_passed_over_is_refused_by_its_name(tmp_path, key, value):
    with pytest.raises(ModelRefused, match=rf"m\.gguf: .*llama\.{key}\b"):
        check_decoder(write_file(tmp_path / "m.gguf", **{key: value}))


def test_keys_of_real_files_that_change_nothing_are_taken(tmp_path):
    general = ("name", "basename", "size_label", "license", "author", "url", "quantized_by", "description")
    known: dict[str, Any] = {f"general.{key}": "text" for key in general}
    known |= {"general.type": "model", "general.file_type": 7}
    known |= {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.tags": ["a"], "split.count": 1}
    known |= {"quantize.imatrix.file": "x.dat", "imatrix.chunk_count": 7, "unsloth.version": "1"}
    known |= {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.add_bos_token": False}
    known |= {"vocab_size": 32, "rope.scaling.finetuned": True, "tensor_data_layout": "Meta AI original pth"}
    known |= {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.yarn_beta_slow": 1.0}
    spec = check_decoder(write_file(tmp_path / "m.gguf", **known))
    assert spec == check_decoder(write_file(tmp_path / "plain.gguf"))


@pytest.mark.parametrize(
    "values",
    [
        {"rope.scaling.original_context_length": 0, "rope.scaling.attn_factor": 0.0},
        {"expert_weights_scale": 0.0, "expert_weights_norm": False, "expert_gating_func": 0},
        {"expert_group_used_count": 0, "attention.shared_kv_layers": 0},
        {"expert_feed_forward_length": 768, "expert_used_count": 8, "expert_weights_norm": True},
        {"expert_count": 0, "expert_used_count": 2, "expert_gating_func": 2},
        {"attention.scale": 1 / math.sqrt(32)},
        {"attention.scale": 0.0},
        {"rope.dimension_count_swa": 32, "attention.key_length_swa": 32, "attention.value_length_swa": 32},
        {"rope.dimension_count_swa": 8, "attention.key_length_swa": 9, "attention.value_length_swa": 7},
        {"pooling_type": 3},
    ],
)
def test_known_keys_that_say_what_is_computed_anyway_are_taken(tmp_path, values):
    assert check_decoder(write_file(tmp_path / "m.gguf", **values)) == check_decoder(
        write_file(tmp_path / "plain.gguf")
    )


@pytest.mark.parametrize("key", ["rope.dimension_count_swa", "attention.key_length_swa", "attention.value_length_swa"])
def test_other_heads_are_refused_where_layers_slide(tmp_path, key):
    window: dict[str, Any] = {"attention.sliding_window": 16}
    assert check_decoder(write_file(tmp_path / "m.gguf", **(window | {key: 32}))).windows == (16, 16)
    with pytest.raises(ModelRefused, match=rf"llama\.{key}"):
        check_decoder(write_file(tmp_path / "m.gguf", **(window | {key: 16})))


def test_what_llama_cpp_loads_is_loaded(tmp_path):
    tiny = Tiny("llama", vocabulary=32, hidden=128)  # heads of 32, which is 128 / 4
    plain = check_decoder(write_file(tmp_path / "plain.gguf", tiny))
    for changes in (
        {"attention.value_length": None},
        {"attention.key_length": None},
        {"attention.key_length": None, "attention.value_length": None},
        {"attention.head_count_kv": [2, 2]},
        {"attention.head_count": [4, 4], "feed_forward_length": [128, 128]},
    ):
        assert check_decoder(write_file(tmp_path / "m.gguf", tiny, **changes)) == plain


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_no_value_of_a_key_is_more_than_refused(tmp_path, family):
    """Files are damaged, or written by hand: whatever stands there, the answer names the file and is no crash."""
    tiny = Tiny(family, vocabulary=32, layers=1, hidden=32, mlp=32, qk_norm=family == "qwen3", bias=family == "llama")
    keys = ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]
    keys += ["attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"]
    keys += ["rope.freq_base", "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.scale_linear"]
    keys += [f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "attn_factor")]
    keys += ["expert_count", "general.type", "general.alignment", "split.count", "tokenizer.ggml.tokens"]
    refusals = [find_refusal(write_file(tmp_path / "m.gguf", tiny, **{key: odd})) for key in keys for odd in ODD_VALUES]
    refused = [refusal for refusal in refusals if refusal]
    assert [refusal for refusal in refused if not refusal.startswith("m.gguf: ") or "\n" in refusal] == []
    assert len(refused) > len(refusals) * 0.6


def find_refusal(path: Path) -> str:
    try:
        check_decoder(path)
    except ModelRefused as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("left_out", "shape"),
    [
        *[("blk.1.attn_v.weight", None), ("output_norm.weight", None), ("token_embd.weight", None)],
        *[("blk.1.ffn_down.weight", (96, 64)), ("rope_freqs.weight", (3,)), ("output.weight", (32, 96, 1))],
    ],
)
def test_tensors_that_are_missing_or_of_another_shape_are_named(tmp_path, left_out, shape):
    other = None if shape is None else np.ones(shape, np.float32)
    write(tmp_path / "m.gguf", LLAMA, extra={left_out: other})
    with pytest.raises(ModelRefused, match=rf"m\.gguf: .*{left_out}"):
        check_decoder(tmp_path / "m.gguf")


KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", ["kept", "whole zeros", "8 bits", "exact"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_named(tmp_path, kind, values, number):
    tiny = Tiny("llama", vocabulary=32, layers=1, kind=GGMLQuantizationType[kind])
    write(tmp_path / "m.gguf", tiny)
    weights = GgufWeights(tmp_path / "m.gguf", values)
    weights.tensor("0.up")
    spoil(tmp_path / "m.gguf", "blk.0.ffn_up.weight", number)
    with pytest.raises(ModelRefused, match=r"m\.gguf: the tensor blk\.0\.ffn_up\.weight: it holds (NaN|an infinity)"):
        GgufWeights(tmp_path / "m.gguf", values).tensor("0.up")


def spoil(path: Path, name: str, number: float) -> None:
    """Write a number, or a scale of it, over the first of a tensor's."""
    from adapters.gguf_header import read_header

    header = read_header(path)
    tensor = next(tensor for tensor in header.tensors if tensor.name == name)
    kind = GGMLQuantizationType(tensor.kind).name
    raw = np.array([number], np.float32).tobytes()[2:] if kind == "BF16" else np.array([number], np.float16).tobytes()
    raw = np.array([number], np.float32).tobytes() if kind == "F32" else raw
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(raw)
