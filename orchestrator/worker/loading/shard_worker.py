"""Builds the engine of a worker that holds some layers of a target, for the target's own worker to call."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from adapters.contract import LayerRange, LoadOptions, NumericalClass, ShardingAdapter, Unsupported, silent
from adapters.model_source import check_model
from adapters.process_heap import trim_heap
from device_profiles.device_names import is_processor
from device_profiles.memory import MeasuredMemory, MemoryPlan, MemoryUse, correct_plan
from orchestrator.fitting.profile_keys import profiles_in
from orchestrator.machine.devices import class_mark_of, device_name, effective_device, find_device, threads_on
from orchestrator.protocol.contract import NODE_ADDRESS
from orchestrator.protocol.events import Progress
from orchestrator.protocol.load_options import ShardWorkerOptions
from orchestrator.worker.loading.memory import MemoryMeter, predict_memory
from orchestrator.worker.loading.pipeline import check_whole_runtime
from orchestrator.worker.loading.prepared import PreparedModel, count_layers, prepare_part
from orchestrator.worker.shards.protocol import VERSION, Description
from orchestrator.worker.shards.server import Emit, LoadedLayers, ShardEngine


def build_shard_engine(options: dict[str, Any]) -> ShardEngine:
    """Return the engine of a worker for layers. Called inside the worker process."""
    settings = msgspec.convert(options, ShardWorkerOptions)
    host = os.environ.get(NODE_ADDRESS, "") if settings.across_hosts else ""

    def prepare(emit: Emit) -> _PreparedLayers:
        prepared = prepare_part(settings.model, lambda stage, fraction: emit(Progress(stage, fraction)))
        return _PreparedLayers(settings, prepared, host)

    return ShardEngine(prepare, host)


def _measure_own_bytes() -> int:
    trim_heap()  # what preparing the model has left
    return int(psutil.Process().memory_info().rss)


class _PreparedLayers:
    """Implements shards.server.LayerSource."""

    def __init__(self, options: ShardWorkerOptions, prepared: PreparedModel, host: str) -> None:
        model = options.model
        adapter = check_whole_runtime(prepared.adapter)
        if not isinstance(adapter, ShardingAdapter):
            raise Unsupported(f"{adapter.name} runs whole models only; name another adapter for these layers")
        self._adapter = adapter
        self._found = prepared
        self._process_bytes = 0
        self._store, self._name = profiles_in(Path(model.store)), model.name
        self._spec = check_model(prepared.file, model.adapter) if prepared.file is not None else None
        device = effective_device(model.adapter, model.device)
        profile = find_device(model.adapter, model.device)
        self._mark = class_mark_of(profile)

        self.description = Description(
            VERSION,
            model.adapter,
            device,
            device_name(model.adapter, device),
            count_layers(model, prepared.file),
            f"{self._mark}/{threads_on(profile, model.threads)}",
            f"{host} pid {os.getpid()}".lstrip(),
            os.getpid(),
            prepared.prepared.name if prepared.file is not None else "",
            prepared.choice.activations.value if prepared.choice and prepared.choice.activations else "",
            prepared.choice.kv_cache.value if prepared.choice and prepared.choice.kv_cache else "",
            prepared.prepared.parent.name if prepared.file is not None else "",
        )

    def classes(self, options: LoadOptions) -> list[list[NumericalClass]]:
        return [list(tier) for tier in self._adapter.classes(options)]

    def load(self, options: LoadOptions, layers: LayerRange) -> LoadedLayers:
        is_first = not self._process_bytes
        if is_first:  # the runtime has been asked for its devices and its classes
            self._process_bytes = _measure_own_bytes()
        predict = partial(self._predict, options, layers)
        plan, known_by = predict(None), self._key_memory(options, layers)
        shard = self._adapter.load_layers(self._found.prepared, options, layers, silent)
        if plan is None:
            return LoadedLayers(shard)
        planned = correct_plan(plan, self._store.find_memory(known_by)).total
        # What preparing the model and loads in other classes left is no part of what these layers take.
        made_here = self._found.prepared.stat().st_mtime >= psutil.Process().create_time()
        if not is_first or made_here or not is_processor(options.device):
            return LoadedLayers(shard, planned)
        known_by = replace(known_by, format=shard.capabilities.weights.partition(" + ")[0])
        return LoadedLayers(shard, planned, MemoryMeter(self._store, known_by, predict, shard))

    def _predict(self, options: LoadOptions, layers: LayerRange, use: MemoryUse | None) -> MemoryPlan | None:
        """Return what these layers are announced with, None where the runtime's costs are not known."""
        if self._spec is None:
            return None
        return predict_memory(
            *(options, self._adapter, self._spec, self._found.prepared),
            logits_rows=options.max_batch_rows,
            layers=layers,
            process_bytes=self._process_bytes,
            use=use,
        )

    def _key_memory(self, options: LoadOptions, layers: LayerRange) -> MeasuredMemory:
        """Return by what the memory of such a load is known."""
        prepared = self._found.prepared
        return MeasuredMemory(
            fingerprint=self._mark,
            adapter=self._adapter.name,
            device=options.device,
            model=self._name or self._found.name,
            model_digest=prepared.parent.name,
            weights=f"{prepared.name}, {layers}",
            wanted=f"{options.numerical_class or options.activations} {options.exactness}",
            slots=options.slots,
            layers=layers.end - layers.first,
        )
