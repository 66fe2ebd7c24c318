"""One replica on what is free: whole on one device, or in layer shards."""

from __future__ import annotations

from dataclasses import replace

from policies.planning.merit import describe_merit
from policies.planning.placement.candidate import ScoredCandidate
from policies.planning.placement.search import SearchResult, SearchSpace, best
from policies.planning.placement.sharded import best_sharded
from policies.planning.plan import PlanGoal


def choose_replica(ground: SearchSpace, looked: SearchResult) -> tuple[ScoredCandidate | None, list[str]]:
    """Return the best single replica, whole or in shards, and what decided between the two."""
    limits = ground.wanted.constraints
    whole = best(looked, ground) if limits.shards in (0, 1) else None
    if not may_cut(ground.wanted, whole):
        return whole, []
    cut = best_cut(ground)
    if whole is None or cut is None:
        return whole or cut, []
    aim = (ground.wanted.objective, ground.wanted.currency)
    alone, parted = (describe_merit(aim[0], scored.merit[0], aim[1]) for scored in (whole, cut))
    comparison = f"whole on one device: {alone} predicted, in {len(cut.candidate.target)} shards: {parted}"
    return (cut if cut.beats(whole) else whole), [comparison]


def may_cut(wanted: PlanGoal, whole: ScoredCandidate | None) -> bool:
    """Return whether shards are to be looked at, where this is the best without."""
    limits = wanted.constraints
    if limits.sharding == "never" or limits.shards == 1:
        return False
    return whole is None or limits.sharding != "when_needed"


def best_cut(ground: SearchSpace) -> ScoredCandidate | None:
    """Return the best way to run the target in shards by runtimes that can, None where there is none."""
    able = ground.wanted.constraints.shard_runtimes
    targets = {
        profile: tuple(option for option in options if not able or option.runtime in able)
        for profile, options in ground.left.targets.items()
    }
    ground = replace(ground, left=replace(ground.left, targets=targets))
    return _best_on_one_host(ground) if ground.wanted.constraints.one_host else best_sharded(ground)


def _best_on_one_host(ground: SearchSpace) -> ScoredCandidate | None:
    """Return the best of those whose devices are on one host, None where there is none."""
    best: ScoredCandidate | None = None
    devices = ground.left.target_devices
    for host in sorted({device.host for device in devices}):
        mine = tuple(device for device in devices if device.host == host)
        if len(mine) < 2:
            continue
        scored = best_sharded(replace(ground, left=replace(ground.left, target_devices=mine)))
        if scored is not None and (best is None or scored.beats(best)):
            best = scored
    return best
