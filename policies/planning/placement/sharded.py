"""A target in layer shards: which devices, which depth and micro-batches, and drafts for it.

The shards are cut (see `cutting`) for one depth and one number of micro-batches at a time, beginning with none and one.
What these are says policies/planning/throughput.py. The best depth and number for the shards found are what they are
cut for next, until nothing gets better. With the objectives `cost` and `energy` the same goes for what the burden of a
device counts as.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from policies.planning.placement import workers
from policies.planning.placement.alike import number_kinds
from policies.planning.placement.candidate import (
    Candidate,
    PlacedShard,
    ScoredCandidate,
    Where,
    find_fit_problem,
    rate_candidate,
)
from policies.planning.placement.cutting import (
    FEW,
    CutGoal,
    CutTask,
    count_prompts,
    find_end_room,
    shard_counts,
    shards_for,
    task_of,
    traffic_of,
)
from policies.planning.placement.links import Links
from policies.planning.placement.order import order_shards
from policies.planning.placement.pairs import APART, fastest
from policies.planning.placement.rows import Ints, OptionRows
from policies.planning.placement.search import SearchSpace
from policies.planning.plan import Device, Objective
from policies.planning.shard_cost import TargetTimes, context_tokens, micro_batch_counts, stretch_cost

# How often shards are cut anew for the depth and the micro-batches that were best for the last ones. Small clusters
# were 2.1 % from the proven best at most (ADR 0025).
_TURNS = 3
# How often devices are exchanged, at most. ADR 0025, as above, for links that were measured.
_EXCHANGES = 2
# Devices that may be kept free of shards to draft. Bounds time: each is a search of its own (ADR 0025).
_KEPT = 6
# Devices, up to which they are exchanged for each other (ADR 0025). Bounds time.
_VERY_FEW = 10
# Of micro-batches, all of which are looked at. Bounds time; above, they double.
_FEW_COUNTS = 8
# What a unit of burden counts as besides, times what is even for the best plan so far. ADR 0055: no gap in 24 clusters
# of 4 devices. More values save up to 3 % of 10,000, in 2 to 3 times the time.
_BURDENS = (3.0, 0.3)
# How often it is moved, at most. ADR 0055, as above.
_BURDEN_TURNS = 6


def best_sharded(ground: SearchSpace) -> ScoredCandidate | None:
    """Return the best way to run the target in layer shards, None where there is none.

    It runs as many sequences at once as are asked for. Else it runs half as many, as long as that is better or the
    first that fits.
    """
    sequences = ground.wanted.workload.bound_running(ground.concurrency)
    best, task = None, task_of(ground, sequences)
    while sequences:
        attempt = task_of(ground, sequences)
        scored = _best_for(attempt, CutGoal(None, 0, 1))
        if best is not None and not _is_better(scored, best):
            break
        best, task = scored, attempt
        sequences //= 2
    return None if best is None else _exchange_devices(task, _refine_cut(task, best))


def _is_better(scored: ScoredCandidate | None, other: ScoredCandidate | None) -> bool:
    return scored is not None and scored.beats(other)


def _refine_cut(task: CutTask, first: ScoredCandidate) -> ScoredCandidate:
    """Cut again for what was best for the shards so far, with other numbers of micro-batches too."""
    best, tried = first, {(0, 1, "", 0.0)}
    weighed = task.ground.wanted.objective in (Objective.COST, Objective.ENERGY)
    for _ in range(_BURDEN_TURNS if weighed else _TURNS):
        before = best
        for aim in _aims(task, best):
            key = (aim.depth, aim.micro_batches, aim.drafter.name if aim.drafter else "", float(f"{aim.burden_ms:.3g}"))
            scored = None if key in tried else _best_for(task, aim)
            tried.add(key)
            best = scored if scored is not None and _is_better(scored, best) else best
        if weighed and best is before:
            break
    return best


def _exchange_devices(task: CutTask, best: ScoredCandidate) -> ScoredCandidate:
    """Where there are very few devices, look whether other devices do better.

    Tried are one more, one less, or one for another: a shard that drafts better, or one whose link is
    unlike the others.
    """
    if len(np.unique(task.device)) > _VERY_FEW:
        return best
    every = {int(number) for number in np.unique(task.device)}
    for _ in range(_EXCHANGES):
        names = {placed.device.id for placed in best.candidate.target}
        now = {number for number in every if task.index.devices[number].id in names}
        more_sets: list[set[int]] = [set(), *({number} for number in every - now)]
        sets = {frozenset((now - {out}) | more) for out in (*now, -1) for more in more_sets}
        improved = [best]
        for some in _first_of_alike(task, sorted(sets - {frozenset(now)}, key=sorted)):
            aim = _aim_of(best, task)
            other = _best_with_drafts(task, shards_for(task, aim, frozenset(every - some)), aim)
            improved += [other] if other is not None and _is_better(other, best) else []
        if len(improved) == 1:
            break
        best = max(improved, key=lambda scored: scored.merit)
    return best


def _first_of_alike(task: CutTask, sets: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Return those sets of devices that differ by more than names: devices that are alike and on one host do the same
    (see `alike`)."""
    devices, targets = task.index.devices, {int(number) for number in task.device}
    drafts = {int(number) for rows in task.drafts.values() for number in rows.device}
    numbers = range(len(devices))
    kinds = number_kinds(devices, (number in targets for number in numbers), (number in drafts for number in numbers))
    first: dict[tuple[tuple[int, int], ...], frozenset[int]] = {}
    for some in sets:
        first.setdefault(tuple(sorted((int(task.index.host[number]), kinds[number]) for number in some)), some)
    return list(first.values())


