"""Weights of several formats in one layer are computed as they are stored, on every adapter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from adapters.decoder.from_gguf import GgufWeights
from adapters.decoder.spec import Weights
from adapters.hf_directory import open_weights
from tests.adapters.test_gguf_gemma import CHANGES, write_gguf
from tests.adapters.test_hf_models import load, tokens
from tests.support import reference_decoder, tiny_models
from tests.support.tiny_gguf import Tiny, write


def compute(source: Path, weights: Weights, shared_store: Path, adapter: str) -> float:
    """Return how far the adapter's logits are from the formulas', in their spread."""
    from adapters.contract import Segment

    text = [token % 60 for token in tokens(40)]
    expected = reference_decoder.logits(weights, text)
    model = load(source, shared_store, name=adapter)
    logits = model.forward([Segment(0, 0, text, (0, len(text)))]).logits.copy()
    model.close()
    return float(np.sqrt(np.mean((logits - expected) ** 2)) / expected.std())


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        (Kind.Q4_0, Kind.Q8_0, Kind.F16),
        (Kind.F32, Kind.F16, Kind.BF16),
        (Kind.Q8_0, Kind.F16, Kind.Q8_0),
        (Kind.F16, Kind.Q5_0, Kind.Q4_1),
        (Kind.Q4_0, Kind.Q8_0, Kind.Q4_0),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adapter", ["openvino_rt", "onnx_rt"])
def test_query_key_and_value_of_different_formats(tmp_path, shared_store, query, key, value, bias, adapter):
    if adapter == "onnx_rt":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: outrider extras install onnx")
    path = tmp_path / "m.gguf"
    kinds = {"attn_q.weight": query, "attn_k.weight": key, "attn_v.weight": value}
    write(path, Tiny("qwen2" if bias else "llama", bias=bias, layers=2), kinds=kinds)
    assert compute(path, GgufWeights(path), shared_store, adapter) < 0.05  # activations of 8 bits


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_directory_of_mixed_types(tmp_path, shared_store, name):
    directory = tiny_models.write_model(tmp_path / name, name)
    tensors = load_file(directory / "model.safetensors")
    kinds = {"q_proj.weight": "BF16", "k_proj.weight": "F16", "v_proj.bias": "F16", "q_proj.bias": "BF16"}
    by_kind = {tensor: next((kind for end, kind in kinds.items() if tensor.endswith(end)), "F32") for tensor in tensors}
    tiny_models.save_mixed(tensors, directory / "model.safetensors", by_kind)
    weights = open_weights(directory)
    assert {weights.tensor(f"0.{part}").bfloat16 for part in ("query", "key", "value")} == {True, False}
    assert compute(directory, weights, shared_store, "openvino_rt") < 0.01


@pytest.mark.parametrize("adapter", ["openvino_rt", "torch_device", "onnx_rt"])
def test_a_scaled_rope_is_the_same_on_every_adapter(tmp_path, shared_store, adapter):
    pytest.importorskip({"torch_device": "torch", "onnx_rt": "onnxruntime"}.get(adapter, "openvino"))
    path = tmp_path / "m.gguf"
    write(path, Tiny("llama"), {"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.5})
    assert compute(path, GgufWeights(path), shared_store, adapter) < 0.01


@pytest.mark.parametrize("adapter", ["openvino_rt", "torch_device"])
def test_what_a_gemma_says_of_itself_is_the_same_on_every_adapter(tmp_path, shared_store, adapter):
    pytest.importorskip({"torch_device": "torch"}.get(adapter, "openvino"))
    config = tiny_models.config_of("gemma3", **CHANGES)
    keys = {"final_logit_softcapping": 6.0, "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 5000.0}
    path = write_gguf(tmp_path / "m.gguf", config, tiny_models.tensors_of(config), keys)
    assert compute(path, GgufWeights(path), shared_store, adapter) < 0.01
