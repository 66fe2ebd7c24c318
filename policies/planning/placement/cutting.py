"""A target cut into layer shards for one depth and one number of micro-batches: from what, and what the shards take.

With several micro-batches a round takes the longer of two times. They are the sum over the shards, and the time of the
slowest shard times their number. So the slowest is bounded, and the bound is moved until the two meet.

With the objectives `cost` and `energy` a product is to be small. It is a round's time T times the burden B of the
devices, a price or a power. Its least value is where T + x B is least for some x, for the product is quasi-concave. So
each device is charged x times its burden, in ms of a round, and sharded.py moves x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from device_profiles.profile import Exactness
from policies.planning.draft_yield import changes_of, compute_draft_length_shares, tokens_per_round
from policies.planning.placement import workers
from policies.planning.placement.candidate import PlacedShard
from policies.planning.placement.order import EndRoom, Traffic, number_layers
from policies.planning.placement.rows import Floats, Index, Ints, OptionRows, draft_rows
from policies.planning.placement.search import SearchSpace
from policies.planning.placement.shards import CutShard, Hops, Items, cut_shards
from policies.planning.plan import DrafterFacts, Objective, Option
from policies.planning.shard_cost import PREFILL_CHUNK_ROWS, context_tokens, stretch_costs

_FEW = 64  # devices; so many are all looked at
_ZONES = 3  # zones that are kept of those that can hold the target alone
_BOUNDS = 5  # how often the bound on the slowest shard is moved, at most
_BOUNDS_OF_FEW = 10  # with few devices
FEW = 24  # devices; with so few there is time to look more closely
_CLOSE = 1.02  # until it is known so closely


def narrow(items: Items, stage: Floats, layers: int, hops: Hops, most: int) -> tuple[Items, Floats]:
    """Return the items of the best zones and of the best hosts in them. There a target of so many layers, in at most
    `most` shards, seems fastest.

    A device's price is what a layer takes on it when it is full, hop included. A zone is rated by its cheapest devices
    that together hold the target. Where no zone holds it alone, they are taken by price, until there is three times
    the room."""
    if len(np.unique(items.device)) <= _FEW:
        return items, stage
    price = _price(items, hops.zone)
    zones = _zones(items, price, layers, hops, most)
    kept = np.flatnonzero(np.isin(items.zone, zones))
    hosts = [_hosts(items, kept[items.zone[kept] == zone], hops, most) for zone in zones]
    kept = np.flatnonzero(np.isin(items.host, np.concatenate(hosts)))
    return items.of(kept), stage[kept]


def _price(items: Items, hop: float) -> Floats:
    price: Floats = items.layer_ms + (items.fixed_ms + items.host_ms + hop) / items.most
    return price


def _best_items(items: Items, rows: Ints, price: Floats) -> Ints:
    ordered = rows[np.lexsort((items.tie[rows], price[rows]))]
    _, first = np.unique(items.device[ordered], return_index=True)
    return ordered[np.sort(first)]


def _zones(items: Items, price: Floats, layers: int, hops: Hops, most: int) -> Ints:
    alone, all_of = [], []
    for zone in np.unique(items.zone):
        rows = _best_items(items, np.flatnonzero(items.zone == zone), price)
        room = int(items.most[rows].sum())
        all_of.append((float(price[rows[:most]].mean()), int(zone), room))
        for order in (rows, rows[np.argsort(-items.most[rows], kind="stable")]):
            ms = _estimate_filled_ms(items, order[:most], layers, hops.zone)
            if np.isfinite(ms):
                alone.append((ms, int(zone)))
    kept: list[int] = []
    for _, zone in sorted(alone):
        if zone not in kept and len(kept) < _ZONES:
            kept.append(zone)
    room = 0
    for _, zone, more in sorted(all_of):
        if not alone and room < 3 * layers:
            kept.append(zone)
            room += more
    return np.array(kept, np.int64)


def _estimate_filled_ms(items: Items, rows: Ints, layers: int, hop: float) -> float:
    """Return what these devices take, filled in this order until they hold all layers; infinite where they do not."""
    room = np.cumsum(items.most[rows])
    if not len(rows) or room[-1] < layers:
        return float("inf")
    count = int(np.searchsorted(room, layers)) + 1
    used = items.most[rows[:count]].astype(float)
    used[-1] -= room[count - 1] - layers
    hosts = np.unique(items.host[rows[:count]], return_index=True)[1]
    paid = float(items.host_ms[rows[:count]][hosts].sum())
    return paid + float((items.fixed_ms[rows[:count]] + hop + used * items.layer_ms[rows[:count]]).sum())


def _hosts(items: Items, rows: Ints, hops: Hops, most: int) -> Ints:
    """Return the hosts whose devices are cheapest, together (with the hops of one host) or alone."""
    price = _price(items, hops.host)
    hosts = np.unique(items.host[rows])
    rated = []
    for host in hosts:
        mine = _best_items(items, rows[items.host[rows] == host], price)[:most]
        together = float((price[mine] * items.most[mine]).sum() + hops.zone - hops.host) / float(items.most[mine].sum())
        rated.append((together, int(items.tie[mine].min()), int(host)))
    alone = _best_items(items, rows, _price(items, hops.zone))[:most]
    return np.unique(
        np.concatenate([[host for _, _, host in sorted(rated)[: 2 + most // 2]], items.host[alone]])
    ).astype(np.int64)


@dataclass(frozen=True, slots=True)
class CutTask:
    """What shards are cut from: one item for each device and option that can hold a layer of `sequences` sequences. It
    can hold `most` of them, and others with an end of the model."""

    ground: SearchSpace
    index: Index
    sequences: int
    options: tuple[Option, ...]
    option: Ints
    device: Ints
    most: Ints
    most_at_ends: Ints
    drafts: Mapping[str, OptionRows]


@dataclass(frozen=True, slots=True)
class CutGoal:
    """What shards are cut for. `burden_ms`: what a unit of the devices' burden counts as, in ms of a round."""

    drafter: DrafterFacts | None
    depth: int
    micro_batches: int
    burden_ms: float = 0.0


