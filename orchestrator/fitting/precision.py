"""Chooses a model's number formats from what its device can do, what fits, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from adapters.contract import Adapter, AdapterUnavailable, Exactness, ModelRefused, Precision, TwoCopies
from adapters.decoder.draft_outputs import count_draft_bytes
from adapters.decoder.facts import DecoderFacts
from adapters.decoder.source import count_held_bytes, open_source
from adapters.device_memory import read_device_memory
from adapters.gguf_splits import read_model_header
from adapters.hf_directory import has_own_graph
from adapters.hf_facts import DirectoryFacts
from adapters.ir_facts import IrFacts
from adapters.model_source import ModelSource, check_model
from adapters.model_store import ModelStore
from adapters.quality import read_quality
from adapters.variant import Variant
from device_profiles.profile import DRAFT, FAST, DeviceProfile, WeightsFormat, find_listed_device
from orchestrator.fitting.room import refuse_for_room
from orchestrator.protocol.load_options import ModelOptions
from policies.models.quantization import (
    AS_FILE,
    MeasuredWeights,
    ModelSizes,
    NoPrecision,
    NoRoom,
    PrecisionChoice,
    PrecisionRequest,
    choose_precision,
    list_formats,
)


@dataclass(frozen=True, slots=True)
class PreparedChoice:
    """What `load_model` runs with: the recipe of the weights and the choice behind it."""

    variant: Variant
    choice: PrecisionChoice


def choose_model_precision(
    options: ModelOptions, adapter: Adapter, store: ModelStore, file: ModelSource, *, whole: bool = True
) -> PreparedChoice | None:
    """Return how to run a model, or not the `whole` of it, whose size says nothing of memory then; None where the
    runtime knows no such device, which its `load` explains.

    Raises ModelRefused when a requested format cannot be met or nothing ever fits, and OutOfMemory when nothing fits
    now."""
    device = find_listed_device(adapter.devices(), options.device)
    if device is None:
        return None
    wanted = PrecisionRequest(
        options.weights,
        options.activations,
        options.kv_cache_precision,
        exactness=Exactness(options.exactness),
        drafts=options.drafts,
    )
    sizes = sizes_of(file, adapter)
    if not sizes.converts:
        device = replace(device, weights=(), has_fast=False)
    title, memory = f"{file.name} on {adapter.name} {device.name}", read_device_memory(device)
    holds_all = whole and device.layer_costs is None
    if has_own_graph(file.path):
        device = replace(device, has_draft=False)  # it is run as it is
    try:
        choice = choose_precision(
            device,
            sizes,
            read_measured_weights(adapter, device, store, file),
            wanted,
            free_bytes=memory.free_bytes if holds_all and memory.total_bytes else None,
            other_bytes=options.kv_cache_bytes,
        )
    except NoRoom as refusal:
        needed, kv_cache = refusal.needed_bytes, options.kv_cache_bytes
        raise refuse_for_room(title, memory, other_bytes=needed, kv_cache_bytes=kv_cache) from refusal
    except NoPrecision as refusal:
        raise ModelRefused(f"{title}: {refusal}") from refusal
    return PreparedChoice(variant(adapter, choice.weights), choice)


def variant(adapter: Adapter, weights: str) -> Variant:
    """Return the recipe of weights in a format (a precision's name, AS_FILE, FAST or DRAFT)."""
    own: dict[str, WeightsFormat | None] = {AS_FILE: None, FAST: FAST, DRAFT: DRAFT}
    return Variant(adapter, own[weights] if weights in own else Precision(weights))


def sizes_of(file: ModelSource, adapter: Adapter | None = None) -> ModelSizes:
    """Return a model's sizes from the head of its files, as an adapter is to hold it. Raises ModelRefused."""
    size = file.weights_bytes
    facts = check_model(file, "" if adapter is None else adapter.name)
    draft_bytes = 0 if file.path.is_dir() else count_draft_bytes(read_model_header(file.path))
    if isinstance(facts, DecoderFacts | IrFacts):
        held = facts.held_bytes if isinstance(facts, DirectoryFacts) else size
        return ModelSizes(facts.matrix_elements, size, facts.stored, held, draft_bytes=draft_bytes, converts=False)
    weights = open_source(file.path)
    rounds = open_source(file.path, FAST).label != weights.label
    held = count_held_bytes(weights) or size
    holder: object = adapter
    if isinstance(holder, TwoCopies):
        held, draft_bytes = holder.count_held_bytes(held, size), holder.count_held_bytes(held, draft_bytes)
    return ModelSizes(weights.spec.matrix_elements, size, weights.label, held, rounds, draft_bytes)


def read_measured_weights(
    adapter: Adapter, device: DeviceProfile, store: ModelStore, file: ModelSource
) -> list[MeasuredWeights]:
    measured = []
    for weights in list_formats(device):
        artefact = find_prepared(variant(adapter, weights), store, file)
        qualities = read_quality(artefact) if artefact else ()
        if quality := next((quality for quality in qualities if quality["device"] == device.name), None):
            ratio = quality.get("perplexity_ratio", 0.0)
            measured.append(MeasuredWeights(weights, quality["step_ms"], quality["greedy_agreement"], ratio))
    return measured


def find_prepared(recipe: Variant, store: ModelStore, file: ModelSource) -> Path | None:
    """Return where a variant lies if it was prepared, None if not (or if its library is missing)."""
    try:
        return store.find(file, recipe)
    except AdapterUnavailable:
        return None
