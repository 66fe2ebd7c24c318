"""Why everything else lost: other plans, other options, and every device that is not in use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.planning.draft_yield import depth_bound
from policies.planning.placement.candidate import Candidate, Placed, Rated, sides
from policies.planning.placement.filters import Usable
from policies.planning.placement.links import Links
from policies.planning.placement.rows import Index
from policies.planning.placement.search import Found, candidate_of
from policies.planning.plan import NoPlan, Option, RejectedCandidate, Role, Wanted
from policies.planning.shard_cost import context_tokens
from policies.planning.throughput import predict

_MOST_TOLD = 4  # of what was rejected, where there is no plan


def alternatives(chosen: Rated, found: Found, links: Links, wanted: Wanted) -> list[RejectedCandidate]:
    """Return the other depths of what was chosen, the best plan with every other drafter, and the other options on the
    same devices."""
    return [
        *_depths(chosen, links, wanted),
        *_drafters(chosen, found),
        *_options(chosen, found),
    ]


def _lost(rate: float, best: float) -> str:
    if rate > best:
        return f"{rate:.1f} tokens/s predicted, more than the plan's {best:.1f} by no more than `indifference` allows"
    share = 1.0 - rate / best
    if share < 1e-6:
        return f"{rate:.1f} tokens/s predicted, as the plan; it scores lower, takes more devices, or is later by name"
    return f"{rate:.1f} tokens/s predicted, {share:.1%} less than the plan's {best:.1f}"


def _depths(chosen: Rated, links: Links, wanted: Wanted) -> list[RejectedCandidate]:
    load, best = wanted.workload, chosen.prediction
    target, draft = sides(chosen.candidate, links, load)
    if draft is None:
        return []
    lost = []
    for depth in range(depth_bound(load, draft.drafter) + 1):
        if depth != best.depth:
            rate = predict(target, draft, load, depth).goodput_tokens_per_s
            what = f"depth {depth}" if depth else "depth 0, not speculating"
            lost.append(RejectedCandidate(what, _lost(rate, best.goodput_tokens_per_s), "depth", rate))
    return lost


def _drafters(chosen: Rated, found: Found) -> list[RejectedCandidate]:
    best = chosen.prediction.goodput_tokens_per_s
    mine = chosen.candidate.drafter.name if chosen.candidate.drafter else ""
    top: dict[str, tuple[float, Candidate]] = {}
    for pairs in found.pairs:
        name = pairs.drafter.name if pairs.drafter else ""
        if not len(pairs.goodput) or (name == mine and pairs.drafts is None):
            continue
        at = int(np.argmax(pairs.goodput))
        if name != mine and pairs.goodput[at] > top.get(name, (0.0,))[0]:
            top[name] = (float(pairs.goodput[at]), candidate_of(found, pairs, at))
    return [
        RejectedCandidate(candidate.label, _lost(rate, best), "plan", rate)
        for _, (rate, candidate) in sorted(top.items())
    ]


def _options(chosen: Rated, found: Found) -> list[RejectedCandidate]:
    """Return the best that every other option on the target's device could do."""
    placed = chosen.candidate.target[0]
    top: dict[str, float] = {}
    for pairs in found.pairs:
        rows = pairs.targets
        on = np.flatnonzero(rows.device[pairs.target] == _number(found, placed.device.id))
        for pair in on:
            label = rows.options[rows.option[pairs.target[pair]]].label
            top[label] = max(top.get(label, 0.0), float(pairs.goodput[pair]))
    best = chosen.prediction.goodput_tokens_per_s
    return [
        RejectedCandidate(f"{label} on {placed.device.id}", _lost(rate, best), Role.TARGET, rate)
        for label, rate in sorted(top.items())
        if label != placed.option.label
    ]


def _number(found: Found, device: str) -> int:
    return next((number for number, one in enumerate(found.index.devices) if one.id == device), -1)