def task_of(ground: SearchSpace, sequences: int) -> CutTask:
    load, index = ground.wanted.workload, ground.all_devices()
    allowed = {device.id for device in ground.left.target_devices}
    options: list[Option] = []
    columns: list[tuple[Ints, ...]] = []
    for profile in sorted(ground.left.targets.keys() & index.profiles.keys()):
        devices = index.profiles[profile]
        devices = devices[np.array([index.devices[device].id in allowed for device in devices], np.bool_)]
        for target in ground.left.targets[profile]:
            room = index.room[devices]
            most = workers.count_fitting_layers(target, room, load, sequences)
            with_first = workers.count_fitting_layers(target, room, load, sequences, first=True)
            with_last = workers.count_fitting_layers(target, room, load, sequences, last=True)
            fits = (most > 0) & (target.threads <= index.cores[devices])
            number = np.full(len(devices), len(options))
            columns.append(tuple(column[fits] for column in (number, devices, most, with_first, with_last)))
            options.append(target)
    none = (np.empty(0, np.int64),) * 5
    number, device, most, *at_ends = (np.concatenate(part) for part in zip(*columns, none, strict=True))
    may_draft = {device.id for device in ground.left.draft_devices}
    can = np.array([device.id in may_draft for device in index.devices], np.bool_)
    drafts = {
        drafter.name: draft_rows(index, ground.left.drafts, drafter, load, can, sequences)[0]
        for drafter in load.drafters
        if drafter.model is not None
    }
    return CutTask(ground, index, sequences, tuple(options), number, device, most, np.stack(at_ends, axis=1), drafts)


def shard_counts(task: CutTask) -> range:
    limits = task.ground.wanted.constraints
    layers = task.ground.wanted.workload.target.layers
    if limits.shards:
        return range(limits.shards, limits.shards + 1)
    return range(2, max(2, min(limits.max_shards, layers)) + 1)


