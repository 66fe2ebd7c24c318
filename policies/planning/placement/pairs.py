"""Every pairing of a target with a draft that can be the best, and what is predicted of it.

A draft's time counts by where it is: on the target's device, on another of its host, on another host of its zone, or
anywhere else. Within each of these the links are alike, so only the few fastest drafts of each kind have to be paired
with all targets. Where links were measured, the fastest drafts of both hosts are paired besides.

With the objectives `cost` and `energy` a slower draft may be the better one, for it is cheaper or draws less. Then a
draft is kept unless several others are both at least as fast and at least as cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from device_profiles.units import MS_PER_S
from policies.planning.draft_yield import (
    all_hit_rate,
    changes_of,
    compute_draft_length_shares,
    depth_bound,
    tokens_per_round,
)
from policies.planning.merit import compute_merit
from policies.planning.placement.candidate import Where
from policies.planning.placement.links import HostLinks
from policies.planning.placement.rows import Bools, Floats, Index, Ints, OptionRows
from policies.planning.plan import DrafterFacts, Objective, PlanGoal, Workload
from policies.planning.throughput import DraftSide, compute_shared_read_ms, draft_link_ms, draft_ms, together_ms

_Joined = tuple[Ints, Ints, Ints]  # target rows, draft rows, and where these are from there

# The fastest drafts that are kept of each place: more than one, because one may be on the target's own. ADR 0025: a
# test compares with trying everything.
_KEEP = 3
_THREADS = 4096  # more than anybody has. It only makes a key of two numbers.
# Pairs that are predicted at a time. Bounds memory; no plan depends on it.
_CHUNK = 50_000
# So many are all paired with all targets, where a slower one may be the better. Bounds time. ADR 0055: a test compares
# this with the pruned way.
_FEW_DRAFTS = 48


APART = {"": 0, "device": Where.HOST, "host": Where.ZONE, "zone": Where.FAR}


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairings of target rows with draft rows (-1: none) of one drafter (None: no drafts), the best depth of each, and
    what is predicted at it: goodput in tokens per second, TPOT, and the objective's merit. `layers`: of the target."""

    drafter: DrafterFacts | None
    layers: int
    targets: OptionRows
    drafts: OptionRows | None
    target: Ints
    draft: Ints
    where: Ints
    depth: Ints
    goodput: Floats
    tpot_ms: Floats
    merit: Floats

    @property
    def target_device(self) -> Ints:
        return self.targets.device[self.target]

    @property
    def draft_device(self) -> Ints | None:
        return None if self.drafts is None else self.drafts.device[self.draft]

    def ttft_ms(self, of: Ints) -> Floats:
        """Return the time to the first token of some of them."""
        rows, drafter = self.target[of], self.drafter
        tokens = np.array([tokens_per_round(drafter, depth) for depth in range(int(self.depth.max(initial=0)) + 1)])
        round_ms = self.tpot_ms[of] * tokens[self.depth[of]]
        ttft: Floats = self.targets.first_ms[rows] + np.where(
            self.targets.sequences[rows] > 1, round_ms, self.targets.ms[rows, 0]
        )
        return ttft


_Depths = tuple[Ints, Floats, Floats]  # the best depth of each, its goodput, its TPOT


def plain_pairs(index: Index, targets: OptionRows, wanted: PlanGoal) -> Pairs:
    round_ms = targets.ms[:, 0]
    total = round_ms + targets.sequences / wanted.workload.output_tokens * targets.prefill_ms
    goodput = targets.sequences / total * MS_PER_S
    return _without_model(index, None, wanted, targets, (np.zeros(len(targets), np.int64), goodput, round_ms))


def text_pairs(index: Index, targets: OptionRows, drafter: DrafterFacts, wanted: PlanGoal) -> Pairs:
    load = wanted.workload
    depths = np.arange(1, depth_bound(load, drafter) + 1)
    if not len(depths) or not len(targets):
        none, flat = np.empty(0, np.int64), np.empty(0)
        return _without_model(index, drafter, wanted, targets.of(none), (none, flat, flat))
    tokens = np.array([tokens_per_round(drafter, int(depth)) for depth in depths])
    sequences = targets.sequences[:, None].astype(float)
    verify = _average_verify_ms(targets, drafter, len(depths))
    drafting = np.array([draft_ms(DraftSide(drafter), load, int(depth), 1.0) for depth in depths])
    round_ms = verify + drafting * sequences
    total = round_ms + sequences * tokens / load.output_tokens * targets.prefill_ms[:, None]
    goodput = sequences * tokens / total * MS_PER_S
    last = len(depths) - 1 if drafter.by_policy else 0
    chosen = _choose_depths(goodput[:, last:], (round_ms / tokens)[:, last:], depths[last:], wanted.objective)
    return _without_model(index, drafter, wanted, targets, chosen)


