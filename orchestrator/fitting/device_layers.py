"""Decides, before a model is loaded, how many of its layers its device holds, where the host can hold the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from adapters import registry
from adapters.contract import Adapter, AdapterError, OutOfMemory, Unsupported
from adapters.decoder.facts import STATE_VALUE_BYTES
from adapters.device_memory import DeviceMemory, read_device_memory, read_host_memory
from adapters.gguf_facts import GgufFacts, read_facts
from adapters.gguf_layer_bytes import read_layer_bytes
from adapters.gguf_splits import read_model_header
from adapters.model_source import ModelSource, resolve
from adapters.names import GGUF_ADAPTERS
from adapters.vocabulary import SIMULATED_PREFIX
from device_profiles.profile import find_listed_device
from device_profiles.units import ceil_div
from orchestrator.fitting.room import refuse_for_room
from orchestrator.protocol.load_options import ModelOptions
from policies.models.device_layers import (
    LayeredModel,
    LayerPlan,
    LayerRequest,
    LayerRoom,
    NoLayerRoom,
    describe_layers,
    plan_layers,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")
# Of the smallest floats that a cache has everywhere: with larger ones there is room for less.
KV_VALUE_BYTES = 2
# Positions that a recurrent state is counted as (ADR 0110). Not tuned.
_STATE_POSITIONS = 256
_FEWER = 0.75
"""Of the layers that found no memory though they were planned, so many are tried next. ADR 0109. Not tuned: each try is
a load."""


def load_planned(
    options: ModelOptions, adapter: Adapter, file: ModelSource, slots: int, load: Callable[[LayerPlan | None], T]
) -> T:
    """Load a model as it is planned; with fewer layers on the device where they find no memory. Raises what `load` and
    `plan_device_layers` raise."""
    plan = plan_device_layers(options, adapter, file, slots)
    if plan is not None:
        _log.info("%s on %s: %s", file.name, adapter.name, describe_layers(plan, options.device))
    while True:
        try:
            return load(plan)
        except OutOfMemory as error:
            if plan is None or not plan.on_device:
                raise
            plan = plan_device_layers(options, adapter, file, slots, failed=plan)
            fewer = describe_layers(plan, options.device) if plan else ""
            _log.warning("%s on %s %s: %s; now %s", file.name, adapter.name, options.device, error, fewer)


def plan_device_layers(
    options: ModelOptions, adapter: Adapter, file: ModelSource, slots: int, failed: LayerPlan | None = None
) -> LayerPlan | None:
    """Return the plan for so many sequences; None where the device holds all layers or nothing. `failed`: a plan that
    found no memory. Raises OutOfMemory and ModelRefused where the host's memory does not hold the rest."""
    device = find_listed_device(adapter.devices(), options.device)
    if device is None or device.layer_costs is None:
        if options.device_layers is not None:
            raise Unsupported(f"{adapter.name} {options.device} has all layers there; leave device_layers out")
        return None
    memory, host = read_device_memory(device), read_host_memory()
    request = LayerRequest(options.kv_cache_bytes, slots, options.device_layers, "model.device_layers allows no more")
    if failed is not None:
        why = f"{failed.on_device} found no memory"
        request = LayerRequest(options.kv_cache_bytes, slots, int(failed.on_device * _FEWER), why)
    room = LayerRoom(memory.total_bytes, memory.free_bytes, host.free_bytes, device.in_host_memory)
    try:
        return plan_layers(read_layered_model(file), device.layer_costs, request, room)
    except NoLayerRoom as refusal:
        title = f"{file.name} on {adapter.name} {device.name}, with the host's memory"
        scarce = memory if device.in_host_memory else DeviceMemory(host.total_bytes, host.free_bytes)
        raise refuse_for_room(
            title, scarce, other_bytes=refusal.needed_bytes, kv_cache_bytes=options.kv_cache_bytes
        ) from refusal


def tell_device_layers(options: ModelOptions, slots: int, places: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each device of a runtime that may leave layers to the host: how many it would have now, or why
    that cannot be. Raises what resolving the model raises."""
    lines = []
    for name, device in dict.fromkeys(places):
        if name not in GGUF_ADAPTERS or options.source.startswith(SIMULATED_PREFIX):
            continue
        placed = msgspec.structs.replace(options, adapter=name, device=device)
        file = resolve(options.source, Path(options.base), adapter=name)
        try:
            plan = plan_device_layers(placed, registry.get_for(name, device, options.static), file, slots)
        except AdapterError as refusal:
            lines.append(str(refusal))
            continue
        lines += [describe_layers(plan, device)] if plan is not None else []
    return lines


def read_layered_model(file: ModelSource) -> LayeredModel:
    """Return a GGUF model's sizes by layer, from its header. Raises ModelRefused."""
    header = read_model_header(file.path, file.whole_bytes)
    facts = read_facts(header)
    sizes = read_layer_bytes(header, facts.layers)
    return LayeredModel(
        layer_bytes=sizes.layers,
        layer_kv_bytes=_count_kv_bytes(facts),
        head_bytes=sizes.head + sizes.tied,
        host_head_bytes=sizes.head,
        host_bytes=sizes.rest,
        vocabulary=facts.vocabulary_size,
        hidden=facts.hidden,
        mlp=facts.mlp,
    )


def _count_kv_bytes(facts: GgufFacts) -> tuple[int, ...]:
    """Return what each layer keeps of a position. A recurrent state counts with the positions that a sequence has at
    least."""
    each = zip(facts.kv_heads, facts.key_lengths, facts.value_lengths, facts.state_elements, strict=True)
    return tuple(
        KV_VALUE_BYTES * heads * (key + value) + ceil_div(STATE_VALUE_BYTES * state, _STATE_POSITIONS)
        for heads, key, value, state in each
    )
