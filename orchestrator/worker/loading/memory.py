"""Tells, before a model is loaded, what its worker will hold."""

from __future__ import annotations

from pathlib import Path

import psutil

from adapters.artefact import NOTES
from adapters.contract import (
    Adapter,
    FilesInPlace,
    FixedShapes,
    Footprint,
    LayerRange,
    LoadOptions,
    ModelLoader,
    Precision,
)
from adapters.decoder.spec import DecoderSizes
from device_profiles.memory import MemoryPlan, ModelShape, plan_memory
from device_profiles.profile import find_listed_device
from orchestrator.fitting.device_layers import KV_VALUE_BYTES


def predict_memory(
    options: LoadOptions,
    adapter: Adapter,
    spec: DecoderSizes,
    prepared: Path,
    *,
    logits_rows: int,
    layers: LayerRange | None = None,
    process_bytes: int = 0,
) -> MemoryPlan | None:
    """Return what this process will hold with the model, or some `layers` of it, loaded; None where the runtime's costs
    are not known.

    To be asked before loading: what the process holds already is part of it, but for weights that are read ahead.
    `process_bytes`: what that was, where something has been loaded and closed since. `logits_rows`: of a forward, whose
    logits may be wanted. Activations that are not known yet count as 32 bits.
    """
    device = find_listed_device(adapter.devices(), options.device)
    if device is None or device.memory_costs is None:
        return None
    activations = options.numerical_class.activations if options.numerical_class is not None else options.activations
    fixed = Footprint(options.kv_cache_bytes, 0, 0)
    if isinstance(adapter, FixedShapes):
        fixed = adapter.footprint(prepared, options)
    held = layers or spec.all_layers
    first, last = held.first == 0, held.end == spec.layers
    element_bytes = _bytes(prepared) / spec.matrix_elements
    in_layers = spec.count_layer_elements(held)
    at_ends = spec.count_elements(held) - in_layers
    position_bytes = KV_VALUE_BYTES * spec.count_kv_elements(held)
    head = spec.vocabulary_size * spec.hidden if last else 0
    shape = ModelShape(
        spec.vocabulary_size if last else 0,
        spec.hidden,
        spec.mlp,
        spec.heads,
        min(spec.context_length, fixed.kv_cache // position_bytes) if position_bytes else spec.context_length,
        held.end - held.first,
        int(in_layers * element_bytes),
        int(head * element_bytes),
        int((at_ends - head) * element_bytes) if first else 0,
        fixed.graph_weights,
        fixed.graph_caches,
    )
    return plan_memory(
        device.memory_costs,
        shape,
        kv_cache_bytes=fixed.kv_cache,
        batch_rows=options.max_batch_rows,
        slots=options.slots,
        logits_rows=logits_rows,
        activations_16bit=activations in (Precision.BF16, Precision.FP16),
        process_bytes=process_bytes or max(0, psutil.Process().memory_info().rss - count_ahead_bytes(adapter)),
    )


def count_ahead_bytes(adapter: ModelLoader) -> int:
    """Return how much of this process's memory has weights that are read ahead."""
    return adapter.ahead_bytes if isinstance(adapter, FilesInPlace) else 0


def _bytes(prepared: Path) -> int:
    return sum(path.stat().st_size for path in prepared.iterdir() if path.is_file() and path.name not in NOTES)
