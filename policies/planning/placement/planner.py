"""candidates -> filters -> score -> plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from policies.planning.merit import describe_merit, fill_in_expense, is_better, sum_expense
from policies.planning.placement.alike import FEW
from policies.planning.placement.candidate import ScoredCandidate, replica, with_own_score
from policies.planning.placement.filters import Usable, spell_places, usable
from policies.planning.placement.links import Links, links_of
from policies.planning.placement.pools import Pool, Pools
from policies.planning.placement.ranks import choose_plan, keep_ranks, leave_groups, list_groups, take_groups
from policies.planning.placement.reasons import alternatives, device_reasons, no_plan
from policies.planning.placement.search import SearchResult, SearchSpace, search
from policies.planning.placement.several import Fleet, choose_replica
from policies.planning.placement.standby import standby
from policies.planning.plan import (
    Host,
    Inventory,
    NoPlan,
    Plan,
    PlanGoal,
    RejectedCandidate,
    ReplicaPlacement,
    Role,
)

UNLIKE = "its bits would differ from the other replicas', and model.alike is true"
"""Why an option is rejected where all replicas are to be alike."""
# Every number of replicas up to this one. ADR 0055; above, they double.
_EVERY_COUNT = 8


def plan_placement(cluster: Inventory, wanted: PlanGoal) -> Plan:
    """Return the best plan by the objective, whatever the order of what is given. Devices may be in groups, over which
    each layer is split (see ranks.py).

    Raises NoPlan, with the reasons and the way out, where nothing satisfies what was asked for.
    """
    wanted = replace(wanted, constraints=spell_places(wanted.constraints, cluster))
    limits = wanted.constraints
    most = min(limits.max_replicas, max(limits.min_replicas, wanted.workload.concurrency))
    alone = replace(wanted, constraints=replace(limits, max_replicas=1, min_replicas=1, standby=False))
    plans: dict[str, Plan] = {}
    refused: dict[str, NoPlan] = {}
    whole = "no layer split"
    try:
        plans[whole] = _plan_variant(leave_groups(cluster), wanted)
    except NoPlan as error:
        refused[whole] = error
    for count, groups in list_groups(cluster, limits).items():
        name = f"layers split over {count} ranks"
        try:
            best = _plan_variant(keep_ranks(cluster, count), alone).replicas[0].shards[0].device
            plan = _plan_variant(take_groups(cluster, groups, best, most), wanted)
        except NoPlan as error:
            refused[name] = error
            continue
        if any(shard.ranks for shard in plan.shards):
            plans[name] = plan
    if not plans:
        raise refused[whole]
    return choose_plan(plans, refused, wanted)


def _plan_variant(cluster: Inventory, wanted: PlanGoal) -> Plan:
    """Return the best plan for devices of which none is in another. Raises NoPlan."""
    left, links = usable(cluster, wanted), links_of(cluster)
    if wanted.constraints.alike and wanted.constraints.max_replicas > 1:
        left = _keep_best_group(left, links, wanted)
    looked = search(SearchSpace(left, links, wanted, wanted.workload.concurrency))
    pool, reasons = _place_replicas(left, links, wanted, looked)
    if pool is None:
        raise no_plan(looked, left, wanted)
    chosen = [with_own_score(scored, wanted) for scored in pool.list_members()]
    taken_cores: dict[str, int] = {}
    placed = [replica(scored, taken_cores, left.hosts, wanted) for scored in chosen]
    replicas = share_expenses(placed, chosen, left.hosts)
    instead, why_none = standby(chosen, looked, left, links, wanted)
    part = max(1, chosen[0].prediction.requests or 0)
    alike = looked if len(chosen) == 1 else search(SearchSpace(left, links, wanted, part))
    rejected = (
        *left.rejected,
        *looked.rejected,
        *alternatives(chosen, alike, links, wanted),
        *device_reasons(chosen, alike, left, wanted, pool.left_out),
    )
    plan = Plan(wanted.workload.target.name, replicas, instead, rejected, (), wanted.objective, wanted.currency)
    return replace(plan, reasons=(*reasons, *_describe_groups(plan), *why_none))


def _describe_groups(plan: Plan) -> list[str]:
    """Return a line where replicas have unlike bits: who goes on for whom."""
    groups = plan.groups
    if len(groups) < 2:
        return []
    named = [f"{' and '.join(map(str, numbers))} ({name})" for name, numbers in groups.items()]
    text = f"replicas of {len(groups)} groups of equal bits: {'; '.join(named)}"
    return [f"{text}; a stream goes on in another group only as failover.other_bits says"]


def _keep_best_group(left: Usable, links: Links, wanted: PlanGoal) -> Usable:
    """Return what is left for replicas of one group of equal bits, the one with most merit together."""
    best: tuple[tuple[float, float], Usable] | None = None
    for group in sorted({option.group for options in left.targets.values() for option in options}):
        targets = {
            profile: kept
            for profile, options in left.targets.items()
            if (kept := tuple(option for option in options if option.group == group))
        }
        only = replace(left, targets=targets)
        looked = search(SearchSpace(only, links, wanted, wanted.workload.concurrency))
        pool, _ = _place_replicas(only, links, wanted, looked)
        if pool is not None and (best is None or is_better(pool.merit, best[0])):
            best = pool.merit, only
    if best is None:
        return left
    stays = {id(option) for options in best[1].targets.values() for option in options}
    out = [
        RejectedCandidate(f"{profile} {option.label}", UNLIKE, Role.TARGET.value)
        for profile, options in left.targets.items()
        for option in options
        if id(option) not in stays
    ]
    return replace(best[1], rejected=(*left.rejected, *out))


def share_expenses(
    placed: Sequence[ReplicaPlacement], chosen: Sequence[ScoredCandidate], hosts: Mapping[str, Host]
) -> tuple[ReplicaPlacement, ...]:
    """Return replicas with what they cost: those on one host share its price."""
    used = [{part.device.host for part in scored.in_use} for scored in chosen]
    count = Counter(host for some in used for host in some)
    priced = []
    for part, scored, some in zip(placed, chosen, used, strict=True):
        shared = {host: replace(hosts[host], price_per_hour=hosts[host].price_per_hour / count[host]) for host in some}
        expense = sum_expense([placed_part.device for placed_part in scored.in_use], shared)
        priced.append(replace(part, prediction=fill_in_expense(part.prediction, expense)))
    return tuple(priced)


def _place_replicas(
    left: Usable, links: Links, wanted: PlanGoal, looked: SearchResult
) -> tuple[Pool | None, list[str]]:
    """Return the replicas with most merit together, and why so many; fewer where these are as good, and where there is
    no room for as many as there are to be at least. None: there is no place for one."""
    least = wanted.constraints.min_replicas
    most = min(wanted.constraints.max_replicas, max(least, wanted.workload.concurrency))
    scored, reasons = choose_replica(SearchSpace(left, links, wanted, wanted.workload.concurrency), looked)
    if scored is None:
        return None, reasons
    pools = Pools(Fleet(left, links, wanted))
    best, tried = pools.build([pools.draw(scored.candidate)]), {1}
    counts = _counts(most, len(looked.index.devices)) if wanted.constraints.max_replicas > 1 else []
    while counts:
        count = counts.pop(0)
        tried.add(count)
        pool, room = pools.place(count)
        if room < count:
            counts = [room] if room not in tried and room > 1 else []
            reasons.append(f"{count} replicas: there is room for {room}")
            continue
        idle = count - len(pool.replicas)
        name = f"{count} replicas" + (f", of which {idle} would serve none or too late" if idle else "")
        best = _choose_pool(best, pool, name, wanted, reasons)
    if most > 1:
        other = pools.place_any()
        given_up = wanted.weights.indifference  # for a better score
        if other is not None and is_better((other.merit[0] * (1.0 - given_up), other.merit[1]), best.merit):
            best = _choose_pool(best, other, f"{len(other.replicas)} others, of every pool", wanted, reasons)
    if most < wanted.constraints.max_replicas and len(best.replicas) == most:
        many = f"{most} replicas" if most > 1 else "one replica"
        reasons.append(f"{many}: as many as requests are planned for at once (placement.concurrency)")
    return replace(best, left_out=tuple(pools.explain_left_out(best)) if most > 1 else ()), reasons


def _choose_pool(best: Pool, pool: Pool, name: str, wanted: PlanGoal, reasons: list[str]) -> Pool:
    """Return the better of two pools, and say why: the first where they are equal."""
    least, count = wanted.constraints.min_replicas, len(best.replicas)
    described = [describe_merit(wanted.objective, each.merit[0], wanted.currency) for each in (pool, best)]
    better, lacking = is_better(pool.merit, best.merit), count < least and len(pool.replicas) > count
    reasons.append(
        f"{name}: {described[0]} predicted, {count}: {described[1]}"
        + ("" if better else f"; more do not help `{wanted.objective}`")
        + (f", and there are to be {least}" if lacking and not better else "")
    )
    return pool if better or lacking else best


def _counts(most: int, devices: int) -> list[int]:
    """Return how many replicas to try: of few devices every number up to a bound, then twice as many each time."""
    every = _EVERY_COUNT if devices <= FEW else 2
    counts = list(range(2, min(every, most) + 1))
    while counts and counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts
