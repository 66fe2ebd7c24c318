"""candidates -> filters -> score -> plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from policies.planning.merit import describe_merit, fill_in_expense, is_better, sum_expense, sum_merits
from policies.planning.placement.candidate import ScoredCandidate, replica
from policies.planning.placement.filters import Usable, usable
from policies.planning.placement.links import Links, links_of
from policies.planning.placement.reasons import alternatives, device_reasons, no_plan
from policies.planning.placement.search import SearchResult, SearchSpace, best, search
from policies.planning.placement.sharded import best_sharded
from policies.planning.placement.standby import standby
from policies.planning.plan import Host, Inventory, Objective, Plan, PlanGoal, ReplicaPlacement

_FEW = 64  # devices, of which there is time to try
_EVERY_COUNT = 8  # every number of replicas up to this one


def plan_placement(cluster: Inventory, wanted: PlanGoal) -> Plan:
    """Return the best plan by the objective, whatever the order of what is given.

    Raises NoPlan, with the reasons and the way out, where nothing satisfies what was asked for.
    """
    left, links = usable(cluster, wanted), links_of(cluster)
    looked = search(SearchSpace(left, links, wanted, wanted.workload.concurrency))
    chosen, reasons = _replicas(left, links, wanted, looked)
    if not chosen:
        raise no_plan(looked, left, wanted)
    taken_cores: dict[str, int] = {}
    placed = [replica(one, taken_cores, left.hosts, wanted.workload) for one in chosen]
    replicas = share_expenses(placed, chosen, left.hosts)
    instead, why_none = standby(chosen, looked, left, links, wanted)
    rejected = (
        *left.rejected,
        *looked.rejected,
        *alternatives(chosen[0], looked, links, wanted),
        *device_reasons(chosen, looked, left, wanted),
    )
    told = (*reasons, *why_none)
    return Plan(wanted.workload.target.name, replicas, instead, rejected, told, wanted.objective, wanted.currency)


def share_expenses(
    placed: Sequence[ReplicaPlacement], chosen: Sequence[ScoredCandidate], hosts: Mapping[str, Host]
) -> tuple[ReplicaPlacement, ...]:
    """Return replicas with what they cost: those on one host share its price."""
    used = [{part.device.host for part in one.in_use} for one in chosen]
    count = Counter(host for some in used for host in some)
    found = []
    for part, one, some in zip(placed, chosen, used, strict=True):
        shared = {host: replace(hosts[host], price_per_hour=hosts[host].price_per_hour / count[host]) for host in some}
        expense = sum_expense([placed_part.device for placed_part in one.in_use], shared)
        found.append(replace(part, prediction=fill_in_expense(part.prediction, expense)))
    return tuple(found)


def _replicas(
    left: Usable, links: Links, wanted: PlanGoal, looked: SearchResult
) -> tuple[list[ScoredCandidate], list[str]]:
    """Return the replicas with most merit together, and why so many; fewer where these are as good, and where there is
    no room for as many as there are to be at least."""
    least = wanted.constraints.min_replicas
    most = min(wanted.constraints.max_replicas, max(least, wanted.workload.concurrency))
    one, reasons = _one(SearchSpace(left, links, wanted, wanted.workload.concurrency), looked)
    if one is None or wanted.constraints.max_replicas <= 1:
        return ([one] if one else []), reasons
    found, merit, tried = [one], _sum_merit([one], wanted, left.hosts), {1}
    counts = _counts(most, len(looked.index.devices))
    while counts:
        count = counts.pop(0)
        tried.add(count)
        several = _several(left, links, wanted, count)
        if len(several) < count:  # there is no room for more
            counts = [len(several)] if len(several) not in tried and len(several) > 1 else []
            reasons.append(f"{count} replicas: there is room for {len(several)}")
            continue
        other = _sum_merit(several, wanted, left.hosts)
        told = [describe_merit(wanted.objective, value[0], wanted.currency) for value in (other, merit)]
        better = is_better(other, merit)
        reasons.append(
            f"{count} replicas: {told[0]} predicted, {len(found)}: {told[1]}"
            + ("" if better else f"; more do not help `{wanted.objective}`")
            + (f", and there are to be {least}" if len(found) < least and not better else "")
        )
        if better or len(found) < least:
            found, merit = several, other
    if most < wanted.constraints.max_replicas and len(found) == most:
        reasons.append(f"{most} replicas: as many as requests are planned for at once")
    return found, reasons


def _counts(most: int, devices: int) -> list[int]:
    """Return how many replicas to try: of few devices every number up to a bound, then twice as many each time."""
    every = _EVERY_COUNT if devices <= _FEW else 2
    found = list(range(2, min(every, most) + 1))
    while found and found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


def _sum_merit(replicas: Sequence[ScoredCandidate], wanted: PlanGoal, hosts: Mapping[str, Host]) -> tuple[float, float]:
    """Return the merit of all replicas together, and its second figure; a host counts once."""
    known = [one.prediction for one in replicas]
    if wanted.objective is not Objective.COST:
        return sum_merits(wanted.objective, known, wanted.workload.concurrency)
    goodput = sum(one.goodput_tokens_per_s for one in known)
    expense = sum_expense([part.device for one in replicas for part in one.in_use], hosts)
    return goodput / expense.burden(wanted.objective), goodput


def _several(left: Usable, links: Links, wanted: PlanGoal, count: int) -> list[ScoredCandidate]:
    """Return up to `count` replicas that share the load and no device, the best first. Each has an equal part of the
    requests that those before it left."""
    found: list[ScoredCandidate] = []
    taken: frozenset[str] = frozenset()
    cores: dict[str, int] = {}
    paid: frozenset[str] = frozenset()
    requests = wanted.workload.concurrency
    for number in range(count):
        part = max(1, -(-requests // (count - number)))
        ground = SearchSpace(left, links, wanted, part, taken, cores, paid)
        one, _ = _one(ground, search(ground))
        if one is None:
            break
        found.append(one)
        requests -= one.candidate.sequences
        replica(one, cores, left.hosts, wanted.workload)
        taken |= {placed.device.id for placed in one.candidate.placed} | _same(one, left, wanted)
        paid |= {part.device.host for part in one.in_use}
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


def _best_cut(ground: SearchSpace) -> ScoredCandidate | None:
    """Return the best way to run the target in shards by runtimes that can, None where there is none."""
    able = ground.wanted.constraints.shard_runtimes
    targets = {
        profile: tuple(one for one in options if not able or one.runtime in able)
        for profile, options in ground.left.targets.items()
    }
    ground = replace(ground, left=replace(ground.left, targets=targets))
    return _best_on_one_host(ground) if ground.wanted.constraints.one_host else best_sharded(ground)


def _best_on_one_host(ground: SearchSpace) -> ScoredCandidate | None:
    """Return the best of those whose devices are on one host, None where there is none."""
    best: ScoredCandidate | None = None
    devices = ground.left.target_devices
    for host in sorted({one.host for one in devices}):
        mine = tuple(one for one in devices if one.host == host)
        if len(mine) < 2:
            continue
        found = best_sharded(replace(ground, left=replace(ground.left, target_devices=mine)))
        if found is not None and (best is None or found.beats(best)):
            best = found
    return best


def _one(ground: SearchSpace, looked: SearchResult) -> tuple[ScoredCandidate | None, list[str]]:
    """Return the best single replica, whole or in shards, and what decided between the two."""
    limits = ground.wanted.constraints
    whole = best(looked, ground) if limits.shards in (0, 1) else None
    if limits.sharding == "never" or limits.shards == 1:
        return whole, []
    if whole is not None and limits.sharding == "when_needed":
        return whole, []
    cut = _best_cut(ground)
    if whole is None or cut is None:
        return whole or cut, []
    aim = (ground.wanted.objective, ground.wanted.currency)
    alone, parted = (describe_merit(aim[0], one.merit[0], aim[1]) for one in (whole, cut))
    told = f"whole on one device: {alone} predicted, in {len(cut.candidate.target)} shards: {parted}"
    return (cut if cut.beats(whole) else whole), [told]
