"""Every family of Hugging Face models computes on OpenVINO what its formulas say."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import openvino
import pytest
from openvino import opset13 as ops

from adapters import registry
from adapters.contract import LoadedModel, LoadOptions, ModelRefused, Precision, Segment, silent
from adapters.decoder.spec import Dense, Grouped, Tensor
from adapters.hf_directory import open_weights
from adapters.invariance import find_variance
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.openvino_rt.constants import Constants
from adapters.openvino_rt.convert import MODEL_FILE
from adapters.openvino_rt.graph import read_paged
from adapters.openvino_rt.ir_file import IrFile
from adapters.source_meter import SourceMeter
from tests.support import reference_decoder, tiny_models
from tests.support.model_rows import loads_models

FAMILIES = {name: architecture for name, architecture in tiny_models.ARCHITECTURES.items() if name != "gemma2"}
ON_ONNX = [
    *[("llama", "F32"), ("llama3", "BF16"), ("qwen2", "F16"), ("qwen3", "BF16")],
    *[("mistral", "F16"), ("gemma", "BF16"), ("gemma3", "F32"), ("gemma3", "BF16")],
]
LENGTH = 90  # longer than the tiny models' sliding window of 16


def load(
    directory: Path, shared_store: Path, activations: Precision = Precision.FP32, name: str = "openvino_rt"
) -> LoadedModel:
    adapter = registry.get(name)
    prepared = ModelStore(shared_store).prepare(resolve(str(directory), Path()), adapter, silent)
    options = LoadOptions(activations=activations, kv_cache_bytes=32 << 20, slots=4, max_batch_rows=128)
    return adapter.load(prepared, options, silent)


def tokens(count: int = LENGTH) -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(4, 260, count)]


@loads_models("openvino_rt", "safetensors", FAMILIES)
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, kind) for name in FAMILIES for kind in ("F32", "BF16")), ("llama3", "F16")]
)
def test_logits_are_those_of_the_formulas(tmp_path: Path, shared_store: Path, name: str, kind: str) -> None:
    directory = tiny_models.write_model(tmp_path / name, name, kind=kind, shards=2 if kind == "BF16" else 1)
    expected = reference_decoder.logits(open_weights(directory), tokens())
    model = load(directory, shared_store)
    first = model.forward([Segment(0, 0, tokens()[:70], (0, 70))]).logits.copy()
    rest = model.forward([Segment(1, 0, tokens(9), (0, 0)), Segment(0, 70, tokens()[70:], (0, 20))]).logits.copy()
    logits = np.concatenate([first, rest])
    # Keys and values are kept in 16 bits; everything else is float32.
    assert np.sqrt(np.mean((logits - expected) ** 2)) < 0.004 * expected.std()
    assert model.capabilities.weights == {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}[kind]
    assert find_variance(model) == ""
    model.close()


@loads_models("onnx_rt", "safetensors", {name: tiny_models.ARCHITECTURES[name] for name, _ in ON_ONNX})
@pytest.mark.parametrize(("name", "kind"), ON_ONNX)
def test_onnx_runtime_computes_the_same(tmp_path: Path, shared_store: Path, name: str, kind: str) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: outrider extras install onnx")
    directory = tiny_models.write_model(tmp_path / name, name, kind=kind)
    expected = reference_decoder.logits(open_weights(directory), tokens())
    model = load(directory, shared_store, name="onnx_rt")
    first = model.forward([Segment(0, 0, tokens()[:70], (0, 70))]).logits.copy()
    rest = model.forward([Segment(0, 70, tokens()[70:], (0, 20))]).logits
    logits = np.concatenate([first, rest])
    assert np.sqrt(np.mean((logits - expected) ** 2)) < 0.001 * expected.std()
    assert find_variance(model) == ""
    model.close()


def test_onnx_runtime_refuses_what_it_cannot_compute(tmp_path: Path, shared_store: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: outrider extras install onnx")
    with pytest.raises(ModelRefused, match="soft-capped attention"):
        load(tiny_models.write_model(tmp_path / "gemma2", "gemma2"), shared_store, name="onnx_rt")


def test_bfloat16_activations_stay_near(tmp_path: Path, shared_store: Path) -> None:
    """Angles are computed in float32 even then: at position 400, bfloat16 would not know one position from the next."""
    if Precision.BF16 not in registry.get("openvino_rt").devices()[0].precisions:
        pytest.skip("OpenVINO does not compute in bf16 natively on this processor")
    directory = tiny_models.write_model(tmp_path / "qwen3", "qwen3", kind="BF16")
    many = tokens(440)
    expected = reference_decoder.logits(open_weights(directory), many)
    model = load(directory, shared_store, Precision.BF16)
    for start in range(0, 440, 110):
        rows = model.forward([Segment(0, start, many[start : start + 110], (0, 110))]).logits
        error = np.sqrt(np.mean((rows - expected[start : start + 110]) ** 2))
        assert error < 0.05 * expected.std()
    model.close()


def test_16_bit_weights_are_not_widened_when_a_model_is_loaded(tmp_path: Path, shared_store: Path) -> None:
    directory = tiny_models.write_model(tmp_path / "gemma3", "gemma3", kind="BF16")
    adapter = registry.get("openvino_rt")
    prepared = ModelStore(shared_store).prepare(resolve(str(directory), Path()), adapter, silent)
    compiled = openvino.Core().compile_model(read_paged(prepared / MODEL_FILE), "CPU", {"KV_CACHE_PRECISION": "f16"})
    elements = [
        int(np.prod(list(node.get_output_shape(0))))
        for node in compiled.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].astype(str) == "Const"
        and node.get_output_element_type(0) == openvino.Type.f32
    ]
    assert elements  # norms, frequencies
    assert max(elements) <= 96  # no matrix among them


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_tensors_are_computed_as_they_are_written(tmp_path: Path, bits: Literal[4, 8]) -> None:
    rng = np.random.default_rng(3)

    def build_grouped(rows: int) -> Grouped:
        return Grouped(
            values=rng.integers(0, 2**bits, (rows, 64), dtype=np.uint8),
            scales=rng.uniform(0.01, 0.02, (rows, 2)).astype(np.float16),
            zeros=rng.integers(0, 2**bits, (rows, 2), dtype=np.uint8),
            bits=bits,
            group_size=32,
        )

    parts = [build_grouped(6), build_grouped(3)]
    full = Dense(rng.standard_normal((2, 64)).astype(np.float32))
    tensors: dict[str, Tensor] = {"first": parts[0], "second": parts[1], "dense": full}
    path, source = tmp_path / "product.xml", tmp_path / "source"
    source.write_bytes(bytes(1000))
    with IrFile(path.with_suffix(".bin"), SourceMeter(source, lambda done, total: None)) as file:
        constants = Constants(tensors.__getitem__, file)
        data = ops.parameter([2, 64], openvino.Type.f32)
        product = ops.matmul(data, constants.weight(["first", "second"]), False, True)
        file.save(openvino.Model([ops.result(product)], [data], "product"), path)
        with pytest.raises(ValueError, match="different formats"):
            constants.weight(["first", "dense"])
    values = rng.standard_normal((2, 64)).astype(np.float32)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    found = openvino.Core().compile_model(path, "CPU", settings)([values])[0]
    plain = np.concatenate([reference_decoder.plain_values(part) for part in parts])
    assert found == pytest.approx(values @ plain.T, abs=1e-3)


def test_a_soft_cap_on_attention_is_refused_and_not_left_out(tmp_path: Path, shared_store: Path) -> None:
    directory = tiny_models.write_model(tmp_path / "gemma2", "gemma2")
    with pytest.raises(ModelRefused, match="attn_logit_softcapping 5"):
        load(directory, shared_store)
