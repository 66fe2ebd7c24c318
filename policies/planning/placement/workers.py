"""One model (or a part of it) on one device: what it takes, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping

from device_profiles.units import human_bytes
from policies.planning.plan import Constraints, Device, Host, Memory, ModelFacts, Option, Shard, Workload
from policies.planning.shard_cost import kv_bytes


def sum_fixed_bytes(option: Option, layers: int) -> float:
    """Return what a worker with so many layers takes without any sequence. Embedding and output layer are counted
    wherever the layers are: the first and the last shard have one of them each."""
    return option.fixed_bytes + option.workspace_bytes + option.end_bytes + layers * option.layer_bytes


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


def shard(
    device: Device,
    option: Option,
    model: ModelFacts,
    workload: Workload,
    *,
    sequences: int,
    layers: tuple[int, int],
    stage_ms: float,
    cores: tuple[int, ...] = (),
) -> Shard:
    """Return layers `layers[0]` to `layers[1]` (not included) of a model on a device."""
    count = layers[1] - layers[0]
    kv_cache = kv_bytes(option, workload, count / model.layers) * sequences
    weights = option.end_bytes + count * option.layer_bytes
    return Shard(
        device=device.id,
        host=device.host,
        profile=device.profile,
        runtime=option.runtime,
        weights=option.weights,
        threads=option.threads,
        first_layer=layers[0],
        end_layer=layers[1],
        memory=Memory(int(option.fixed_bytes), int(weights), int(kv_cache), int(option.workspace_bytes)),
        stage_ms=stage_ms,
        cores=cores,
        source=option.source,
        group=option.group,
    )
