"""Weights in another number format than the file's: what the runtimes hold then, and that exactness stays."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from adapters import registry
from adapters.conformance.case import exact_class
from adapters.contract import Adapter, LoadedModel, LoadOptions, Precision, Segment, Unsupported, silent
from adapters.decoder.gguf_blocks import exact_matrix, matrix_in_8_bits
from adapters.decoder.source import open_source
from adapters.decoder.spec import Dense, Grouped
from adapters.hf_directory import open_weights
from adapters.invariance import find_variance
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.variant import Variant
from tests.support import reference_decoder, tiny_models
from tests.support.tiny_gguf import Tiny, write

Kind = GGMLQuantizationType
LENGTH = 60


def raw(packed: np.ndarray) -> np.ndarray:
    return np.frombuffer(packed.tobytes(), np.uint8)


def random_rows() -> np.ndarray:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((24, 512)).astype(np.float32)
    rows[3, :64] += 40  # blocks whose zero lies far outside their values
    rows[5, 32:64] = 0.75  # a block of one value
    rows[6, :32] = 0.0
    return rows


def test_8_bits_hold_the_exact_values_of_q4_1_to_a_twentieth_of_a_step():
    packed = quantize(random_rows(), Kind.Q4_1)
    tensor = matrix_in_8_bits(int(Kind.Q4_1), raw(packed), 24)
    assert isinstance(tensor, Grouped)
    assert tensor.bits == 8
    expected = dequantize(packed, Kind.Q4_1).reshape(24, -1, 32)
    moved = np.abs(tensor.float32().reshape(expected.shape) - expected).max(axis=2)
    steps = np.ptp(expected, axis=2) / 15
    near = (steps > 0) & (np.abs(expected).max(axis=2) <= 16 * steps)  # where 0 lies among the values
    assert (moved <= steps / 20)[near].all()
    assert np.median(moved[near] / steps[near]) < 0.01
    assert (moved <= np.abs(expected).max(axis=2) / 200).all()  # and far from them


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_8_bits_keep_every_value_of_formats_without_offsets(kind):
    packed = quantize(random_rows(), kind)
    tensor = matrix_in_8_bits(int(kind), raw(packed), 24)
    assert isinstance(tensor, Grouped)
    assert tensor.bits == 8
    assert np.array_equal(tensor.float32(), dequantize(packed, kind).reshape(24, 512).astype(np.float32))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_exact_values_are_the_librarys(kind):
    packed = quantize(random_rows(), kind)
    tensor = exact_matrix(int(kind), raw(packed), 24)
    assert np.array_equal(tensor.float32(), dequantize(packed, kind).reshape(24, 512).astype(np.float32))


def test_a_four_bit_file_keeps_its_four_bits_and_gives_all_formats(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    write(path, Tiny("qwen3", kind=Kind.Q4_1, qk_norm=True))
    kept = open_source(path, Precision.INT4).tensor("0.gate")
    assert isinstance(kept, Grouped)
    assert kept.bits == 4
    assert open_source(path, Precision.INT8).label == "int8 (from Q4_1)"
    for precision, kind in ((Precision.FP32, "f4"), (Precision.FP16, "f2"), (Precision.BF16, "u2")):
        weights = open_source(path, precision)
        tensor = weights.tensor("0.gate")
        assert isinstance(tensor, Dense)
        assert tensor.values.dtype == np.dtype(kind)
        assert weights.label == f"{precision} (from Q4_1)"


def load_variant(adapter: Adapter, directory: Path, shared_store: Path, weights: Precision | None) -> LoadedModel:
    file = resolve(str(directory), Path())
    prepared = ModelStore(shared_store).prepare(file, Variant(adapter, weights), silent)
    options = LoadOptions(
        activations=Precision.FP32, kv_cache_bytes=32 << 20, slots=4, max_batch_rows=128, device="CPU"
    )
    chosen = exact_class(adapter, prepared, options)
    return adapter.load(prepared, dataclasses.replace(options, numerical_class=chosen), silent)


@pytest.mark.parametrize(
    ("name", "weights", "label", "most_error"),
    [
        ("openvino_rt", Precision.FP32, "fp32 (from bf16)", 0.005),
        # Random weights are the worst case, and activations are quantised to 8 bits in front of these products.
        ("openvino_rt", Precision.INT8, "int8 (from bf16)", 0.2),
        ("openvino_rt", Precision.INT4, "int4 (from bf16)", 0.9),
        ("onnx_rt", None, "fp32 (from bf16)", 0.005),
        ("onnx_rt", Precision.FP32, "fp32 (from bf16)", 0.005),
        ("onnx_rt", Precision.INT8, "int8 (from bf16)", 0.2),
        ("onnx_rt", Precision.INT4, "int4 (from bf16)", 0.9),
        ("torch_device", Precision.INT8, "int8 (from bf16)", 0.2),
        ("torch_device", Precision.INT4, "int4 (from bf16)", 0.9),
    ],
)
def test_every_variant_computes_the_model_as_well_as_its_bits_allow(
    tmp_path: Path, shared_store: Path, name: str, weights: Precision | None, label: str, most_error: float
):
    directory = tiny_models.write_model(tmp_path / "tiny", "llama3", kind="BF16")
    tokens = [int(token) for token in np.random.default_rng(5).integers(4, 260, LENGTH)]
    expected = reference_decoder.logits(open_weights(directory), tokens)
    model = load_variant(registry.get(name), directory, shared_store, weights)
    logits = model.forward([Segment(0, 0, tokens, (0, LENGTH))]).logits
    error = float(np.sqrt(np.mean((logits - expected) ** 2)) / expected.std())
    assert error < most_error
    if weights is Precision.INT4:
        assert error > 0.01  # it is not the full model under another name
    # In float32 torch's kernels over few bits are slow, and the weights are widened.
    widened = name == "torch_device" and model.capabilities.activations is Precision.FP32
    assert model.capabilities.weights == (f"{label}, held in fp32" if widened else label)
    assert find_variance(model) == ""
    model.close()


def test_variants_are_artefacts_of_their_own(tmp_path: Path, shared_store: Path):
    directory = tiny_models.write_model(tmp_path / "tiny", "llama3", kind="BF16")  # as above: they are made by now
    store, file = ModelStore(shared_store), resolve(str(directory), Path())
    for name in ("openvino_rt", "onnx_rt", "torch_device"):
        made = {
            store.prepare(file, Variant(registry.get(name), weights), silent)
            for weights in (None, Precision.INT8, Precision.INT4)
        }
        assert len(made) == 3
        sizes = sorted(sum(path.stat().st_size for path in directory.iterdir()) for directory in made)
        assert sizes[0] < sizes[1] < sizes[2]


def test_what_a_runtime_cannot_hold_is_refused_by_name(tmp_path: Path, shared_store: Path):
    directory = tiny_models.write_model(tmp_path / "tiny", "llama", kind="F32")
    adapter = registry.get("onnx_rt")
    with pytest.raises(Unsupported, match="fp32, int8 or int4"):
        ModelStore(shared_store).prepare(resolve(str(directory), Path()), Variant(adapter, Precision.FP16), silent)
