"""How many rounds of a target may be under way at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.contract import LoadedModel, StagedModel
from orchestrator.machine.devices import effective_device
from orchestrator.protocol.load_options import EngineOptions, ShardOptions

_PROCESSOR = "CPU"


def count_flights(model: LoadedModel, options: EngineOptions) -> int:
    """Return how many flights a target's worker has: no more than requests run, and one for a target of one stage."""
    if not isinstance(model, StagedModel):
        return 1
    return max(1, min(count_parallel_stages(options.model.shards), model.stages, options.max_running))


def count_parallel_stages(shards: Sequence[ShardOptions]) -> int:
    """Return how many shards can compute at the same time: two of them take turns on one device, or on the same cores
    of a processor, whatever the runtimes."""
    return len({_name_compute(shard) for shard in shards})


def _name_compute(shard: ShardOptions) -> tuple[str, str, tuple[int, ...]]:
    """Return what a shard computes with: host, device and cores. A device is another one to another runtime, as names
    of devices are the runtime's own; the processor is not."""
    device = effective_device(shard.adapter, shard.device)
    device = device if device == _PROCESSOR else f"{shard.adapter} {device}"
    return (shard.host, device, tuple(shard.cores)) if shard.own else ("", device, ())
