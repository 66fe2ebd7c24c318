"""A target in layer shards: which devices, which ranges, and drafts for it.

The shards are cut for one depth and one number of micro-batches at a time (policies/pairing.py says what these are),
beginning with none and one; what turns out best for the shards found is what they are cut for next, until nothing gets
better. With several micro-batches a round takes the longer of the sum over the shards and of the slowest shard times
their number, so the slowest is bounded, and the bound is moved until the two meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np

from device_profiles.link import LinkProfile
from device_profiles.profile import Exactness
from policies.pairing import context_tokens, kv_bytes, tokens_per_round
from policies.placement import workers
from policies.placement.candidate import Candidate, Placed, Rated, Where, problem, rated
from policies.placement.narrow import narrow
from policies.placement.pairs import APART, fastest
from policies.placement.rows import Floats, Index, Ints, Rows, draft_rows
from policies.placement.search import Ground
from policies.placement.shards import Hops, Items, Taken, cut
from policies.plan import Drafter, Option

_TURNS = 3  # how often shards are cut anew for the depth and the micro-batches that were best for the last ones
_BOUNDS = 5  # how often the bound on the slowest shard is moved, at most
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
    return None if best is None else _with_own_draft(task, _refined(task, best))


def _is_better(one: Rated | None, other: Rated | None) -> bool:
    if one is None or other is None:
        return one is not None
    return one.prediction.goodput_tokens_per_s > other.prediction.goodput_tokens_per_s * _BETTER


def _refined(task: _Task, first: Rated) -> Rated:
    """Cut again for what was best for the shards so far, and for as many micro-batches as there can be."""
    best, tried = first, {(0, 1, "")}
    aims = [_aim_of(first), _Aim(None, 0, min(task.sequences, _shard_counts(task)[-1]))]
    for _ in range(_TURNS):
        for aim in aims:
            key = (aim.depth, aim.micro_batches, aim.drafter.name if aim.drafter else "")
            found = None if key in tried else _best_for(task, aim)
            tried.add(key)
            best = found if found is not None and _is_better(found, best) else best
        aims = [_aim_of(best)]
    return best


def _aim_of(one: Rated) -> _Aim:
    return _Aim(one.candidate.drafter, one.prediction.depth, one.prediction.micro_batches)


def _best_for(task: _Task, aim: _Aim) -> Rated | None:
    return _best_with_drafts(task, _shards(task, aim, frozenset()))


def _with_own_draft(task: _Task, best: Rated) -> Rated:
    """Look whether the device that drafts fastest is worth more as the draft than as a shard."""
    in_use = {one.device.id for one in best.candidate.target}
    for device in _best_drafting(task, in_use):
        found = _best_with_drafts(task, _shards(task, _aim_of(best), frozenset({device})))
        best = found if found is not None and _is_better(found, best) else best
    return best


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


def _best_drafting(task: _Task, in_use: set[str]) -> Iterator[int]:
    """Yield, for each drafter, the device that drafts fastest, where it is in use."""
    for _, rows in sorted(task.drafts.items()):
        if len(rows):
            depth = (rows.ms.shape[1] - 1) // 2
            first = int(rows.device[np.lexsort((task.index.tie[rows.device], rows.ms[:, depth]))[0]])
            if task.index.devices[first].id in in_use:
                yield first


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
    total, slowest = _times(taken, items, stage)
    best_ms, low, high = max(total, count * slowest), total / count, slowest
    for turn in range(_BOUNDS if count * slowest > total else 0):
        if high < low * _CLOSE:
            break
        bound = low * _CLOSE if turn == 0 else (low + high) / 2
        taken = cut(_bounded(items, stage, bound), layers, hops, _shard_counts(task))
        if taken is None:
            low = bound
            continue
        total, slowest = _times(taken, items, stage)
        if max(total, count * slowest) < best_ms:
            best, best_ms = taken, max(total, count * slowest)
        low, high = (low, bound) if count * slowest > total else (bound, high)
    return _placed(task, items, best)


def _times(taken: list[Taken], items: Items, stage: Floats) -> tuple[float, float]:
    """Return the sum of what the shards take, and the slowest."""
    times = [stage[one.item, 0] + stage[one.item, 1] * one.layers for one in taken]
    return float(sum(items.fixed_ms[one.item] + items.layer_ms[one.item] * one.layers for one in taken)), float(
        max(times)
    )


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
    coverage = aim.drafter.coverage if aim.drafter is not None and aim.depth else 1.0
    verify = option.cost.ms(sequences * max(aim.depth + 1, paid), sequences, context)
    plain = option.cost.ms(sequences * paid, sequences, context)
    done = load.reused_prompt_tokens
    prompt = max(1, load.prompt_tokens - done)
    prefill = option.cost.prefill_ms(prompt, done=done, chunk_rows=load.prefill_chunk_rows)
    fixed = option.overhead_ms + option.overhead_sequence_ms * sequences
    chunks = ceil(prompt / load.prefill_chunk_rows)
    mean = coverage * verify + (1.0 - coverage) * plain
    return (
        fixed + prompts * chunks * option.overhead_ms,
        (mean + prompts * prefill) / layers,
        fixed,
        mean / layers,
    )


def _hops(task: _Task, aim: _Aim, prompts: float) -> Hops:
    load, links = task.ground.wanted.workload, task.ground.links.defaults
    rows = ceil(task.sequences / aim.micro_batches) * (aim.depth + 1)
    prompt = max(1, load.prompt_tokens - load.reused_prompt_tokens)

    def forward(link: LinkProfile) -> float:
        size = load.target.hidden_bytes
        return link.transfer_ms(size * rows) + prompts * link.transfer_ms(size * prompt)

    def back(link: LinkProfile) -> float:
        return (1.0 + prompts) * link.rtt_ms / 2

    kinds = (links.same_host, links.same_zone, links.other_zone)
    return Hops(*(forward(one) for one in kinds), *(back(one) for one in kinds))


def _placed(task: _Task, items: Items, taken: list[Taken]) -> tuple[Placed, ...]:
    placed, first = [], 0
    for one in taken:
        device = task.index.devices[int(items.device[one.item])]
        placed.append(Placed(device, task.options[int(items.option[one.item])], first, first + one.layers))
        first += one.layers
    return tuple(placed)


def _best_with_drafts(task: _Task, target: tuple[Placed, ...]) -> Rated | None:
    best: Rated | None = None
    ground = task.ground
    cores = {host.name: workers.cores_left(host, ground.taken_cores) for host in ground.left.hosts.values()}
    for candidate in _candidates(task, target):
        if not problem(candidate, cores, ground.wanted.workload, ground.wanted.constraints):
            found = rated(candidate, ground.links, ground.wanted)
            best = found if _is_better(found, best) else best
    return best


def _candidates(task: _Task, target: tuple[Placed, ...]) -> Iterator[Candidate]:
    if not target:
        return
    yield Candidate(target, task.sequences)
    for drafter in sorted(task.ground.wanted.workload.drafters, key=lambda one: one.name):
        if drafter.model is None:
            yield Candidate(target, task.sequences, drafter)
            continue
        for row, where in _near_drafts(task, target, drafter):
            rows = task.drafts[drafter.name]
            device, option = task.index.devices[int(rows.device[row])], rows.options[int(rows.option[row])]
            yield Candidate(target, task.sequences, drafter, Placed(device, option, 0, drafter.model.layers), where)


def _near_drafts(task: _Task, target: tuple[Placed, ...], drafter: Drafter) -> Iterator[tuple[int, Where]]:
    """Yield the fastest drafts on the last shard's host, in its zone, and elsewhere, on devices without a shard."""
    rows, index = task.drafts[drafter.name], task.index
    names = {one.device.id for one in target}
    numbers = np.array([number for number, one in enumerate(index.devices) if one.id in names], np.int64)
    last = next(number for number in numbers if index.devices[number].id == target[-1].device.id)
    device = rows.device
    near = np.where(index.host[device] == index.host[last], int(Where.HOST), int(Where.ZONE))
    near = np.where(index.zone[device] == index.zone[last], near, int(Where.FAR))
    free = ~np.isin(device, numbers)
    least = APART[task.ground.wanted.constraints.apart]
    if least >= Where.ZONE:
        free &= ~np.isin(index.host[device], index.host[numbers])
    if least >= Where.FAR:
        free &= ~np.isin(index.zone[device], index.zone[numbers])
    among = np.flatnonzero(free)
    if len(among):
        for row in fastest(rows, among, near[among], index, keep=1):
            yield int(row), Where(int(near[row]))
