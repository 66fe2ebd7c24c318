"""The GGUF reader: blocks against the gguf library, whole tiny models against a reference in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from adapters.contract import ModelRefused
from adapters.decoder.from_gguf import GgufWeights
from adapters.decoder.gguf_blocks import label_of, matrix, matrix_with_whole_zeros
from adapters.decoder.source import open_source
from adapters.decoder.spec import Grouped, Tensor
from device_profiles.profile import FAST
from tests.support.tiny_gguf import Tiny, write

Kind = GGMLQuantizationType


def random_rows(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((24, 512)) * rng.uniform(0.1, 3, (24, 1))).astype(np.float32)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_kept_formats_keep_every_value(kind):
    packed = quantize(random_rows(), kind)
    tensor = matrix(int(kind), np.frombuffer(packed.tobytes(), np.uint8), 24)
    assert np.array_equal(tensor.float32(), dequantize(packed, kind).reshape(24, 512).astype(np.float32))


def k_blocks(kind: GGMLQuantizationType, *halves: int) -> np.ndarray:
    """Random blocks of 256 elements, 4 rows of 2; bytes at `halves` are their float16 scales."""
    size = {Kind.Q4_K: 144, Kind.Q5_K: 176, Kind.Q6_K: 210}[kind]
    raw = np.random.default_rng(1).integers(0, 256, (4, 2, size), dtype=np.uint8)
    for at in halves:
        raw[:, :, at : at + 2] = np.full((4, 2), 0.01, np.float16).view(np.uint8).reshape(4, 2, 2)
    return raw.reshape(4, -1)


def measure_errors(packed: np.ndarray, kind: GGMLQuantizationType, tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Each group's largest error and its step, (rows, groups) both."""
    expected = dequantize(packed, kind).reshape(len(packed), -1, 32)
    ordered = np.diff(np.sort(expected, axis=2), axis=2)
    step = np.where(ordered > 1e-4 * np.abs(expected).max(), ordered, np.inf).min(axis=2)
    return np.abs(tensor.float32().reshape(expected.shape) - expected).max(axis=2), step


@pytest.mark.parametrize(
    ("kind", "most"),
    [(Kind.Q4_1, 1 / 16), (Kind.Q4_K, 1 / 16), (Kind.Q5_0, 1 / 8), (Kind.Q5_1, 1 / 8), (Kind.Q5_K, 1 / 8)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_offsets_that_are_no_whole_steps_are_kept_to_a_fraction_of_a_step(kind, most):
    packed = k_blocks(kind, 0, 2) if kind.name.endswith("K") else quantize(random_rows(), kind)
    tensor = matrix(int(kind), np.frombuffer(packed.tobytes(), np.uint8), len(packed))
    assert isinstance(tensor, Grouped)
    assert tensor.bits == 8
    assert (tensor.zeros == 128).all()  # signed values without zeros: what every runtime multiplies fastest
    error, step = measure_errors(packed, kind, tensor)
    assert (error <= most * step + 1e-6).all()
    assert np.median(error / step) < most / 3


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q4_K], ids=lambda kind: kind.name)
def test_with_whole_zeros_offsets_move_by_half_a_step_at_most(kind):
    packed = k_blocks(kind, 0, 2) if kind is Kind.Q4_K else quantize(random_rows(), kind)
    tensor = matrix_with_whole_zeros(int(kind), np.frombuffer(packed.tobytes(), np.uint8), len(packed))
    assert isinstance(tensor, Grouped)
    assert tensor.bits == 4
    assert tensor.values.max() == 15
    assert (tensor.zeros < 16).all()
    error, step = measure_errors(packed, kind, tensor)
    near = tensor.zeros.astype(int) % 15 > 0  # 0 lies among the values
    assert (error <= step * 0.51 + 1e-6)[near].all()
    assert near.mean() > 0.5
    assert np.median(error[near] / step[near]) > 0.1


@pytest.mark.parametrize("reader", [matrix, matrix_with_whole_zeros])
def test_q4_1_keeps_a_constant_block_as_it_is(reader):
    packed = quantize(np.full((2, 32), 0.75, np.float32), Kind.Q4_1)
    values = reader(3, np.frombuffer(packed.tobytes(), np.uint8), 2).float32()
    assert values == pytest.approx(np.full((2, 32), 0.75), rel=1e-3)


def test_two_lattices_in_a_group_are_quantised_again_to_8_bits():
    raw = k_blocks(Kind.Q6_K, 208)  # 16 values share a scale
    expected = dequantize(raw, Kind.Q6_K).reshape(4, 512)
    tensor = matrix(int(Kind.Q6_K), raw.reshape(-1), 4)
    assert isinstance(tensor, Grouped)
    assert tensor.bits == 8
    most = np.abs(expected.reshape(4, -1, 32)).max(axis=2, keepdims=True)
    assert (np.abs(tensor.float32().reshape(4, -1, 32) - expected.reshape(4, -1, 32)) <= most * 0.0051).all()


def test_labels_say_what_was_kept_and_what_was_not(tmp_path):
    for kind, label, fast in (
        (Kind.Q4_0, "int4 (Q4_0)", "int4 (Q4_0)"),
        (Kind.Q4_1, "int8 (Q4_1's values)", "int4 (Q4_1, zero points rounded to integers)"),
        (Kind.F32, "fp32", "fp32"),
        (Kind.Q5_0, "int8 (Q5_0's values)", "int8 (Q5_0's values)"),
    ):
        path = tmp_path / f"{kind.name}.gguf"
        write(path, Tiny("llama", kind=kind))
        assert GgufWeights(path).label == label
        assert GgufWeights(path, "whole zeros").label == fast
        assert open_source(path, FAST).label == fast


def test_a_label_names_what_was_rounded_in_a_file_of_several_types():
    assert label_of(int(Kind.Q5_0), [int(Kind.Q4_K)]) == "int8 (Q5_0's values), zero points of Q4_K rounded to integers"
    assert label_of(int(Kind.Q6_K)) == "int8 (requantised from Q6_K)"


def test_what_a_file_takes_once_it_is_held(tmp_path):
    sizes = {}
    for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0):
        path = tmp_path / f"{kind.name}.gguf"
        write(path, Tiny("llama", kind=kind))
        sizes[kind] = GgufWeights(path).held_bytes
    assert sizes[Kind.Q4_0] < sizes[Kind.Q8_0] < sizes[Kind.Q4_1] < 1.1 * sizes[Kind.Q8_0]


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
        ("mamba", {}, "architecture: 'mamba' is not one of llama"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope'"),
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
