"""A target in layer shards: which devices, which ranges, and drafts for it.

The shards are cut for one depth and one number of micro-batches at a time (policies/pairing.py says what these are),
beginning with none and one; what turns out best for the shards found is what they are cut for next, until nothing gets
better. With several micro-batches a round takes the longer of the sum over the shards and of the slowest shard times
their number, so the slowest is bounded, and the bound is moved until the two meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from device_profiles.profile import Exactness
from policies.drafted import changes_of, drafted_shares, tokens_per_round
from policies.parts import Part, TargetTimes, context_tokens, kv_bytes, micro_batch_counts
from policies.placement import workers
from policies.placement.candidate import Candidate, Placed, Rated, Where, problem, rated
from policies.placement.links import Links
from policies.placement.narrow import narrow
from policies.placement.order import Traffic, numbered, ordered
from policies.placement.pairs import APART, fastest
from policies.placement.rows import Floats, Index, Ints, Rows, draft_rows
from policies.placement.search import Ground
from policies.placement.shards import Hops, Items, Taken, cut
from policies.plan import Device, Drafter, Option

_TURNS = 3  # how often shards are cut anew for the depth and the micro-batches that were best for the last ones
_BOUNDS = 5  # how often the bound on the slowest shard is moved, at most
_BOUNDS_OF_FEW = 10  # with few devices
_EXCHANGES = 2  # how often devices are exchanged, at most
_KEPT = 6  # devices that may be kept free of shards to draft
_FEW = 24  # devices; with so few there is time to look more closely
_VERY_FEW = 10
_FEW_COUNTS = 8  # of micro-batches, all of which are looked at
_CLOSE = 1.02  # until it is known so closely
_BETTER = 1.0 + 1e-9


@dataclass(frozen=True, slots=True)
class _Task:
    """What shards are cut from: one item for each device and option that can hold a layer of `sequences` sequences."""

    ground: Ground
    index: Index
    sequences: int
    options: tuple[Option, ...]
    option: Ints
    device: Ints
    most: Ints
    drafts: Mapping[str, Rows]


@dataclass(frozen=True, slots=True)
class _Aim:
    """What shards are cut for."""

    drafter: Drafter | None
    depth: int
    micro_batches: int


def best_sharded(ground: Ground) -> Rated | None:
    """Return the best way to run the target in layer shards, None where there is none: with as many sequences at once
    as are asked for, or half as many as long as that is better (or the first that fits)."""
    best, task = None, _task(ground, ground.concurrency)
    sequences = ground.concurrency
    while sequences:
        attempt = _task(ground, sequences)
        found = _best_for(attempt, _Aim(None, 0, 1))
        if best is not None and not _is_better(found, best):
            break
        best, task = found, attempt
        sequences //= 2
    return None if best is None else _exchanged(task, _refined(task, best))


def _is_better(one: Rated | None, other: Rated | None) -> bool:
    if one is None or other is None:
        return one is not None
    return one.prediction.goodput_tokens_per_s > other.prediction.goodput_tokens_per_s * _BETTER


def _refined(task: _Task, first: Rated) -> Rated:
    """Cut again for what was best for the shards so far, with other numbers of micro-batches too."""
    best, tried = first, {(0, 1, "")}
    for _ in range(_TURNS):
        for aim in _aims(task, best):
            key = (aim.depth, aim.micro_batches, aim.drafter.name if aim.drafter else "")
            found = None if key in tried else _best_for(task, aim)
            tried.add(key)
            best = found if found is not None and _is_better(found, best) else best
    return best


def _exchanged(task: _Task, best: Rated) -> Rated:
    """Where there are very few devices, look whether others do better: one more, one less, or one for another, as a
    shard that drafts better, or one whose link is not like the others."""
    if len(np.unique(task.device)) > _VERY_FEW:
        return best
    every = {int(one) for one in np.unique(task.device)}
    for _ in range(_EXCHANGES):
        names = {one.device.id for one in best.candidate.target}
        now = {one for one in every if task.index.devices[one].id in names}
        more_sets: list[set[int]] = [set(), *({one} for one in every - now)]
        sets = {frozenset((now - {out}) | more) for out in (*now, -1) for more in more_sets}
        found = [best]
        for some in sorted(sets - {frozenset(now)}, key=sorted):
            aim = _aim_of(best)
            other = _best_with_drafts(task, _shards(task, aim, frozenset(every - some)), aim)
            found += [other] if other is not None and _is_better(other, best) else []
        if len(found) == 1:
            break
        best = max(found, key=lambda one: one.prediction.goodput_tokens_per_s)
    return best


def _aims(task: _Task, best: Rated) -> Iterator[_Aim]:
    """Yield what to cut for next: the depth that was best, with as many micro-batches as were best, as there are
    shards, as there may be, and as there are sequences; with every number of them where there are few devices."""
    now = _aim_of(best)
    yield now
    counts = micro_batch_counts(task.sequences)
    if len(np.unique(task.device)) > _FEW or len(counts) > _FEW_COUNTS:
        about = (len(best.candidate.target), _shard_counts(task)[-1], task.sequences)
        counts = sorted({max(count for count in counts if count <= one) for one in about})
    for count in counts:
        yield replace(now, micro_batches=count)


def _aim_of(one: Rated) -> _Aim:
    return _Aim(one.candidate.drafter, one.prediction.depth, one.prediction.micro_batches)


def _best_for(task: _Task, aim: _Aim) -> Rated | None:
    """Return the best that shards cut for this aim can do, where a device may be kept free of them to draft."""
    best = _best_with_drafts(task, _shards(task, aim, frozenset()), aim)
    if best is None or not task.drafts:
        return best
    for device in _kept_to_draft(task, best):
        found = _best_with_drafts(task, _shards(task, aim, frozenset({device})), aim)
        best = found if found is not None and _is_better(found, best) else best
    return best


def _kept_to_draft(task: _Task, best: Rated) -> list[int]:
    """Return the devices with a shard that draft faster than any without one; those that run a layer slowest come
    first, because the shards miss them least. Where there are many devices, the fastest drafter alone."""
    in_use = {one.device.id: _layer_ms(one, task) for one in best.candidate.target}
    numbers = np.array([number for number, one in enumerate(task.index.devices) if one.id in in_use], np.int64)
    found: dict[int, float] = {}
    for _, rows in sorted(task.drafts.items()):
        if not len(rows):
            continue
        ms, busy = rows.ms[:, (rows.ms.shape[1] - 1) // 2], np.isin(rows.device, numbers)
        fastest_free = ms[~busy].min(initial=np.inf)
        found |= {int(rows.device[row]): float(ms[row]) for row in np.flatnonzero(busy & (ms < fastest_free))}
    if len(np.unique(task.device)) > _FEW:
        return sorted(found, key=lambda number: (found[number], number))[:1]
    return sorted(found, key=lambda number: (-in_use[task.index.devices[number].id], number))[:_KEPT]


def _layer_ms(one: Placed, task: _Task) -> float:
    rows = task.sequences
    return one.option.cost.ms(rows, rows, context_tokens(task.ground.wanted.workload)) / (1.0 - one.device.utilisation)


def _task(ground: Ground, sequences: int) -> _Task:
    load, index = ground.wanted.workload, ground.all_devices()
    layers, allowed = load.target.layers, {one.id for one in ground.left.target_devices}
    options: list[Option] = []
    columns: list[tuple[Ints, Ints, Ints]] = []
    for profile in sorted(ground.left.targets.keys() & index.profiles.keys()):
        devices = index.profiles[profile]
        devices = devices[np.array([index.devices[one].id in allowed for one in devices], np.bool_)]
        for one in ground.left.targets[profile]:
            room = index.room[devices] - workers.fixed_bytes(one, 0)
            a_layer = one.layer_bytes + kv_bytes(one, load, 1 / layers) * sequences
            most = np.clip(np.floor(room / a_layer), 0, layers).astype(np.int64)
            fits = (most > 0) & (one.threads <= index.cores[devices])
            columns.append((np.full(int(fits.sum()), len(options)), devices[fits], most[fits]))
            options.append(one)
    none = np.empty(0, np.int64)
    number, device, count = (np.concatenate(part) for part in zip(*columns, (none, none, none), strict=True))
    may_draft = {one.id for one in ground.left.draft_devices}
    can = np.array([one.id in may_draft for one in index.devices], np.bool_)
    drafts = {
        drafter.name: draft_rows(index, ground.left.drafts, drafter, load, can, sequences)[0]
        for drafter in load.drafters
        if drafter.model is not None
    }
    return _Task(ground, index, sequences, tuple(options), number, device, count, drafts)


def _shard_counts(task: _Task) -> range:
    limits = task.ground.wanted.constraints
    layers = task.ground.wanted.workload.target.layers
    if limits.shards:
        return range(limits.shards, limits.shards + 1)
    return range(2, max(2, min(limits.max_shards, layers)) + 1)


def _shards(task: _Task, aim: _Aim, without: frozenset[int]) -> tuple[Placed, ...]:
    """Return the shards with the shortest round, none where there are none."""
    items, hops, stage = _items(task, aim, without)
    layers = task.ground.wanted.workload.target.layers
    if not len(items.device):
        return ()
    items, stage = narrow(items, stage, layers, hops, _shard_counts(task)[-1])
    taken = cut(items, layers, hops, _shard_counts(task))
    if taken is None:
        return ()
    count, best = aim.micro_batches, taken
    best_ms, total, slowest = _times(taken, items, stage, hops, count)
    low, high = total / count, slowest
    few = len(np.unique(items.device)) <= _FEW
    for turn in range((_BOUNDS_OF_FEW if few else _BOUNDS) if count * slowest > total else 0):
        if high < low * _CLOSE and not few:
            break
        bound = low * _CLOSE if turn == 0 else (low + high) / 2
        taken = cut(_bounded(items, stage, bound), layers, hops, _shard_counts(task))
        if taken is None:
            low = bound
            continue
        round_ms, total, slowest = _times(taken, items, stage, hops, count)
        if round_ms < best_ms:
            best, best_ms = taken, round_ms
        low, high = (low, min(bound, slowest)) if count * slowest > total else (bound, high)
    return _placed(task, items, best)


def _times(taken: list[Taken], items: Items, stage: Floats, hops: Hops, count: int) -> tuple[float, float, float]:
    """Return what a round takes with `count` micro-batches, the sum of what the shards take of it, and the slowest."""
    rows = [one.item for one in taken]
    layers = np.array([one.layers for one in taken])
    times = stage[rows, 0] + stage[rows, 1] * layers
    prefill = items.fixed_ms[rows] + items.layer_ms[rows] * layers - times
    host, zone = items.host[rows], items.zone[rows]
    hop = np.where(zone[1:] != zone[:-1], hops.far, np.where(host[1:] != host[:-1], hops.zone, hops.host))
    total, slowest = float(times.sum() + hop.sum()), float(times.max())
    return max(total, count * slowest) + float(prefill.sum()), total, slowest


def _bounded(items: Items, stage: Floats, most_ms: float) -> Items:
    """Return the items with no more layers than run in that time."""
    most = np.floor((most_ms - stage[:, 0]) / np.maximum(stage[:, 1], 1e-12))
    return items.with_most(np.clip(most, 0, items.most).astype(np.int64))


def _items(task: _Task, aim: _Aim, without: frozenset[int]) -> tuple[Items, Hops, Floats]:
    """Return what can take layers, with the round's share of prefill in it; what a hop costs; and what a shard takes of
    a round alone: `stage[item] = (fixed, by the layer)`."""
    load = task.ground.wanted.workload
    tokens = tokens_per_round(aim.drafter, aim.depth)
    prompts = task.sequences * tokens / load.output_tokens / aim.micro_batches
    costs = np.array([_cost(one, task, aim, prompts) for one in task.options]).reshape(-1, 4)
    keep = np.flatnonzero(~np.isin(task.device, list(without)))
    device, chosen = task.device[keep], costs[task.option[keep]]
    stretch = 1.0 / (1.0 - task.index.utilisation[device])
    items = Items(
        device=device,
        host=task.index.host[device],
        zone=task.index.zone[device],
        fixed_ms=stretch * chosen[:, 0],
        layer_ms=stretch * chosen[:, 1],
        most=task.most[keep],
        tie=task.index.tie[device] * len(task.options) + task.option[keep],
        option=task.option[keep],
    )
    return items, _hops(task, aim, prompts), stretch[:, None] * chosen[:, 2:]


def _cost(option: Option, task: _Task, aim: _Aim, prompts: float) -> tuple[float, float, float, float]:
    """Return (fixed, by the layer) of a round with its share of prefill, and the same of its verification alone."""
    load = task.ground.wanted.workload
    layers, sequences = load.target.layers, ceil(task.sequences / aim.micro_batches)
    paid = option.paid_rows if load.exactness is Exactness.BIT else 1
    context = context_tokens(load)
    changes = changes_of(aim.drafter, task.sequences) if aim.drafter is not None and aim.depth else 0.0
    mean = sum(
        share * option.cost.ms(sequences * max(count + 1, paid), sequences, context, changes=changes)
        for count, share in drafted_shares(aim.drafter, aim.depth)
    )
    done = load.reused_prompt_tokens
    prompt = max(1, load.prompt_tokens - done)
    beside = task.sequences > 1
    prefill = option.cost.prefill_ms(prompt, done=done, chunk_rows=load.prefill_chunk_rows, beside=beside)
    fixed = option.overhead_ms + option.overhead_sequence_ms * sequences
    chunks = 0 if beside else ceil(prompt / load.prefill_chunk_rows)
    return (
        fixed + prompts * chunks * option.overhead_ms,
        (mean + prompts * prefill) / layers,
        fixed,
        mean / layers,
    )


def _traffic(task: _Task, aim: _Aim, prompts: float) -> Traffic:
    load = task.ground.wanted.workload
    rows = ceil(task.sequences / aim.micro_batches) * (aim.depth + 1)
    prompt = max(1, load.prompt_tokens - load.reused_prompt_tokens)
    return Traffic(1.0 + prompts, load.target.hidden_bytes * (rows + prompts * prompt))


def _hops(task: _Task, aim: _Aim, prompts: float) -> Hops:
    kinds, traffic = task.ground.links.typical(), _traffic(task, aim, prompts)
    return Hops(*(traffic.forward_ms(one) for one in kinds), *(traffic.back_ms(one) for one in kinds))


def _placed(task: _Task, items: Items, taken: list[Taken]) -> tuple[Placed, ...]:
    devices = [task.index.devices[int(items.device[one.item])] for one in taken]
    options = [task.options[int(items.option[one.item])] for one in taken]
    whole = zip(devices, options, taken, strict=True)
    return numbered([Placed(device, option, 0, one.layers) for device, option, one in whole])


def _best_with_drafts(task: _Task, target: tuple[Placed, ...], aim: _Aim) -> Rated | None:
    """Return what these shards can do at most, with any drafter and in any order of their hosts."""
    if not target:
        return None
    ground, load = task.ground, task.ground.wanted.workload
    cores = {host.name: workers.cores_left(host, ground.taken_cores) for host in ground.left.hosts.values()}
    parts = [Part(one.option, one.layers / load.target.layers, one.device.utilisation) for one in target]
    times, best = TargetTimes(parts, task.sequences, load), None
    for candidate in _candidates(task, target, aim):
        if not problem(candidate, cores, load, ground.wanted.constraints):
            found = rated(candidate, ground.links, ground.wanted, times)
            best = found if _is_better(found, best) else best
    return best


def _candidates(task: _Task, target: tuple[Placed, ...], aim: _Aim) -> Iterator[Candidate]:
    load, links = task.ground.wanted.workload, task.ground.links
    traffic = _traffic(task, aim, task.sequences / load.output_tokens / aim.micro_batches)
    alone = ordered(target, "", links, traffic)
    yield Candidate(alone, task.sequences)
    for drafter in sorted(load.drafters, key=lambda one: (one.name, one.runtime)):
        if not all(drafter.serves(one.option.runtime) for one in target):
            continue
        if drafter.model is None:
            yield Candidate(alone, task.sequences, drafter)
            continue
        rows = task.drafts[drafter.name]
        for row in _near_drafts(task, target, rows):
            device, option = task.index.devices[int(rows.device[row])], rows.options[int(rows.option[row])]
            placed = ordered(target, device.host, links, traffic)
            where = _where(device, placed[-1].device, links)
            yield Candidate(placed, task.sequences, drafter, Placed(device, option, 0, drafter.model.layers), where)


def _where(draft: Device, last: Device, links: Links) -> Where:
    if draft.host == last.host:
        return Where.HOST
    return Where.ZONE if links.hosts[draft.host].zone == links.hosts[last.host].zone else Where.FAR


def _near_drafts(task: _Task, target: tuple[Placed, ...], rows: Rows) -> Ints:
    """Return the fastest drafts on each of the shards' hosts, in each of their zones, and elsewhere, all of them on
    devices without a shard."""
    index, names = task.index, {one.device.id for one in target}
    numbers = np.array([number for number, one in enumerate(index.devices) if one.id in names], np.int64)
    host, zone = index.host[rows.device], index.zone[rows.device]
    on_host, in_zone = np.isin(host, index.host[numbers]), np.isin(zone, index.zone[numbers])
    least = APART[task.ground.wanted.constraints.apart]
    free = ~np.isin(rows.device, numbers)
    free &= ~(on_host & (least >= Where.ZONE)) & ~(in_zone & (least >= Where.FAR))
    among = np.flatnonzero(free)
    group = np.where(on_host, host, np.where(in_zone, len(index.hosts) + zone, -1))
    measured = task.ground.links.measured
    if measured and len(among) <= _FEW:
        return among
    return fastest(rows, among, group[among], index, keep=1) if len(among) else among