def _aims(task: CutTask, best: ScoredCandidate) -> Iterator[CutGoal]:
    """Yield what to cut for next: the depth that was best, with several numbers of micro-batches.

    The numbers are the best one, that of the shards, the most shards that there may be, and that of the sequences.
    Where there are few devices, it is every number of them. Where a burden counts, it is what makes it even with the
    time of the best plan so far, and more and less of it.
    """
    now, few = _aim_of(best, task), len(np.unique(task.device)) <= FEW
    if now.burden_ms:
        several = _BURDENS if few else _BURDENS[:1]
        yield from (replace(now, burden_ms=factor * now.burden_ms) for factor in several)
    yield now
    if now.burden_ms and now.micro_batches > 1 and not few:
        return
    counts = micro_batch_counts(task.sequences)
    if not few or len(counts) > _FEW_COUNTS:
        about = (len(best.candidate.target), shard_counts(task)[-1], task.sequences)
        counts = sorted({max(count for count in counts if count <= most) for most in about})
    for count in counts:
        yield replace(now, micro_batches=count)


def _aim_of(scored: ScoredCandidate, task: CutTask) -> CutGoal:
    prediction, objective = scored.prediction, task.ground.wanted.objective
    even_ms = 0.0
    if objective in (Objective.COST, Objective.ENERGY):
        even_ms = prediction.round_ms * scored.merit[0] / prediction.goodput_tokens_per_s
    return CutGoal(scored.candidate.drafter, prediction.depth, prediction.micro_batches, even_ms)


def _best_for(task: CutTask, aim: CutGoal) -> ScoredCandidate | None:
    """Return the best that shards cut for this aim can do, where a device may be kept free of them to draft."""
    best = _best_with_drafts(task, shards_for(task, aim, frozenset()), aim)
    if best is None or not task.drafts:
        return best
    for device in _find_draft_reserves(task, best):
        scored = _best_with_drafts(task, shards_for(task, aim, frozenset({device})), aim)
        best = scored if scored is not None and _is_better(scored, best) else best
    return best


