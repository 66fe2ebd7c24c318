"""What the conformance suite runs over: every adapter, a model that it has prepared, and how rows are asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.contract import (
    Adapter,
    AdapterError,
    Exactness,
    LoadedModel,
    LoadOptions,
    NumericalClass,
    Segment,
    StaticShapes,
)
from adapters.hf_directory import model_files
from adapters.invariance import find_variance
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
from adapters.variant import Variant
from device_profiles.profile import Precision

ADAPTERS = [
    pytest.param("simulated", id="simulated"),
    pytest.param("openvino_rt", id="openvino_rt", marks=pytest.mark.model),
    pytest.param("onnx_rt", id="onnx_rt", marks=pytest.mark.model),
    pytest.param("torch_device", id="torch_device", marks=pytest.mark.model),
    # A model of tests/support/tiny_models.py behind the slash: sliding windows, and layers without.
    pytest.param("openvino_rt/gemma3", id="openvino_rt-gemma3"),
    pytest.param("onnx_rt/gemma3", id="onnx_rt-gemma3"),
    pytest.param("torch_device/gemma2", id="torch_device-gemma2"),  # attention scores softly capped
    # Graphs of fixed shape, as an NPU runs them.
    pytest.param("openvino_rt/llama/static", id="openvino_rt-llama-static"),
    pytest.param("openvino_rt/gemma3/static", id="openvino_rt-gemma3-static"),
    # Behind the at sign: weights in another format than the file's.
    pytest.param("openvino_rt/llama3@int8", id="openvino_rt-int8"),
    pytest.param("openvino_rt/llama3@int4", id="openvino_rt-int4"),
    pytest.param("onnx_rt/llama3@int8", id="onnx_rt-int8"),
    pytest.param("onnx_rt/llama3@int4", id="onnx_rt-int4"),
    pytest.param("torch_device/llama3@int8", id="torch_device-int8"),
    pytest.param("torch_device/llama3@int4", id="torch_device-int4"),
    # Behind the number sign: a tier of numerical classes. The last one has forwards of one width.
    pytest.param("openvino_rt/llama3#1", id="openvino_rt-outputs"),
    pytest.param("openvino_rt/llama3#-1", id="openvino_rt-width"),
    pytest.param("onnx_rt/llama3#-1", id="onnx_rt-width"),
    pytest.param("torch_device/llama3#-1", id="torch_device-width"),
    pytest.param("torch_device/gemma2#-1", id="torch_device-gemma2-width"),
    pytest.param("torch_device/llama3@int4#-1", id="torch_device-int4-width"),
]
DEVICES = {"simulated": "SIM", "openvino_rt": "CPU", "onnx_rt": "CPU", "torch_device": "CPU"}
SLOTS = 18
ROWS = 160


@dataclass(frozen=True)
class Prepared:
    """A model as an adapter has prepared it, the shapes that it is loaded with, and the tier of its classes."""

    adapter: Adapter
    path: Path
    static: StaticShapes
    tier: int = 0


def silent(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


def prepare_by(adapter: Adapter, source: Path, store: Path, shapes: StaticShapes, weights: str = "") -> Prepared:
    """Prepare a model in a store; `weights`: in another number format than the file's."""
    files = model_files(source) if source.is_dir() else ()
    file = ModelSource(path=source, name="conformance", source=str(source), files=files)
    recipe = Variant(adapter, Precision(weights) if weights else None)
    return Prepared(adapter, ModelStore(store).prepare(file, recipe, silent), shapes)


def load(prepared: Prepared, **options) -> LoadedModel:
    chosen: dict[str, Any] = {
        "device": DEVICES[prepared.adapter.name],
        "static": prepared.static,
        "slots": SLOTS,
        "max_batch_rows": ROWS,
        "kv_cache_bytes": 400 << 20,  # the default model's whole context, in fp32
    }
    asked = LoadOptions(**(chosen | options))
    if asked.exactness is Exactness.BIT and asked.device == DEVICES[prepared.adapter.name]:
        search = LoadOptions(**chosen)
        found = exact_class(prepared.adapter, prepared.path, search, prepared.tier)
        asked = replace(asked, numerical_class=found)
    return prepared.adapter.load(prepared.path, asked, silent)


_EXACT: dict[tuple[str, Path, int], NumericalClass] = {}


def exact_class(adapter: Adapter, path: Path, options: LoadOptions, first_tier: int = 0) -> NumericalClass:
    """Return the first class that keeps its bits on this processor, as the product finds it, whatever it costs."""
    key = (adapter.name, path, first_tier)
    if key not in _EXACT:
        tiers = adapter.classes(options)
        candidates = [one for tier in tiers[min(first_tier, len(tiers) - 1) % len(tiers) :] for one in tier]
        _EXACT[key] = next(
            one for one in candidates if _keeps_bits(adapter, path, replace(options, numerical_class=one))
        )
    return _EXACT[key]


def _keeps_bits(adapter: Adapter, path: Path, options: LoadOptions) -> bool:
    try:
        model = adapter.load(path, options, silent)
    except AdapterError:
        return False
    held = not find_variance(model)
    model.close()
    return held


def text(model: LoadedModel, count: int, seed: int = 0) -> list[int]:
    most = min(256, model.spec.vocabulary_size)
    return [int(token) for token in np.random.default_rng(seed).integers(3, most, count)]


def bits(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint32)


def run(model: LoadedModel, slot: int, tokens: list[int], chunks: list[int], start: int = 0) -> np.ndarray:
    """All rows of `tokens`, fed in chunks."""
    rows = []
    for count in chunks:
        segment = Segment(slot, start, tokens[start : start + count], (0, count))
        rows.append(model.forward([segment]).logits.copy())
        start += count
    assert start == len(tokens)
    return np.concatenate(rows)


def pieces(rows: int) -> list[int]:
    """Rows in as few forwards as they fit in."""
    return [ROWS] * (rows // ROWS) + [rows % ROWS] * (rows % ROWS > 0)
