"""Which devices of a host a target's layers may be split over, and what that is expected to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from adapters import registry
from adapters.contract import AdapterUnavailable, TensorParallelAdapter
from device_profiles.datasheet import EFFICIENCY, RANK_LINK_BYTES_PER_S, RANK_SUM_MS
from device_profiles.device_names import CPU_KIND, find_index
from device_profiles.units import MS_PER_S
from orchestrator.planning.estimates import DeviceSource
from orchestrator.planning.models import HIDDEN_BYTES, PlannedModel
from orchestrator.planning.stored import MeasuredHardware
from orchestrator.planning.wanted import PlanRequest
from policies.planning.placement.ranks import join_devices
from policies.planning.plan import Device, Inventory, Option, Role


def add_rank_groups(
    cluster: Inventory, behind: Mapping[str, DeviceSource], request: PlanRequest
) -> tuple[Inventory, dict[str, DeviceSource]]:
    """Return the cluster with groups of its devices beside them, and what stands behind its profiles. A group is of
    GPUs of one host that are alike and numbered one after the other, as ranks take them. A processor has none: its
    ranks would share one memory."""
    sources = dict(behind)
    placed = any(draft.placed for draft in request.drafts)  # its room on rank 0's device is not counted
    if not request.target.splits or request.placement.sharding == "never" or placed:
        return cluster, sources
    able: dict[str, list[Option]] = {}
    for option in cluster.options:
        if option.role is Role.TARGET and _splits_layers(option.runtime):
            able.setdefault(option.profile, []).append(option)
    alike: dict[tuple[str, str], list[Device]] = {}
    for device in cluster.devices:
        if device.kind != CPU_KIND and device.profile in able:
            alike.setdefault((device.host, device.profile), []).append(device)
    groups: list[Device] = []
    options: list[Option] = []
    for (_, profile), devices in alike.items():
        for ranks in request.target.splits:
            name = f"{profile}, {ranks} ranks"
            runs = [join_devices(members, name) for members in _list_runs(devices, ranks)]
            groups += runs
            if runs and name not in sources:
                sources[name] = behind[profile]
                options += _split_options(able[profile], request, sources[name], name, ranks)
    return replace(cluster, devices=(*cluster.devices, *groups), options=(*cluster.options, *options)), sources


def _splits_layers(runtime: str) -> bool:
    try:
        return isinstance(registry.get(runtime), TensorParallelAdapter)
    except AdapterUnavailable:
        return False


def _list_runs(devices: Sequence[Device], count: int) -> Iterator[Sequence[Device]]:
    """Yield the devices that follow each other by their numbers, so many at a time; by their order where none of them
    is there."""
    numbers = [find_index(device.names[0][1]) if device.names else place for place, device in enumerate(devices)]
    known = sorted((number, place) for place, number in enumerate(numbers) if number is not None)
    for at in range(len(known) - count + 1):
        run = known[at : at + count]
        if run[-1][0] - run[0][0] == count - 1:
            yield [devices[place] for _, place in run]


def _split_options(
    options: Sequence[Option], request: PlanRequest, source: DeviceSource, profile: str, ranks: int
) -> Iterator[Option]:
    """Yield options of one device as they are over so many: as measured where that was, else divided."""
    target, known = request.target, dict[tuple[str, str, int], Option]()
    if isinstance(source, MeasuredHardware):
        measured = source.options(target, (), request.exactness, 0, ranks)
        known = {(option.runtime, option.weights, option.threads): option for option in measured}
    for option in options:
        split = split_option(option, target, ranks)
        whole = known.get((option.runtime, option.weights, option.threads))
        if whole is not None:  # of its memory rank 0's part alone was seen
            memory = ("layer_bytes", "kv_bytes_per_token", "ends", "fixed_bytes", "workspace_bytes", "ranks")
            split = replace(whole, **{name: getattr(split, name) for name in memory})
        yield replace(split, profile=profile)


def split_option(option: Option, target: PlannedModel, ranks: int) -> Option:
    """Return what a target takes where each of its layers is split over ranks.

    Weights and KV cache are divided; a process, its workspace and the logits are there once for each rank. Parts are
    added twice in a layer and behind the embedding, and the logits are gathered. A ring moves 2 (n - 1) / n of a sum's
    bytes (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009).
    """
    shape, sums, share = target.shape, 2 * target.shape.layers + 1, (ranks - 1) / ranks
    row_bytes = share * (2 * sums * target.facts.hidden_bytes + HIDDEN_BYTES * shape.vocabulary)
    efficiency = EFFICIENCY["gpu"]
    cost = option.cost.split_over(
        ranks,
        efficiency.layer_ms * shape.layers,
        (sums + 1) * RANK_SUM_MS,
        row_bytes / RANK_LINK_BYTES_PER_S * MS_PER_S,
    )
    return replace(
        option,
        cost=replace(cost, error=max(cost.error, efficiency.error)),
        ends=replace(option.ends, logits=ranks * option.ends.logits),
        fixed_bytes=ranks * option.fixed_bytes,
        workspace_bytes=ranks * option.workspace_bytes,
        source=option.source if option.source in ("datasheet", "estimate") else "split",
        bits="",
        ranks=ranks,
    )
