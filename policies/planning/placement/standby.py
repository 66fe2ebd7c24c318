"""Where a target goes when its device, host or zone is lost.

A whole target goes to one other device, and drafts there from the text until it has a draft model again. Of a target in
shards one is lost at a time: the standby is a device that can hold the largest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from policies.planning.placement import workers
from policies.planning.placement.candidate import PlacedShard, ScoredCandidate, Where, rate_candidate, replica
from policies.planning.placement.filters import Usable
from policies.planning.placement.links import Links
from policies.planning.placement.rows import Floats, Index, Ints
from policies.planning.placement.search import SearchResult, candidate_of
from policies.planning.plan import Option, PlanGoal, Standby
from policies.planning.shard_cost import ModelPart, context_tokens, kv_bytes, stretch_cost

# The standby that shares least is taken where it has this share of the best one's merit. ADR 0025. Not tuned: it says
# how much speed a stranger zone is worth in a rare hour.
_WORTH = 0.8
_APART: tuple[Literal["zone", "host", "device"], ...] = ("zone", "host", "device")


def standby(
    chosen: Sequence[ScoredCandidate], search: SearchResult, left: Usable, links: Links, wanted: PlanGoal
) -> tuple[Standby | None, list[str]]:
    if not wanted.constraints.standby:
        return None, ["no standby: `standby` is off"]
    busy = {placed.device.id for scored in chosen for placed in scored.candidate.target}
    free = np.array([device.id not in busy for device in search.index.devices], np.bool_)
    if len(chosen[0].candidate.target) == 1:
        picked = _elsewhere(chosen[0], search, free, links, wanted)
    else:
        picked = _spare(chosen[0], search.index, free, left, links, wanted)
    if picked is None:
        others = "; the other replicas take its requests" if len(chosen) > 1 else ""
        return None, [f"no standby: no other device can hold what would be lost{others}"]
    drafts = {
        scored.candidate.draft.device.id for scored in chosen if scored.candidate.draft and scored.prediction.depth
    }
    return _describe_standby(picked, drafts, left, wanted), []


@dataclass(frozen=True, slots=True)
class _Picked:
    place: PlacedShard
    instead: ScoredCandidate
    apart: Literal["device", "host", "zone"]


def _elsewhere(
    scored: ScoredCandidate, search: SearchResult, free: np.ndarray, links: Links, wanted: PlanGoal
) -> _Picked | None:
    rate = np.zeros(len(search.index.devices))
    at: dict[int, tuple[int, int]] = {}
    for count, pairs in enumerate(search.pairs):
        if pairs.drafts is not None:
            continue
        devices = pairs.targets.device[pairs.target]
        for row in np.flatnonzero(free[devices] & (pairs.merit > rate[devices])):
            device = int(devices[row])
            if pairs.merit[row] > rate[device]:
                rate[device], at[device] = pairs.merit[row], (count, int(row))
    picked = _furthest(rate, scored, search.index)
    if picked is None:
        return None
    number, pair = at[picked[0]]
    candidate = candidate_of(search, search.pairs[number], pair)
    return _Picked(candidate.target[0], rate_candidate(candidate, links, wanted), picked[1])


def _furthest(
    rate: Floats, scored: ScoredCandidate, index: Index
) -> tuple[int, Literal["device", "host", "zone"]] | None:
    """Return the best device that shares least with the target, as long as it is good enough, and what they do not
    share. `rate`: the merit of each device."""
    if not rate.any():
        return None
    homes = [
        number
        for number, device in enumerate(index.devices)
        if device.id in {p.device.id for p in scored.candidate.target}
    ]
    hosts, zones = index.host[homes], index.zone[homes]
    levels = (~np.isin(index.zone, zones), ~np.isin(index.host, hosts), np.ones(len(rate), np.bool_))
    for apart, level in zip(_APART, levels, strict=True):
        reachable = np.where(level, rate, 0.0)
        if reachable.max() >= _WORTH * rate.max():
            return int(np.lexsort((index.tie, -reachable))[0]), apart
    return None


def _spare(
    scored: ScoredCandidate, index: Index, free: np.ndarray, left: Usable, links: Links, wanted: PlanGoal
) -> _Picked | None:
    load = wanted.workload
    lost = max(scored.candidate.target, key=lambda placed: (placed.layers, placed.first))
    rate, options = np.zeros(len(index.devices)), {}
    allowed = {device.id for device in left.target_devices}
    share = lost.layers / load.target.layers
    burden = index.sum_burdens(wanted.objective, np.arange(len(index.devices)))
    for profile in sorted(left.targets.keys() & index.profiles.keys()):
        for option in left.targets[profile]:
            needed = (
                workers.sum_fixed_bytes(option, lost.layers, first=lost.has_first, last=lost.has_last)
                + kv_bytes(option, load, share) * scored.candidate.sequences
            )
            ms = ModelPart(option, share).ms(
                scored.candidate.sequences, scored.candidate.sequences, context_tokens(load)
            )
            numbers: Ints = index.profiles[profile]
            fits = free[numbers] & (index.room[numbers] >= needed) & (option.threads <= index.cores[numbers])
            for number in numbers[fits]:
                now_ms = ms * stretch_cost(option.taken, index.utilisation[number])
                speed = 1.0 / now_ms / (burden[number] if burden is not None else 1.0)
                if index.devices[number].id in allowed and speed > rate[number]:
                    rate[number], options[int(number)] = speed, option
    picked = _furthest(rate, scored, index)
    if picked is None:
        return None
    chosen: Option = options[picked[0]]
    place = replace(lost, device=index.devices[picked[0]], option=chosen)
    target = tuple(place if placed is lost else placed for placed in scored.candidate.target)
    candidate = replace(scored.candidate, target=target, drafter=None, draft=None, where=Where.NOWHERE)
    return _Picked(place, rate_candidate(candidate, links, wanted), picked[1])


def _describe_standby(picked: _Picked, drafts: set[str], left: Usable, wanted: PlanGoal) -> Standby:
    part = replica(picked.instead, {}, left.hosts, wanted)
    shard = next(shard for shard in part.shards if shard.device == picked.place.device.id)
    whole = len(part.shards) == 1
    covers = "the target" if whole else "any one shard"
    rate = picked.instead.prediction.goodput_tokens_per_s
    why = f"takes over {covers}, in another {picked.apart}: {rate:.1f} tokens/s predicted there"
    if whole:
        why += ", without a draft model"
    if picked.place.device.id in drafts:
        why += "; the draft on it gives way"
    free = picked.place.device.id not in drafts
    return Standby((shard,), picked.apart, free, picked.instead.prediction, why)