def model_pairs(
    index: Index,
    targets: OptionRows,
    drafts: OptionRows,
    drafter: DrafterFacts,
    links: HostLinks,
    wanted: PlanGoal,
) -> Pairs:
    """Return targets, which all run the same number of sequences, with the drafts that may be best for them."""
    load, objective = wanted.workload, wanted.objective
    places = [
        (where, *_filter_pairs(index, targets, drafts, where, left, right))
        for where, left, right in _join_rows(index, targets, drafts, links, objective)
        if where >= APART[wanted.constraints.apart]
    ]
    wheres = np.concatenate([np.full(len(left), where) for where, left, _ in places] or [np.empty(0, np.int64)])
    left = np.concatenate([rows for _, rows, _ in places] or [np.empty(0, np.int64)])
    right = np.concatenate([rows for _, _, rows in places] or [np.empty(0, np.int64)])
    if not depth_bound(load, drafter):
        left, right, wheres = (rows[:0] for rows in (left, right, wheres))
    depth, goodput, tpot_ms = np.zeros(len(left), np.int64), np.zeros(len(left)), np.zeros(len(left))
    for start in range(0, len(left), _CHUNK):
        part = slice(start, start + _CHUNK)
        depth[part], goodput[part], tpot_ms[part] = _predict_pairs(
            index, targets, drafts, drafter, links, wanted, (left[part], right[part], wheres[part])
        )
    merit = _merits(index, targets, drafts, wanted, (left, right), (depth, goodput, tpot_ms))
    layers = load.target.layers
    return Pairs(drafter, layers, targets, drafts, left, right, wheres, depth, goodput, tpot_ms, merit)


def _without_model(
    index: Index, drafter: DrafterFacts | None, wanted: PlanGoal, targets: OptionRows, depths: _Depths
) -> Pairs:
    every, none = np.arange(len(targets)), np.full(len(targets), -1)
    nowhere = np.full(len(targets), int(Where.NOWHERE))
    merit = _merits(index, targets, None, wanted, (every, none), depths)
    return Pairs(drafter, wanted.workload.target.layers, targets, None, every, none, nowhere, *depths, merit)


def _choose_depths(goodput: Floats, tpot_ms: Floats, depths: Ints, objective: Objective) -> _Depths:
    """Return the best column of each row. On the same devices most goodput is least cost and least energy, too."""
    best = np.argmin(tpot_ms, axis=1) if objective is Objective.LATENCY else np.argmax(goodput, axis=1)
    rows = np.arange(len(best))
    return depths[best], goodput[rows, best], tpot_ms[rows, best]


def _merits(
    index: Index,
    targets: OptionRows,
    drafts: OptionRows | None,
    wanted: PlanGoal,
    pairs: tuple[Ints, Ints],
    depths: _Depths,
) -> Floats:
    left, right = pairs
    drafting = None if drafts is None else drafts.device[right]
    burden = index.sum_burdens(wanted.objective, targets.device[left], drafting)
    turns = np.maximum(1.0, wanted.workload.concurrency / targets.sequences[left])
    merit: Floats = compute_merit(wanted.objective, depths[1], depths[2], turns, burden)
    return merit


def _average_verify_ms(targets: OptionRows, drafter: DrafterFacts, bound: int) -> Floats:
    """Return the mean verification by depth from 1 to the bound, where not all rounds have as many drafts."""
    shares = np.zeros((targets.ms.shape[1], bound))
    for depth in range(1, bound + 1):
        for count, share in compute_draft_length_shares(drafter, depth):
            shares[count, depth - 1] = share
    kinds, inverse = np.unique(targets.sequences, return_inverse=True)
    changes = np.array([changes_of(drafter, int(count)) for count in kinds])[inverse.reshape(-1)][:, None]
    mean: Floats = ((1.0 - changes) * targets.ms + changes * targets.late_ms) @ shares
    return mean


