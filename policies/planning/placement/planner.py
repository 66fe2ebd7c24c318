"""candidates -> filters -> score -> plan."""

from __future__ import annotations

from policies.planning.placement.candidate import ScoredCandidate, replica
from policies.planning.placement.filters import Usable, usable
from policies.planning.placement.links import Links, links_of
from policies.planning.placement.reasons import alternatives, device_reasons, no_plan
from policies.planning.placement.search import SearchResult, SearchSpace, best, search
from policies.planning.placement.sharded import best_sharded
from policies.planning.placement.standby import standby
from policies.planning.plan import Inventory, Plan, PlanGoal


def plan_placement(cluster: Inventory, wanted: PlanGoal) -> Plan:
    """Return the plan with the highest predicted goodput, whatever the order of what is given.

    Raises NoPlan, with the reasons and the way out, where nothing satisfies what was asked for.
    """
    left, links = usable(cluster, wanted), links_of(cluster)
    looked = search(SearchSpace(left, links, wanted, wanted.workload.concurrency))
    chosen, reasons = _replicas(left, links, wanted, looked)
    if not chosen:
        raise no_plan(looked, left, wanted)
    taken_cores: dict[str, int] = {}
    replicas = tuple(replica(one, taken_cores, left.hosts, wanted.workload) for one in chosen)
    instead, why_none = standby(chosen, looked, left, links, wanted)
    rejected = (
        *left.rejected,
        *looked.rejected,
        *alternatives(chosen[0], looked, links, wanted),
        *device_reasons(chosen, looked, left, wanted),
    )
    return Plan(wanted.workload.target.name, replicas, instead, rejected, (*reasons, *why_none))


def _replicas(
    left: Usable, links: Links, wanted: PlanGoal, looked: SearchResult
) -> tuple[list[ScoredCandidate], list[str]]:
    """Return the replicas with the highest goodput in all, and why so many; fewer where that is as good."""
    limits = wanted.constraints
    one, reasons = _one(SearchSpace(left, links, wanted, wanted.workload.concurrency), looked)
    if one is None or limits.max_replicas <= 1:
        return ([one] if one else []), reasons
    found = [one]
    count = 2
    while count <= limits.max_replicas:
        several = _several(left, links, wanted, count)
        reasons.append(
            f"{len(several)} replicas: {_total(several):.1f} tokens/s predicted, {len(found)}: {_total(found):.1f}"
        )
        if len(several) == count and _total(several) > _total(found):
            found = several
        count = count + 1 if count == limits.max_replicas else min(2 * count, limits.max_replicas)
    return found, reasons


def _total(replicas: list[ScoredCandidate]) -> float:
    return sum(one.prediction.goodput_tokens_per_s for one in replicas)


def _several(left: Usable, links: Links, wanted: PlanGoal, count: int) -> list[ScoredCandidate]:
    """Return up to `count` replicas that share the load and no device, the best first."""
    found: list[ScoredCandidate] = []
    taken: frozenset[str] = frozenset()
    cores: dict[str, int] = {}
    for _ in range(min(count, wanted.workload.concurrency)):
        ground = SearchSpace(left, links, wanted, -(-wanted.workload.concurrency // count), taken, cores)
        one, _ = _one(ground, search(ground))
        if one is None:
            break
        found.append(one)
        replica(one, cores, left.hosts, wanted.workload)
        taken |= {placed.device.id for placed in one.candidate.placed} | _same(one, left, wanted)
    return found


def _same(one: ScoredCandidate, left: Usable, wanted: PlanGoal) -> frozenset[str]:
    """Return the devices that share with a replica what replicas may not share."""
    apart = wanted.constraints.replicas_apart
    if apart == "device":
        return frozenset()
    hosts = {placed.device.host for placed in one.candidate.target}
    zones = {left.hosts[host].zone for host in hosts}
    return frozenset(
        device.id
        for device in (*left.target_devices, *left.draft_devices)
        if device.host in hosts or (apart == "zone" and left.hosts[device.host].zone in zones)
    )


def _one(ground: SearchSpace, looked: SearchResult) -> tuple[ScoredCandidate | None, list[str]]:
    """Return the best single replica, whole or in shards, and what decided between the two."""
    limits = ground.wanted.constraints
    whole = best(looked, ground) if limits.shards in (0, 1) else None
    if limits.sharding == "never" or limits.shards == 1:
        return whole, []
    if whole is not None and limits.sharding == "when_needed":
        return whole, []
    cut = best_sharded(ground)
    if whole is None or cut is None:
        return whole or cut, []
    rates = (whole.prediction.goodput_tokens_per_s, cut.prediction.goodput_tokens_per_s)
    told = (
        f"whole on one device: {rates[0]:.1f} tokens/s predicted, in {len(cut.candidate.target)} shards: {rates[1]:.1f}"
    )
    return (cut if rates[1] > rates[0] else whole), [told]
