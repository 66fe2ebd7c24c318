"""How many rounds of a target may be under way at the same time."""

from __future__ import annotations

from collections.abc import Iterable

from adapters.contract import AdapterError, LoadedModel, StagedModel
from adapters.hardware import name_device_kind
from orchestrator.loading.devices import find_device, list_places
from orchestrator.loading.options import EngineOptions


def count_flights(model: LoadedModel, options: EngineOptions) -> int:
    """Return how many flights a target's worker has: no more than requests run, and one for a target of one stage."""
    if not isinstance(model, StagedModel):
        return 1
    places = [name_compute(*place) for place in list_places(options.model)]
    return max(1, min(count_parallel_stages(places), model.stages, options.max_running))


def count_parallel_stages(places: Iterable[str]) -> int:
    """Return how many stages can compute at the same time. `places`: what each of them computes with, equal names where
    it is the same: two stages on one device only take turns."""
    return len(set(places))


def name_compute(adapter: str, device: str) -> str:
    """Return a name of what a stage computes with: of this process's cores where it is on the processor, whatever the
    runtime, and else of the device."""
    try:
        kind = name_device_kind(find_device(adapter, device))
    except AdapterError:  # a name that the runtime takes and does not list
        kind = ""
    return kind if kind == "cpu" else f"{adapter} {device}"
