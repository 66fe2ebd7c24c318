"""Builds the engine of a worker that holds some layers of a target, for the target's own worker to call."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import psutil

from adapters.contract import LayerRange, LoadedShard, LoadOptions, NumericalClass, ShardingAdapter, Unsupported, silent
from adapters.model_source import check_model
from orchestrator.machine.devices import class_mark_of, device_name, effective_device, find_device, threads_on
from orchestrator.protocol.contract import NODE_ADDRESS
from orchestrator.protocol.events import Progress
from orchestrator.protocol.load_options import ShardWorkerOptions
from orchestrator.worker.loading.memory import predict_memory
from orchestrator.worker.loading.pipeline import check_whole_runtime
from orchestrator.worker.loading.prepared import PreparedModel, count_layers, prepare_part
from orchestrator.worker.shards.protocol import VERSION, Description
from orchestrator.worker.shards.server import Emit, ShardEngine


def build_shard_engine(options: dict[str, Any]) -> ShardEngine:
    """Return the engine of a worker for layers. Called inside the worker process."""
    settings = msgspec.convert(options, ShardWorkerOptions)
    host = os.environ.get(NODE_ADDRESS, "") if settings.across_hosts else ""

    def prepare(emit: Emit) -> _PreparedLayers:
        prepared = prepare_part(settings.model, lambda stage, fraction: emit(Progress(stage, fraction)))
        return _PreparedLayers(settings, prepared, host)

    return ShardEngine(prepare, host)


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
        self._spec = check_model(prepared.file, model.adapter) if prepared.file is not None else None
        device = effective_device(model.adapter, model.device)
        profile = find_device(model.adapter, model.device)

        self.description = Description(
            VERSION,
            model.adapter,
            device,
            device_name(model.adapter, device),
            count_layers(model, prepared.file),
            f"{class_mark_of(profile)}/{threads_on(profile, model.threads)}",
            f"{host} pid {os.getpid()}".lstrip(),
            os.getpid(),
            prepared.prepared.name if prepared.file is not None else "",
            prepared.choice.activations.value if prepared.choice and prepared.choice.activations else "",
            prepared.choice.kv_cache.value if prepared.choice and prepared.choice.kv_cache else "",
            prepared.prepared.parent.name if prepared.file is not None else "",
        )

    def classes(self, options: LoadOptions) -> list[list[NumericalClass]]:
        return [list(tier) for tier in self._adapter.classes(options)]

    def predict_bytes(self, options: LoadOptions, layers: LayerRange) -> int:
        prepared = self._found
        if self._spec is None:
            return 0
        # Before the first layers are loaded: by then the runtime has been asked for its devices and its classes.
        self._process_bytes = self._process_bytes or psutil.Process().memory_info().rss
        plan = predict_memory(
            *(options, self._adapter, self._spec, prepared.prepared),
            logits_rows=options.max_batch_rows,
            layers=layers,
            process_bytes=self._process_bytes,
        )
        return plan.total if plan is not None else 0

    def load(self, options: LoadOptions, layers: LayerRange) -> LoadedShard:
        return self._adapter.load_layers(self._found.prepared, options, layers, silent)