def shards_for(task: CutTask, aim: CutGoal, without: frozenset[int]) -> tuple[PlacedShard, ...]:
    """Return the shards with the shortest round, none where there are none."""
    items, hops, stage = _items(task, aim, without)
    layers = task.ground.wanted.workload.target.layers
    if not len(items.device):
        return ()
    items, stage = narrow(items, stage, layers, hops, shard_counts(task)[-1])
    taken = cut_shards(items, layers, hops, shard_counts(task))
    if taken is None:
        return ()
    count, best = aim.micro_batches, taken
    best_ms, total, slowest = _times(taken, items, stage, hops, count)
    low, high = total / count, slowest
    few = len(np.unique(items.device)) <= FEW
    for turn in range((_BOUNDS_OF_FEW if few else _BOUNDS) if count * slowest > total else 0):
        if high < low * _CLOSE and not few:
            break
        bound = low * _CLOSE if turn == 0 else (low + high) / 2
        taken = cut_shards(_bound_items(items, stage, bound), layers, hops, shard_counts(task))
        if taken is None:
            low = bound
            continue
        round_ms, total, slowest = _times(taken, items, stage, hops, count)
        if round_ms < best_ms:
            best, best_ms = taken, round_ms
        low, high = (low, min(bound, slowest)) if count * slowest > total else (bound, high)
    return _place_shards(task, items, best)


def _times(taken: list[CutShard], items: Items, stage: Floats, hops: Hops, count: int) -> tuple[float, float, float]:
    """Return what a round takes with `count` micro-batches, the sum of what the shards take of it, and the slowest."""
    rows = [share.item for share in taken]
    layers = np.array([share.layers for share in taken])
    times = stage[rows, 0] + stage[rows, 1] * layers
    prefill = items.fixed_ms[rows] + items.layer_ms[rows] * layers - times
    host, zone = items.host[rows], items.zone[rows]
    paid = items.host_ms[rows][np.unique(host, return_index=True)[1]]
    hop = np.where(zone[1:] != zone[:-1], hops.far, np.where(host[1:] != host[:-1], hops.zone, hops.host))
    total, slowest = float(times.sum() + hop.sum()), float(times.max())
    return max(total, count * slowest) + float(prefill.sum() + paid.sum()), total, slowest


def _bound_items(items: Items, stage: Floats, most_ms: float) -> Items:
    most = np.floor((most_ms - stage[:, 0]) / np.maximum(stage[:, 1], 1e-12))
    return replace(
        items,
        most=np.clip(most, 0, items.most).astype(np.int64),
        most_at_ends=np.clip(most[:, None], 0, items.most_at_ends).astype(np.int64),
    )


def _items(task: CutTask, aim: CutGoal, without: frozenset[int]) -> tuple[Items, Hops, Floats]:
    """Return three things.

    - The devices that can take layers, with the round's share of prefill and of their burden in them.
    - The cost of a hop.
    - The time that a shard takes of a round alone: `stage[item] = (fixed, by the layer)`.
    """
    prompts = count_prompts(task, aim)
    costs = np.array([_cost(option, task, aim, prompts) for option in task.options]).reshape(-1, 4)
    keep = np.flatnonzero(~np.isin(task.device, list(without)))
    device, chosen = task.device[keep], costs[task.option[keep]]
    taken = np.array([option.taken for option in task.options])[task.option[keep]]
    stretch = stretch_costs(taken, task.index.utilisation[device])
    own, of_host = _burdens(task, aim, device)
    items = Items(
        device=device,
        host=task.index.host[device],
        zone=task.index.zone[device],
        fixed_ms=stretch * chosen[:, 0] + own,
        layer_ms=stretch * chosen[:, 1],
        host_ms=of_host,
        most=task.most[keep],
        most_at_ends=task.most_at_ends[keep],
        tie=task.index.tie[device] * len(task.options) + task.option[keep],
        option=task.option[keep],
    )
    return items, _hops(task, aim, prompts), stretch[:, None] * chosen[:, 2:]