def _join_rows(
    index: Index, targets: OptionRows, drafts: OptionRows, links: HostLinks, objective: Objective
) -> Iterator[tuple[Where, Ints, Ints]]:
    """Yield (where, target rows, draft rows)."""
    if not len(targets) or not len(drafts):
        return
    t_host, d_host = index.host[targets.device], index.host[drafts.device]
    t_zone = index.zone[targets.device]
    left, right = _equal(targets.device, drafts.device)
    yield Where.IN_TARGET, left, right
    yield Where.BESIDE, left, right
    every, burden = np.arange(len(drafts)), index.sum_burdens(objective, drafts.device)
    if burden is not None and len(drafts) <= _FEW_DRAFTS:
        yield from _join_all(index, targets, drafts)
        return
    threads = np.minimum(drafts.threads, _THREADS - 1)
    near = fastest(drafts, every, drafts.device * _THREADS + threads, index, burden, keep=1)
    near = fastest(drafts, near, (d_host * _THREADS + threads)[near], index, burden)
    left, right = _equal(t_host, d_host[near])
    yield Where.HOST, left, near[right]
    of_host = fastest(drafts, every, d_host, index, burden, keep=1)
    of_zone = fastest(drafts, of_host, index.zone[drafts.device[of_host]], index, burden)
    left, right = _equal(t_zone, index.zone[drafts.device[of_zone]])
    yield Where.ZONE, left, of_zone[right]
    far = fastest(drafts, of_host, index.zone[drafts.device[of_host]], index, burden, keep=1)
    far = fastest(drafts, far, np.zeros(len(far), np.int64), index, burden)
    yield Where.FAR, np.repeat(np.arange(len(targets)), len(far)), np.tile(far, len(targets))
    for host, other in links.pairs:
        left, right = _equal(np.where(t_host == host, other, -1), d_host[of_host])
        same = bool(len(left)) and index.zone[targets.device[left[0]]] == index.zone[drafts.device[of_host[right[0]]]]
        yield Where.ZONE if same else Where.FAR, left, of_host[right]


def _join_all(index: Index, targets: OptionRows, drafts: OptionRows) -> Iterator[tuple[Where, Ints, Ints]]:
    """Yield every target with every draft on another device, by where these are from there."""
    left, right = np.divmod(np.arange(len(targets) * len(drafts)), len(drafts))
    mine, other = targets.device[left], drafts.device[right]
    host, zone = index.host[mine] == index.host[other], index.zone[mine] == index.zone[other]
    for where, mask in ((Where.HOST, host), (Where.ZONE, ~host & zone), (Where.FAR, ~zone)):
        yield where, left[mask], right[mask]


def fastest(rows: OptionRows, among: Ints, group: Ints, index: Index, burden: Floats | None, keep: int = _KEEP) -> Ints:
    """Return those of the rows `among` that are the fastest of their group at some depth: drafting ahead, and after.

    `burden`: of every row, what an objective weighs against its speed. Then those are left out to which `keep` others
    are at least as fast with no more of it.
    """
    bound = rows.ms.shape[1] - 1
    kept = []
    for depth in sorted({1, (bound + 1) // 2, bound} - {0}):
        for value in (rows.ms[among, depth], rows.late_ms[among, depth]):
            tie = index.tie[rows.device[among]]
            if burden is None:
                order = np.lexsort((tie, value, group))
                kept.append(order[_rank(group[order]) < keep])
            else:
                kept.append(_find_undominated(value, np.lexsort((tie, value, burden[among], group)), group, keep))
    return among[np.unique(np.concatenate(kept))] if kept else among[:0]


def _find_undominated(value: Floats, order: Ints, group: Ints, keep: int) -> Ints:
    """Return, of rows in the order of their group and burden, those below all values before them in their group; then
    those that are so without these, `keep` times."""
    kept = []
    for _ in range(keep):
        if not len(order):
            break
        _, which = np.unique(group[order], return_inverse=True)
        ranks = np.unique(value[order], return_inverse=True)[1] + 1  # equal values share a rank
        shifted = ranks - which.reshape(-1) * (len(order) + 2)  # so that every group begins anew
        before = np.r_[len(order) + 2, np.minimum.accumulate(shifted)[:-1]]
        below = shifted < before
        kept.append(order[below])
        order = order[~below]
    return np.concatenate(kept) if kept else order


def _rank(group: Ints) -> Ints:
    """Return each element's number within its run of equal values."""
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]]) if len(group) else np.empty(0, np.int64)
    lengths = np.diff(np.r_[starts, len(group)])
    return np.arange(len(group)) - np.repeat(starts, lengths)


