"""A draft that can say a part of the vocabulary only: its rows are those columns of the whole model's rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapters import registry
from adapters.contract import AdapterUnavailable, LoadedModel, LoadOptions, ModelRefused, Segment, StaticShapes, silent
from adapters.hf_directory import TARGET_FINGERPRINT, open_weights
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.names import CONVERTING_ADAPTERS
from tests.support import tiny_models

KEPT = np.array([2, 5, 7, 30, 31, 32, 100, 101, 255, 256, 257, 258, 259, 300, 318, 319])
TOKENS = [7, 30, 2, 255, 9, 12, 300]


def whole(directory: Path) -> Path:
    return tiny_models.write_model(directory / "whole", "llama")


def write_reduced(directory: Path, **changes: object) -> Path:
    """The same weights with an output layer over KEPT."""
    return tiny_models.write_reduced(directory / "draft", whole(directory), KEPT, "0123456789abcdef", **changes)


def load(directory: Path, shared_store: Path, adapter: str, shapes: StaticShapes) -> LoadedModel:
    runtime = registry.get_for(adapter, "CPU", shapes)
    options = LoadOptions(kv_cache_bytes=16 << 20, slots=2, max_batch_rows=32, static=shapes)
    try:
        prepared = ModelStore(shared_store).prepare(resolve(str(directory), Path()), runtime, silent)
        return runtime.load(prepared, options, silent)
    except AdapterUnavailable as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize(
    ("adapter", "shapes"),
    [
        *((name, StaticShapes()) for name in CONVERTING_ADAPTERS),
        ("openvino_rt", StaticShapes(on=True, prefill_rows=16, verify_rows=(4,))),
    ],
    ids=lambda value: value if isinstance(value, str) else "static" if value.on else "dynamic",
)
def test_rows_are_columns_of_the_whole_models(
    tmp_path: Path, shared_store: Path, adapter: str, shapes: StaticShapes
) -> None:
    rows = []
    for directory in (whole(tmp_path), write_reduced(tmp_path)):
        model = load(directory, shared_store, adapter, shapes)
        rows.append(model.forward([Segment(0, 0, TOKENS, (0, len(TOKENS)))]).logits.copy())
        spec = model.spec
        model.close()
    assert rows[0].shape == (len(TOKENS), tiny_models.VOCABULARY)
    assert rows[1].shape == (len(TOKENS), len(KEPT)) == (len(TOKENS), spec.outputs)
    # Kernels differ with the width of the output layer, so the last bits may.
    assert np.abs(rows[0][:, KEPT] - rows[1]).max() < 0.05 * rows[0].std()
    assert spec.output_ids == tuple(KEPT)
    assert spec.vocabulary_size == tiny_models.VOCABULARY
    assert spec.vocabulary_fingerprint == "0123456789abcdef"


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (None, "no tensor d2t of 16 numbers"),
        (np.zeros(15, np.int64), "no tensor d2t of 16 numbers"),
        (np.full(16, 400), "names tokens that there are not"),
        (-np.arange(16), "or one twice"),
        (np.zeros(16, np.float32), "its ids are F32"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, table: np.ndarray | None, reason: str) -> None:
    directory = write_reduced(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors if table is None else tensors | {"d2t": table}, directory / "model.safetensors")
    with pytest.raises(ModelRefused, match=reason):
        open_weights(directory)


def test_a_tied_head_cannot_be_reduced(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="draft_vocab_size"):
        resolve(str(write_reduced(tmp_path, tie_word_embeddings=True)), Path())


def test_without_its_targets_vocabulary_a_tokenizer_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"no tokenizer\.json"):
        resolve(str(write_reduced(tmp_path, **{TARGET_FINGERPRINT: None})), Path())
