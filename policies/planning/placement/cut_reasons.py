"""Why a target is cut into these shards: the sums by which no device holds it whole, and what each shard might hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from device_profiles.units import human_bytes
from policies.planning.merit import describe_merit
from policies.planning.placement import workers
from policies.planning.placement.candidate import PlacedShard, ScoredCandidate, choose_kv_cache_bytes
from policies.planning.placement.cutting import FEW
from policies.planning.placement.search import SearchSpace
from policies.planning.shard_cost import context_tokens, kv_bytes


def explain_cut(
    cut: ScoredCandidate, ground: SearchSpace, cut_again: Callable[[SearchSpace], ScoredCandidate | None]
) -> Iterator[str]:
    """Yield in a line each why the target is in shards, how its layers were shared out, and what one shard less or more
    would bring. `ground`: what the shards were cut from, by `cut_again`."""
    yield from _describe_nearest(ground)
    for placed in cut.candidate.target:
        yield _describe_share(placed, cut, ground)
    load = ground.wanted.workload
    loaded = choose_kv_cache_bytes(cut.candidate, load, ground.wanted.constraints)
    if loaded < load.kv_cache_bytes:
        yield f"a KV cache of {human_bytes(loaded)} has room, and {human_bytes(load.kv_cache_bytes)} are configured"
    count, devices = len(cut.candidate.target), ground.left.target_devices
    if ground.wanted.constraints.shards or len(devices) > FEW:
        return
    for other in (count - 1, count + 1):
        if 1 < other <= min(len(devices), ground.wanted.constraints.max_shards):
            limits = replace(ground.wanted.constraints, shards=other)
            again = cut_again(replace(ground, wanted=replace(ground.wanted, constraints=limits)))
            yield _describe_count(other, again, cut, ground)


def _describe_nearest(ground: SearchSpace) -> Iterator[str]:
    """Say of the device that comes nearest to holding the target whole what it would need, for one request at a
    time."""
    load, limits = ground.wanted.workload, ground.wanted.constraints
    needs = [
        (workers.sum_fixed_bytes(option, load.target.layers) + kv_bytes(option, load), device, option)
        for device in ground.left.target_devices
        for option in ground.left.targets.get(device.profile, ())
    ]
    needed, device, option = min(
        needs, key=lambda need: (need[0] / max(1.0, workers.room_bytes(need[1], limits)), need[1].id)
    )
    room = workers.room_bytes(device, limits)
    if needed <= room and option.runs_whole:  # something else than memory is in the way
        return
    parts = {
        "weights": option.ends.both + load.target.layers * option.layer_bytes,
        "KV cache": kv_bytes(option, load),
        "workspace": workers.sum_workspace_bytes(option, last=True),
        "process": option.fixed_bytes,
    }
    summed = " + ".join(f"{human_bytes(size)} {name}" for name, size in parts.items() if size)
    why = workers.too_small(needed, room, measured=option.runs_whole or needed > room)
    yield f"{load.target.name} fits whole on no device: {option.label} on {device.id} {why} ({summed})"


def _describe_share(placed: PlacedShard, cut: ScoredCandidate, ground: SearchSpace) -> str:
    load, option, sequences = ground.wanted.workload, placed.option, cut.candidate.sequences
    room = workers.room_bytes(placed.device, ground.wanted.constraints)
    ends = {"first": placed.has_first, "last": placed.has_last}
    each = option.layer_bytes + kv_bytes(option, load, 1 / load.target.layers) * sequences
    most = workers.count_fitting_layers(option, room, load, sequences, **ends)
    rows = sequences * (cut.prediction.depth + 1)
    layer_ms = option.cost.ms(rows, sequences, context_tokens(load)) / load.target.layers
    layer_ms /= 1.0 - placed.device.utilisation
    return (
        f"{placed.device.id} runs {placed.layers} layers of the {most} that fit, {layer_ms:.2f} ms each: "
        f"{human_bytes(each)} a layer beside {human_bytes(workers.sum_fixed_bytes(option, 0, **ends))}, "
        f"and {human_bytes(room)} may be filled"
    )


def _describe_count(count: int, other: ScoredCandidate | None, cut: ScoredCandidate, ground: SearchSpace) -> str:
    aim = (ground.wanted.objective, ground.wanted.currency)
    mine = describe_merit(aim[0], cut.merit[0], aim[1])
    theirs = "they do not hold it" if other is None else f"{describe_merit(aim[0], other.merit[0], aim[1])} predicted"
    return f"in {count} shards: {theirs}, in {len(cut.candidate.target)}: {mine}"
