"""Every family of Hugging Face models computes on OpenVINO what its formulas say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adapters import registry
from adapters.contract import LoadedModel, LoadOptions, ModelRefused, Precision, Segment
from adapters.hf_directory import open_weights
from adapters.invariance import measure_row_invariance
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from tests.support import reference_decoder, tiny_models

FAMILIES = [name for name in tiny_models.CONFIGS if name != "gemma2"]
LENGTH = 90  # longer than the tiny models' sliding window of 16


def silent(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


def load(directory: Path, store_root: Path, activations: Precision = Precision.FP32) -> LoadedModel:
    adapter = registry.get("openvino_rt")
    prepared = ModelStore(store_root).prepare(resolve(str(directory), Path()), adapter, silent)
    options = LoadOptions(activations=activations, kv_cache_bytes=32 << 20, slots=4, max_batch_rows=128)
    return adapter.load(prepared, options, silent)


def tokens(count: int = LENGTH) -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(4, 260, count)]


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_formulas(tmp_path: Path, store_root: Path, name: str, kind: str) -> None:
    if kind == "F16" and name != "llama3":
        pytest.skip("f16 is stored the same way for every family")
    directory = tiny_models.write_model(tmp_path / name, name, kind=kind, shards=2 if kind == "BF16" else 1)
    expected = reference_decoder.logits(open_weights(directory), tokens())
    model = load(directory, store_root)
    first = model.forward([Segment(0, 0, tokens()[:70], (0, 70))]).logits.copy()
    rest = model.forward([Segment(1, 0, tokens(9), (0, 0)), Segment(0, 70, tokens()[70:], (0, 20))]).logits.copy()
    found = np.concatenate([first, rest])
    # Keys and values are kept in 16 bits; everything else is float32.
    assert np.sqrt(np.mean((found - expected) ** 2)) < 0.004 * expected.std()
    assert model.capabilities.weights == {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}[kind]
    assert measure_row_invariance(model)
    model.close()


def test_a_soft_cap_on_attention_is_refused_and_not_left_out(tmp_path: Path, store_root: Path) -> None:
    directory = tiny_models.write_model(tmp_path / "gemma2", "gemma2")
    with pytest.raises(ModelRefused, match="attn_logit_softcapping 5"):
        load(directory, store_root)