def _equal(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Return the numbers of all pairs of equal values."""
    order = np.argsort(right, kind="stable")
    ordered = right[order]
    first, end = np.searchsorted(ordered, left, "left"), np.searchsorted(ordered, left, "right")
    counts = end - first
    lefts = np.repeat(np.arange(len(left)), counts)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return lefts, order[np.repeat(first, counts) + offsets]


def _filter_pairs(
    index: Index, targets: OptionRows, drafts: OptionRows, where: Where, left: Ints, right: Ints
) -> tuple[Ints, Ints]:
    mine, other = targets.device[left], drafts.device[right]
    ok: Bools
    if where <= Where.BESIDE:
        sequences = targets.sequences[left]
        used = targets.fixed[left] + drafts.fixed[right] + sequences * (targets.kv[left] + drafts.kv[right])
        ok = used <= index.room[mine]
    elif where is Where.HOST:
        ok = mine != other
    elif where is Where.ZONE:
        ok = index.host[mine] != index.host[other]
    else:
        ok = index.zone[mine] != index.zone[other]
    if where in (Where.BESIDE, Where.HOST):
        ok = ok & (targets.threads[left] + drafts.threads[right] <= index.cores[mine])
    if where is Where.BESIDE:
        ok = ok & index.is_cpu[mine] & (targets.threads[left] > 0) & (drafts.threads[right] > 0)
        ok = ok & np.isfinite(index.cores[mine])
    return left[ok], right[ok]


def _predict_pairs(
    index: Index,
    targets: OptionRows,
    drafts: OptionRows,
    drafter: DrafterFacts,
    links: HostLinks,
    wanted: PlanGoal,
    pairs: _Joined,
) -> _Depths:
    """Return what is predicted of each pair (policies/planning/throughput.py has the formulas)."""
    load = wanted.workload
    depths = range(1, depth_bound(load, drafter) + 1)
    left, right, where = pairs
    sequences = int(targets.sequences[left[0]])
    tokens = np.array([tokens_per_round(drafter, depth) for depth in depths])
    hits = np.array([all_hit_rate(drafter, depth, sequences)[0] for depth in depths])
    overlap = (where != Where.IN_TARGET)[:, None]
    drafting = drafts.ms[right, 1 : len(depths) + 1]
    late = np.where(overlap, drafts.late_ms[right, 1 : len(depths) + 1], drafting)
    verify = _average_verify_ms(targets, drafter, len(depths))[left]
    floor = _floors(index, targets, drafts, drafter, load, pairs)
    rtt, bytes_per_s = links.between(index.host[targets.device[left]], index.host[drafts.device[right]])
    link = np.where(overlap[:, 0], draft_link_ms(rtt, bytes_per_s, sequences), 0.0)[:, None]
    round_ms = together_ms(verify, drafting, late + link, floor, np.where(overlap, hits, 0.0))
    prefill = targets.prefill_ms[left] + np.where(overlap[:, 0], 0.0, drafts.prefill_ms[right])
    total = round_ms + sequences * tokens / load.output_tokens * prefill[:, None]
    goodput = sequences * tokens / total * MS_PER_S
    return _choose_depths(goodput, round_ms / tokens, np.array(depths), wanted.objective)


def _floors(
    index: Index, targets: OptionRows, drafts: OptionRows, drafter: DrafterFacts, load: Workload, pairs: _Joined
) -> Floats:
    """Return the least that reading two models from one memory takes, by depth from 1."""
    draft_layers = drafter.model.layers if drafter.model else 0
    target_bytes = load.target.layers * np.array([option.layer_bytes for option in targets.options])
    draft_bytes = draft_layers * np.array([option.layer_bytes for option in drafts.options])
    left, right, where = pairs
    rate = index.bandwidth[targets.device[left]]
    rate = np.where((where == Where.BESIDE) & (rate > 0), rate, np.inf)
    depths = np.arange(1, depth_bound(load, drafter) + 1, dtype=float)
    return compute_shared_read_ms(
        target_bytes[targets.option[left]][:, None], draft_bytes[drafts.option[right]][:, None], depths, rate[:, None]
    )
