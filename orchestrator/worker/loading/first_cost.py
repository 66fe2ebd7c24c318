"""What a worker knows of its rounds' costs before the first: what is stored for this very model, device and way of
loading. Rounds correct it, but they tell little of shapes that they do not have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adapters.contract import AdapterUnavailable, Unsupported
from device_profiles.cost import StepCost, with_row_ms
from orchestrator.fitting.profile_keys import build_profile_key, find_profile, profiles_in, threads_of
from orchestrator.machine.devices import find_device, mark_of
from orchestrator.protocol.load_options import ModelOptions
from orchestrator.worker.loading.models import LoadedSource
from orchestrator.worker.loading.prepared import SIMULATED_PREFIX


@dataclass(frozen=True, slots=True)
class FirstCost:
    """`source`: where it is from, for people. `known`: it is of this very model and device."""

    cost: StepCost
    source: str
    known: bool = True


def find_stored_cost(target: LoadedSource, options: ModelOptions) -> FirstCost | None:
    """Return the cost by the stored profile of a target; None where there is none.

    One that has drifted is taken too: how long all rounds take is learned from the first of them, and the shape counts.
    """
    if options.shards:
        return None  # profiles are of whole models
    try:
        device = find_device(options.adapter, options.device)
    except (AdapterUnavailable, Unsupported):  # a name that the runtime takes and does not list
        return None
    known = (mark_of(device), threads_of(options, device), find_loaded_digest(target))
    profile = find_profile(profiles_in(Path(options.store)), build_profile_key(options, "target", *known))
    if profile is None:
        return None
    source = f"stored profile of {profile.measured_at}{f', {profile.doubt}' if profile.doubt else ''}"
    return FirstCost(with_row_ms(profile.cost, profile.overhead.row_ms), source)


def find_loaded_digest(loaded: LoadedSource) -> str:
    """Return the digest of a model's files: the store keeps what is prepared from them in a directory of that name."""
    simulated = loaded.source.startswith(SIMULATED_PREFIX)
    return loaded.prepared.name if simulated else loaded.prepared.parent.name