def device_reasons(chosen: Sequence[Rated], found: Found, left: Usable, wanted: Wanted) -> list[RejectedCandidate]:
    """Return why each usable device that is not in use is not."""
    in_use = {placed.device.id for one in chosen for placed in _used(one)}
    best = chosen[0].prediction.goodput_tokens_per_s
    as_target, as_draft = _best_by_device(found)
    as_shard = _layer_times(chosen[0], found.index, left, wanted) if len(chosen[0].candidate.target) > 1 else {}
    told = {one.what for one in (*left.rejected, *found.rejected)}
    reasons = []
    for number, device in enumerate(found.index.devices):
        if device.id in in_use:
            continue
        if number in as_shard:
            reasons.append(RejectedCandidate(device.id, as_shard[number], "shard"))
        elif as_target[number] > 0:
            rate = float(as_target[number])
            reasons.append(RejectedCandidate(device.id, _lost(rate, best), Role.TARGET, rate))
        elif as_draft[number] > 0:
            rate = float(as_draft[number])
            reasons.append(RejectedCandidate(device.id, _lost(rate, best), Role.DRAFT, rate))
        elif device.id not in told:
            reasons.append(RejectedCandidate(device.id, _why_nothing(device.profile, left)))
    return reasons


def _layer_times(one: Rated, index: Index, left: Usable, wanted: Wanted) -> dict[int, str]:
    """Return, by device number, how a device's layers compare with the plan's shards."""
    load, rows = wanted.workload, one.candidate.sequences * (one.prediction.depth + 1)

    def layer_ms(option: Option) -> float:
        return option.cost.ms(rows, one.candidate.sequences, context_tokens(load)) / load.target.layers

    slowest = max(layer_ms(part.option) / (1.0 - part.device.utilisation) for part in one.candidate.target)
    allowed, found = {device.id for device in left.target_devices}, {}
    for profile in sorted(left.targets.keys() & index.profiles.keys()):
        best = min(layer_ms(option) for option in left.targets[profile])
        for number in index.profiles[profile]:
            ms = best / (1.0 - index.utilisation[number])
            if index.devices[number].id in allowed:
                found[int(number)] = (
                    f"a layer takes {ms:.2f} ms on it, and at most {slowest:.2f} ms on the plan's shards"
                    if ms > slowest
                    else f"a layer takes {ms:.2f} ms on it, but it holds fewer, or is further from the other shards"
                )
    return found


def _used(one: Rated) -> tuple[Placed, ...]:
    return one.candidate.placed if one.prediction.depth else one.candidate.target


def _why_nothing(profile: str, left: Usable) -> str:
    if profile not in left.targets and profile not in left.drafts:
        return f"no option for its profile {profile!r}: it was not measured, and no datasheet names it"
    return "only drafts can run on it, and none is wanted there: others draft sooner, or nearer to the target"


def _best_by_device(found: Found) -> tuple[np.ndarray, np.ndarray]:
    as_target, as_draft = np.zeros(len(found.index.devices)), np.zeros(len(found.index.devices))
    for pairs in found.pairs:
        np.maximum.at(as_target, pairs.targets.device[pairs.target], pairs.goodput)
        if pairs.drafts is not None:
            np.maximum.at(as_draft, pairs.drafts.device[pairs.draft], pairs.goodput)
    return as_target, as_draft


def no_plan(found: Found, left: Usable, wanted: Wanted) -> NoPlan:
    """Return the error that says why nothing can be done, and the way out."""
    model, limits = wanted.workload.target.name, wanted.constraints
    if not left.target_devices:
        return NoPlan(f"{model}: there is no device left to place it on; {_first(left.rejected)}")
    if not left.targets:
        return NoPlan(
            f"{model}: no device has an option for it; measure it (`outrider profile`) or allow more; "
            f"{_first(left.rejected)}"
        )
    ways = ["fewer or shorter requests at once", "weights in fewer bits", "more or larger devices"]
    if limits.sharding == "never" or limits.shards == 1:
        ways.insert(0, "layer shards (`sharding: when_needed`)")
    elif limits.shards:
        ways.insert(0, "another number of shards (`shards`)")
    if limits.pin_target or limits.exclude or limits.zones:
        ways.insert(0, "a wider choice (`pin_target`, `exclude`, `zones`)")
    return NoPlan(f"{model} fits nowhere: {_first(found.rejected)}. What helps: {', '.join(ways)}")


def _first(rejected: Sequence[RejectedCandidate]) -> str:
    told = sorted({f"{one.what}: {one.why}" for one in rejected})
    more = f"; and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return "; ".join(told[:_MOST_TOLD]) + more if told else "nothing was given"