def _burdens(task: CutTask, aim: CutGoal, device: Ints) -> tuple[Floats, Floats]:
    index, objective = task.index, task.ground.wanted.objective
    none = np.zeros(len(device))
    if objective is Objective.COST:
        return aim.burden_ms * index.price[device], aim.burden_ms * index.host_price[index.host[device]]
    return (aim.burden_ms * index.power[device] if objective is Objective.ENERGY else none), none


def count_prompts(task: CutTask, aim: CutGoal) -> float:
    """Return how many requests' prefill a micro-batch's round has a share of. It does not count for the latency of
    tokens."""
    wanted = task.ground.wanted
    if wanted.objective is Objective.LATENCY:
        return 0.0
    tokens = tokens_per_round(aim.drafter, aim.depth)
    return task.sequences * tokens / wanted.workload.output_tokens / aim.micro_batches


def _cost(option: Option, task: CutTask, aim: CutGoal, prompts: float) -> tuple[float, float, float, float]:
    """Return (fixed, by the layer) of a round with its share of prefill, and the same of its verification alone."""
    load = task.ground.wanted.workload
    layers, sequences = load.target.layers, ceil(task.sequences / aim.micro_batches)
    paid = option.min_rows if load.exactness is Exactness.BIT else 1
    context = context_tokens(load)
    changes = changes_of(aim.drafter, task.sequences) if aim.drafter is not None and aim.depth else 0.0
    mean = sum(
        share * option.cost.ms(sequences * max(count + 1, paid), sequences, context, changes=changes)
        for count, share in compute_draft_length_shares(aim.drafter, aim.depth)
    )
    beside = task.sequences > 1
    prefill = option.cost.prefill_ms(load.prompt_tokens, chunk_rows=PREFILL_CHUNK_ROWS, beside=beside)
    fixed = option.overhead_ms + option.overhead_sequence_ms * sequences
    chunks = 0 if beside else ceil(load.prompt_tokens / PREFILL_CHUNK_ROWS)
    return (
        fixed + prompts * chunks * option.overhead_ms,
        (mean + prompts * prefill) / layers,
        fixed,
        mean / layers,
    )


def find_end_room(task: CutTask, target: Sequence[PlacedShard]) -> EndRoom:
    """Return which devices of these shards may have the first or the last of them, with the layers that they have."""
    wanted = task.ground.wanted

    def has_room(placed: PlacedShard, *, first: bool = False, last: bool = False) -> bool:
        room = workers.room_bytes(placed.device, wanted.constraints)
        fits = workers.count_fitting_layers(
            placed.option, room, wanted.workload, task.sequences, first=first, last=last
        )
        return placed.layers <= int(fits)

    return EndRoom(
        frozenset(placed.device.id for placed in target if has_room(placed, first=True)),
        frozenset(placed.device.id for placed in target if has_room(placed, last=True)),
    )


def traffic_of(task: CutTask, aim: CutGoal, prompts: float) -> Traffic:
    """Return what crosses from shard to shard in a round, with its share of prefill (`prompts` of them)."""
    load = task.ground.wanted.workload
    rows = ceil(task.sequences / aim.micro_batches) * (aim.depth + 1)
    return Traffic(1.0 + prompts, load.target.hidden_bytes * (rows + prompts * load.prompt_tokens))


def _hops(task: CutTask, aim: CutGoal, prompts: float) -> Hops:
    kinds, traffic = task.ground.links.typical(), traffic_of(task, aim, prompts)
    return Hops(*(traffic.forward_ms(kind) for kind in kinds), *(traffic.back_ms(kind) for kind in kinds))


def _place_shards(task: CutTask, items: Items, taken: list[CutShard]) -> tuple[PlacedShard, ...]:
    devices = [task.index.devices[int(items.device[share.item])] for share in taken]
    options = [task.options[int(items.option[share.item])] for share in taken]
    whole = zip(devices, options, taken, strict=True)
    layers = task.ground.wanted.workload.target.layers
    return number_layers([PlacedShard(device, option, 0, share.layers, layers) for device, option, share in whole])
