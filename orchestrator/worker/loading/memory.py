"""Tells, before a model is loaded, what its worker will hold, and compares that with what it holds as it works."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

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
    WidensWeights,
)
from adapters.decoder.spec import DecoderSizes
from adapters.loaded_model import CountsTouchedBlocks, KvCalls
from device_profiles.memory import MeasuredMemory, MemoryPlan, MemoryUse, ModelShape, plan_memory
from device_profiles.profile import find_listed_device
from device_profiles.store import ProfileStore
from orchestrator.fitting.device_layers import KV_VALUE_BYTES
from orchestrator.protocol.rounds import RoundReport

# Of what a worker holds: growth below it is not written again. Not tuned.
_WORTH_WRITING: Final = 0.01
# Between two writes while requests run. Not tuned: each is a file of a kilobyte, and waits for the disk.
_WRITE_EVERY_S: Final = 30.0
# Forwards from which on a worker has run the kernels that it has: of prompts, and of one row and of several. Not tuned.
_FORWARDS: Final = 16


def predict_memory(
    options: LoadOptions,
    adapter: Adapter,
    spec: DecoderSizes,
    prepared: Path,
    *,
    logits_rows: int,
    layers: LayerRange | None = None,
    process_bytes: int = 0,
    use: MemoryUse | None = None,
) -> MemoryPlan | None:
    """Return what this process will hold with the model, or some `layers` of it, loaded; None where the runtime's costs
    are not known.

    To be asked before loading: what the process holds already is part of it, but for weights that are read ahead.
    `process_bytes`: what that was, where something has been loaded and closed since. `logits_rows`: of a forward, whose
    logits may be wanted. Activations that are not known yet count as 32 bits. `use`: what it has done, where what it
    holds by then is asked for.
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
    if isinstance(adapter, WidensWeights):
        element_bytes = adapter.count_element_bytes(prepared, options) or element_bytes
    in_layers = spec.count_layer_elements(held)
    at_ends = spec.count_elements(held) - in_layers
    position_bytes = KV_VALUE_BYTES * spec.count_kv_elements(held)
    head = spec.vocabulary_size * spec.hidden if last else 0
    costs = device.memory_costs
    if use is None:
        rows = options.max_batch_rows
        use = MemoryUse(rows, logits_rows, fixed.kv_cache, options.slots, widths=rows)
    shape = ModelShape(
        spec.vocabulary_size if last else 0,
        spec.hidden,
        spec.mlp,
        spec.heads,
        min(spec.context_length, use.kv_cache_bytes // position_bytes) if position_bytes else spec.context_length,
        held.end - held.first,
        int(in_layers * element_bytes),
        int(head * element_bytes),
        int((at_ends - head) * element_bytes) if first else 0,
        fixed.graph_weights,
        fixed.graph_caches,
    )
    return plan_memory(
        costs,
        shape,
        kv_cache_bytes=fixed.kv_cache if costs.kv_at_once else use.kv_cache_bytes,
        batch_rows=use.batch_rows,
        slots=use.slots,
        widths=use.widths,
        logits_rows=use.logits_rows,
        ranks=options.tensor_parallel,
        activations_16bit=activations in (Precision.BF16, Precision.FP16),
        process_bytes=process_bytes or max(0, psutil.Process().memory_info().rss - count_ahead_bytes(adapter)),
    )


def count_ahead_bytes(adapter: ModelLoader) -> int:
    """Return how much of this process's memory has weights that are read ahead."""
    return adapter.ahead_bytes if isinstance(adapter, FilesInPlace) else 0


def _bytes(prepared: Path) -> int:
    return sum(path.stat().st_size for path in prepared.iterdir() if path.is_file() and path.name not in NOTES)


PredictUse = Callable[[MemoryUse | None], MemoryPlan | None]
"""Returns what is announced of a worker that has done so much, at its fullest where it is asked with None. It has no
correction."""


class MemoryMeter:
    """Compares what a worker holds with what is announced of as much as it used, and keeps it for the next plan.

    One thread calls it. `known_by` says what was loaded, and `predict` what is announced of it.
    """

    def __init__(self, store: ProfileStore, known_by: MeasuredMemory, predict: PredictUse, model: KvCalls) -> None:
        self.known_by = known_by
        self.beside_bytes = 0
        """What of the same process is announced apart: drafts and their stores."""
        self._store, self._predict, self._model = store, predict, model
        self._use, self._forwards = MemoryUse(), 0
        self._widths: set[int] = set()
        self._kept = store.find_memory(known_by)
        self._written_bytes, self._written_s = 0, 0.0

    @property
    def last(self) -> MeasuredMemory | None:
        """What was kept of an earlier load, or of this one."""
        return self._kept

    def observe_round(self, done: RoundReport) -> None:
        """Note what a round has done."""
        self.observe_forward(done.rows, done.sequences + done.drafted, done.sequences)

    def observe_forward(self, rows: int, logits_rows: int, sequences: int) -> None:
        """Note a forward's size."""
        self._forwards += 1
        self._widths.add(rows)
        use = self._use
        logits_rows, slots = max(use.logits_rows, logits_rows), max(use.slots, sequences)
        self._use = MemoryUse(max(use.batch_rows, rows), logits_rows, 0, slots, len(self._widths))

    def observe_held(self, held_bytes: int, *, idle: bool, now_s: float) -> None:
        """Keep what the worker held at most where that is news and there is time for it: when it is idle, or long after
        the last time."""
        news = held_bytes > (1.0 + _WORTH_WRITING) * self._written_bytes
        if self._forwards >= _FORWARDS and news and (idle or now_s - self._written_s >= _WRITE_EVERY_S):
            self._written_bytes, self._written_s = held_bytes, now_s
            self.save_held(held_bytes)

    def save_held(self, held_bytes: int) -> None:
        """Keep what the worker held at most, unless an earlier load says more. A store that cannot be written is left
        as it is."""
        whole = self._predict(None)
        if whole is None:
            return
        model, total = self._model, self._model.capabilities.total_blocks
        share = model.count_touched_blocks() / total if isinstance(model, CountsTouchedBlocks) else 1.0
        announced = self._predict(replace(self._use, kv_cache_bytes=int(share * whole.kv_cache))) or whole
        measured = replace(
            self.known_by,
            held_bytes=held_bytes,
            announced_bytes=announced.total + self.beside_bytes,
            whole=whole.parts,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if self._kept is None or measured.says_more_than(self._kept):
            self._kept = measured
            with suppress(OSError):
                self._store.save(measured)