def _find_draft_reserves(task: CutTask, best: ScoredCandidate) -> list[int]:
    """Return the devices with a shard that draft faster than any without one. Those that run a layer
    slowest come first: the shards miss them least. Where there are many devices, the fastest drafter alone."""
    in_use = {placed.device.id: _layer_ms(placed, task) for placed in best.candidate.target}
    numbers = np.array([number for number, device in enumerate(task.index.devices) if device.id in in_use], np.int64)
    times: dict[int, float] = {}
    for _, rows in sorted(task.drafts.items()):
        if not len(rows):
            continue
        ms, busy = rows.ms[:, (rows.ms.shape[1] - 1) // 2], np.isin(rows.device, numbers)
        fastest_free = ms[~busy].min(initial=np.inf)
        times |= {int(rows.device[row]): float(ms[row]) for row in np.flatnonzero(busy & (ms < fastest_free))}
    if len(np.unique(task.device)) > FEW:
        return sorted(times, key=lambda number: (times[number], number))[:1]
    slowest_first = sorted(times, key=lambda number: (-in_use[task.index.devices[number].id], number))
    return [
        number
        for some in _first_of_alike(task, [frozenset({number}) for number in slowest_first])[:_KEPT]
        for number in some
    ]


def _layer_ms(placed: PlacedShard, task: CutTask) -> float:
    rows = task.sequences
    alone_ms = placed.option.cost.ms(rows, rows, context_tokens(task.ground.wanted.workload))
    return alone_ms * stretch_cost(placed.option.taken, placed.device.utilisation)


def _best_with_drafts(task: CutTask, target: tuple[PlacedShard, ...], aim: CutGoal) -> ScoredCandidate | None:
    """Return what these shards can do at most, with any drafter and in any order of their hosts."""
    if not target:
        return None
    ground, load = task.ground, task.ground.wanted.workload
    cores = {host.name: workers.cores_left(host, ground.taken_cores) for host in ground.left.hosts.values()}
    times, best = TargetTimes([placed.part for placed in target], task.sequences, load), None
    for candidate in _candidates(task, target, aim):
        if not find_fit_problem(candidate, cores, load, ground.wanted.constraints):
            scored = rate_candidate(candidate, ground.links, ground.wanted, times, ground.paid)
            best = scored if _is_better(scored, best) else best
    return best


def _candidates(task: CutTask, target: tuple[PlacedShard, ...], aim: CutGoal) -> Iterator[Candidate]:
    load, links = task.ground.wanted.workload, task.ground.links
    traffic = traffic_of(task, aim, count_prompts(task, replace(aim, drafter=None, depth=0)))
    room = find_end_room(task, target)
    alone = order_shards(target, "", links, traffic, room)
    yield Candidate(alone, task.sequences)
    for drafter in sorted(load.drafters, key=lambda drafter: (drafter.name, drafter.runtime)):
        if not all(drafter.serves(placed.option.runtime) for placed in target):
            continue
        if drafter.model is None:
            yield Candidate(alone, task.sequences, drafter)
            continue
        rows = task.drafts[drafter.name]
        for row in _near_drafts(task, target, rows):
            device, option = task.index.devices[int(rows.device[row])], rows.options[int(rows.option[row])]
            placed = order_shards(target, device.host, links, traffic, room)
            where = _where(device, placed[-1].device, links)
            draft = PlacedShard(device, option, 0, drafter.model.layers, drafter.model.layers)
            yield Candidate(placed, task.sequences, drafter, draft, where)


def _where(draft: Device, last: Device, links: Links) -> Where:
    if draft.host == last.host:
        return Where.HOST
    return Where.ZONE if links.hosts[draft.host].zone == links.hosts[last.host].zone else Where.FAR


def _near_drafts(task: CutTask, target: tuple[PlacedShard, ...], rows: OptionRows) -> Ints:
    """Return the fastest drafts on each of the shards' hosts, in each of their zones, and elsewhere, all of them on
    devices without a shard."""
    index, names = task.index, {placed.device.id for placed in target}
    numbers = np.array([number for number, device in enumerate(index.devices) if device.id in names], np.int64)
    host, zone = index.host[rows.device], index.zone[rows.device]
    on_host, in_zone = np.isin(host, index.host[numbers]), np.isin(zone, index.zone[numbers])
    least = APART[task.ground.wanted.constraints.apart]
    free = ~np.isin(rows.device, numbers)
    free &= ~(on_host & (least >= Where.ZONE)) & ~(in_zone & (least >= Where.FAR))
    among = np.flatnonzero(free)
    group = np.where(on_host, host, np.where(in_zone, len(index.hosts) + zone, -1))
    burden = index.sum_burdens(task.ground.wanted.objective, rows.device)
    if (task.ground.links.measured or burden is not None) and len(among) <= FEW:
        return among
    return fastest(rows, among, group[among], index, burden, keep=1) if len(among) else among
