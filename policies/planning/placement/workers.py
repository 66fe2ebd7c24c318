"""One model (or a part of it) on one device: what it takes, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from device_profiles.units import human_bytes
from policies.planning.plan import Constraints, Device, Host, Option, Workload
from policies.planning.shard_cost import kv_bytes


def sum_fixed_bytes(option: Option, layers: int, *, first: bool = True, last: bool = True) -> float:
    """Return what a worker with so many layers takes without any sequence. `first`, `last`: the model's first and last
    layer are among them, and so is what goes with these."""
    weights = option.ends.sum_weights(first=first, last=last) + layers * option.layer_bytes
    return option.fixed_bytes + sum_workspace_bytes(option, last=last) + weights


def sum_workspace_bytes(option: Option, *, last: bool) -> float:
    """Return what the largest forward takes, with logits behind the `last` layer."""
    return option.workspace_bytes + (option.ends.logits if last else 0.0)


def count_fitting_layers(
    option: Option,
    room: float | NDArray[np.float64],
    load: Workload,
    sequences: int,
    *,
    first: bool = False,
    last: bool = False,
) -> NDArray[np.int64]:
    """Return how many of a target's layers such a worker has room for, with the KV cache of so many sequences."""
    a_layer = option.layer_bytes + kv_bytes(option, load, 1 / load.target.layers) * sequences
    free = room - sum_fixed_bytes(option, 0, first=first, last=last)
    return np.clip(np.floor(free / a_layer), 0, load.target.layers).astype(np.int64)


def room_bytes(device: Device, constraints: Constraints) -> float:
    """Return what a plan may fill of a device."""
    return device.memory_bytes * (1.0 - constraints.keep_free)


def cores_left(host: Host, taken: Mapping[str, int]) -> float:
    """Return how many cores are not spoken for; infinite where they are not known."""
    return float(host.cores - taken.get(host.name, 0)) if host.cores else float("inf")


def too_small(needed: float, room: float, *, measured: bool = True) -> str:
    """Say why it has no room. Where the whole was not `measured`, it may have by now, and still counts as in parts."""
    why = f"needs {human_bytes(needed)}, and {human_bytes(room)} may be filled"
    return why if measured else f"{why}; it was measured on few layers, for shards"


def too_many_threads(threads: int, host: str, cores: float) -> str:
    """Say why its threads find no cores."""
    return f"wants {threads} threads, and {host} has {cores:.0f} cores for it"
