"""Tells, before a model is loaded, what its worker will hold."""

from __future__ import annotations

from pathlib import Path

import psutil

from adapters.artefact import NOTES
from adapters.contract import Adapter, FixedShapes, Footprint, LayerRange, LoadOptions
from adapters.decoder.source import open_source
from adapters.decoder.spec import Grouped
from adapters.model_source import ModelSource
from device_profiles.memory import MemoryPlan, ModelShape, plan_memory
from device_profiles.profile import FAST
from policies.models.quantization import AS_FILE, PrecisionChoice


def predict_memory(
    asked: LoadOptions,
    adapter: Adapter,
    file: ModelSource,
    prepared: Path,
    choice: PrecisionChoice,
    layers: LayerRange | None = None,
    process_bytes: int = 0,
) -> MemoryPlan | None:
    """Return what this process will hold with the model, or some `layers` of it, loaded; None where the runtime's costs
    are not known.

    To be asked before loading: what the process holds already is part of it. `process_bytes`: what that was, where
    something has been loaded and closed since.
    """
    device = next((found for found in adapter.devices() if found.name == asked.device), None)
    if device is None or device.memory_costs is None:
        return None
    weights = open_source(file.path)
    spec, kept = weights.spec, choice.weights in (AS_FILE, FAST)
    quantized = isinstance(weights.tensor("embedding"), Grouped) if kept else choice.weights.startswith("int")
    fixed = Footprint(asked.kv_cache_bytes, 0, 0)
    if isinstance(adapter, FixedShapes):
        fixed = adapter.footprint(prepared, asked)
    share, vocabulary = 1.0, spec.vocabulary_size
    if layers is not None:
        share = spec.count_elements(layers) / spec.matrix_elements
        vocabulary = spec.vocabulary_size if layers.end == spec.layers else 0  # none but the last has logits
    sizes = (vocabulary, spec.hidden, spec.mlp, int(_bytes(prepared) * share))
    shape = ModelShape(*sizes, quantized, fixed.graph_weights, fixed.graph_caches)
    return plan_memory(
        device.memory_costs,
        shape,
        kv_cache_bytes=fixed.kv_cache,
        batch_rows=asked.max_batch_rows,
        process_bytes=process_bytes or psutil.Process().memory_info().rss,
    )


def _bytes(prepared: Path) -> int:
    return sum(path.stat().st_size for path in prepared.iterdir() if path.is_file() and path.name not in NOTES)
