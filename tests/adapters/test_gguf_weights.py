"""The GGUF reader: blocks against the gguf library, whole tiny models against a reference in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from adapters.contract import ModelRefused
from adapters.decoder.from_gguf import GgufWeights
from adapters.decoder.gguf_blocks import matrix
from adapters.decoder.spec import Grouped
from tests.support.tiny_gguf import Tiny, write

Kind = GGMLQuantizationType


def random_rows(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((24, 512)) * rng.uniform(0.1, 3, (24, 1))).astype(np.float32)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_kept_formats_keep_every_value(kind):
    packed = quantize(random_rows(), kind)
    found = matrix(int(kind), np.frombuffer(packed.tobytes(), np.uint8), 24)
    assert np.array_equal(found.float32(), dequantize(packed, kind).reshape(24, 512).astype(np.float32))


def test_q4_1_keeps_values_and_scales_and_moves_offsets_by_half_a_step_at_most():
    packed = quantize(random_rows(), Kind.Q4_1)
    found = matrix(3, np.frombuffer(packed.tobytes(), np.uint8), 24)
    assert isinstance(found, Grouped)
    moved = np.abs(found.float32() - dequantize(packed, Kind.Q4_1).reshape(24, 512))
    assert (moved <= np.repeat(found.scales.astype(np.float32), 32, axis=1) * 0.501 + 1e-6).all()
    assert found.values.max() == 15
    assert (found.zeros < 16).all()


def test_q4_1_keeps_a_constant_block_as_it_is():
    packed = quantize(np.full((2, 32), 0.75, np.float32), Kind.Q4_1)
    assert np.array_equal(matrix(3, np.frombuffer(packed.tobytes(), np.uint8), 2).float32(), np.full((2, 32), 0.75))


def test_other_formats_are_quantised_again_to_8_bits():
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (4, 2 * 210), dtype=np.uint8)  # Q6_K: 256 elements in 210 bytes, f16 scale at the end
    raw.reshape(4, 2, 210)[:, :, 208:] = np.full((4, 2), 0.01, np.float16).view(np.uint8).reshape(4, 2, 2)
    expected = dequantize(raw, Kind.Q6_K).reshape(4, 512)
    found = matrix(int(Kind.Q6_K), raw.reshape(-1), 4)
    assert isinstance(found, Grouped)
    assert found.bits == 8
    most = np.abs(expected.reshape(4, -1, 32)).max(axis=2, keepdims=True)
    assert (np.abs(found.float32().reshape(4, -1, 32) - expected.reshape(4, -1, 32)) <= most * 0.0051).all()


def test_labels_say_what_was_kept_and_what_was_not(tmp_path):
    for kind, label in ((Kind.Q4_0, "int4 (Q4_0)"), (Kind.F32, "fp32"), (Kind.Q5_0, "int8 (requantised from Q5_0)")):
        path = tmp_path / f"{kind.name}.gguf"
        write(path, Tiny("llama", kind=kind))
        assert GgufWeights(path).label == label


def test_the_spec_is_read_from_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, Tiny("qwen3", qk_norm=True, tied=True, rope_factors=True))
    spec = GgufWeights(path).spec
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.hidden, spec.mlp) == (4, 2, 32, 96, 128)
    assert (spec.layers, spec.vocabulary_size, spec.context_length) == (2, 64, 128)
    assert spec.tied_embeddings
    assert spec.qk_norm
    assert not spec.qkv_bias
    assert spec.ropes[0].inverse_frequencies[-1] == pytest.approx(10000.0 ** (-15 / 16) / 8)


@pytest.mark.parametrize(
    ("family", "metadata", "reason"),
    [
        ("mamba", {}, "architecture 'mamba' is not one of llama"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"rope.scaling.type": "yarn"}, "'yarn'"),
        ("llama", {"rope.dimension_count": 16}, "turns 16 dimensions"),
        ("llama", {"attention.value_length": 16}, "differ in size"),
        ("llama", {"attention.head_count": 8}, "has the shape"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name_and_reason(tmp_path, family, metadata, reason):
    path = tmp_path / "odd.gguf"
    write(path, Tiny(family), metadata)
    with pytest.raises(ModelRefused, match=rf"odd\.gguf.*{reason}"):
        GgufWeights(path).tensor("0.query")


def test_a_tensor_that_nobody_would_read_is_refused(tmp_path):
    path = tmp_path / "odd.gguf"
    write(path, Tiny("llama"), extra={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelRefused, match=r"odd\.gguf.*blk\.0\.attn_sinks\.weight"):
        GgufWeights(path)


def test_a_missing_tensor_is_named(tmp_path: Path):
    path = tmp_path / "m.gguf"
    write(path, Tiny("llama", tied=True))
    with pytest.raises(ModelRefused, match=r"m\.gguf.*lacks the tensor output\.weight"):
        GgufWeights(path).tensor("head")
