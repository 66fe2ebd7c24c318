"""One model on one device: whether it fits, and what it takes."""

from __future__ import annotations

from device_profiles.units import human_bytes
from policies.pairing import kv_bytes, sequences_that_fit
from policies.plan import Constraints, Device, Host, Memory, ModelFacts, Option, Shard, Workload


def fixed_bytes(option: Option, layers: int) -> float:
    """Return what a worker with so many layers takes without any sequence."""
    return option.fixed_bytes + option.workspace_bytes + option.end_bytes + layers * option.layer_bytes


def room_bytes(device: Device, constraints: Constraints) -> float:
    """Return what a plan may fill of a device."""
    return device.memory_bytes * (1.0 - constraints.keep_free)


def memory(option: Option, layers: int, model: ModelFacts, workload: Workload, sequences: int) -> Memory:
    """Return what a worker takes, by parts."""
    share = layers / model.layers
    return Memory(
        fixed=round(option.fixed_bytes),
        weights=round(option.end_bytes + layers * option.layer_bytes),
        kv_cache=round(kv_bytes(option, workload, share) * sequences),
        workspace=round(option.workspace_bytes),
    )


def sequences_on(
    option: Option, model: ModelFacts, device: Device, workload: Workload, constraints: Constraints, wanted: int
) -> int:
    """Return how many sequences a whole model can hold there, at most `wanted`; 0 where it does not fit."""
    free = room_bytes(device, constraints) - fixed_bytes(option, model.layers)
    return sequences_that_fit(free, kv_bytes(option, workload), wanted)


def too_small(option: Option, model: ModelFacts, device: Device, workload: Workload, constraints: Constraints) -> str:
    """Return why a whole model does not fit there ("" where it does)."""
    if sequences_on(option, model, device, workload, constraints, 1):
        return ""
    needed = fixed_bytes(option, model.layers) + kv_bytes(option, workload)
    room = room_bytes(device, constraints)
    return f"needs {human_bytes(needed)} with one sequence, and {human_bytes(room)} may be filled"


def too_many_threads(option: Option, host: Host, taken: int = 0) -> str:
    """Return why its threads find no cores there ("" where they do), beside `taken` of them."""
    if not host.cores or option.threads + taken <= host.cores:
        return ""
    beside = f" beside {taken} that are taken" if taken else ""
    return f"wants {option.threads} threads{beside}, and {host.name} has {host.cores} cores"


def whole(
    device: Device,
    option: Option,
    model: ModelFacts,
    workload: Workload,
    sequences: int,
    stage_ms: float,
    first_core: int = 0,
) -> Shard:
    """Return a whole model as the one shard that it is, on cores from `first_core`."""
    return Shard(
        device=device.id,
        host=device.host,
        profile=device.profile,
        runtime=option.runtime,
        weights=option.weights,
        threads=option.threads,
        first_layer=0,
        end_layer=model.layers,
        memory=memory(option, model.layers, model, workload, sequences),
        stage_ms=stage_ms,
        cores=tuple(range(first_core, first_core + option.threads)),
        source=option.source,
    )
