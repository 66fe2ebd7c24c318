"""Devices of a host that are alike, over which each layer of a target is split: a plan takes them as one.

A group stands in a cluster beside its devices. What a plan chooses from has either: so no device is taken twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from device_profiles.measured import DeviceRates, MatmulRate
from policies.planning.merit import describe_loss, is_better, sum_merits
from policies.planning.plan import Constraints, Device, Inventory, NoPlan, Plan, PlanGoal, RejectedCandidate, Role


def join_devices(members: Sequence[Device], profile: str) -> Device:
    """Return these devices as one. The ranks wait for the busiest, and each holds as much as the fullest has room
    for."""
    first, count = members[0], len(members)
    worst = min(members, key=lambda device: device.health)
    rates = tuple(MatmulRate(rate.precision, count * rate.flops) for rate in first.rates.matmul)
    return replace(
        first,
        id=f"{first.id}{'+' if count == 2 else '..'}{members[-1].id.rpartition('/')[2]}",
        profile=profile,
        memory_bytes=count * min(device.memory_bytes for device in members),
        utilisation=max(device.utilisation for device in members),
        queue_depth=max(device.queue_depth for device in members),
        rates=DeviceRates(rates, count * first.rates.bandwidth_bytes_per_s),
        power_w=count * min(device.power_w for device in members),
        price_per_hour=sum(device.price_per_hour for device in members),
        health=worst.health,
        health_why=worst.health_why,
        ranks=tuple(device.id for device in members),
    )


def refresh_groups(cluster: Inventory) -> Inventory:
    """Return the cluster with groups that are as their devices are now."""
    known = {device.id: device for device in cluster.devices}
    devices = tuple(
        join_devices([known[name] for name in device.ranks], device.profile) if device.ranks else device
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def leave_groups(cluster: Inventory) -> Inventory:
    """Return the cluster with each device by itself."""
    return replace(cluster, devices=tuple(device for device in cluster.devices if not device.ranks))


def list_groups(cluster: Inventory, limits: Constraints) -> dict[int, list[Device]]:
    """Return the groups that may host the target by their size, of each size the least busy first."""
    groups: dict[int, list[Device]] = {}
    for device in sorted(cluster.devices, key=lambda device: (device.utilisation, -device.memory_bytes, device.id)):
        may = not limits.pin_target or device.is_within(limits.pin_target)
        if device.ranks and device.health and may and not device.is_touched_by(limits.exclude):
            groups.setdefault(len(device.ranks), []).append(device)
    return {count: groups[count] for count in sorted(groups)}


def keep_ranks(cluster: Inventory, count: int) -> Inventory:
    """Return the cluster in which groups of this size alone may host something."""
    return replace(cluster, options=tuple(option for option in cluster.options if option.ranks == count))


def take_groups(cluster: Inventory, groups: Sequence[Device], first: str, most: int) -> Inventory:
    """Return the cluster with so many of these groups as have no device in common, beside the devices that are left.
    The one with the id `first` is among them, and then the first ones are."""
    chosen: list[Device] = []
    used: set[str] = set()
    for group in sorted(groups, key=lambda group: group.id != first):
        if len(chosen) < most and used.isdisjoint(group.ranks):
            chosen.append(group)
            used |= set(group.ranks)
    left = (device for device in leave_groups(cluster).devices if device.id not in used)
    return replace(cluster, devices=(*left, *chosen))


def choose_plan(plans: Mapping[str, Plan], refused: Mapping[str, NoPlan], wanted: PlanGoal) -> Plan:
    """Return the plan with most merit, of those with as many replicas as there are to be; the first of equals. The
    others are among what it rejects, and so is what has no plan."""
    merits = {
        name: sum_merits(wanted.objective, [replica.prediction for replica in plan.replicas])
        for name, plan in plans.items()
    }
    counts = {name: min(len(plan.replicas), wanted.constraints.min_replicas) for name, plan in plans.items()}
    best = next(iter(plans))
    for name in plans:
        enough = counts[name] - counts[best]
        if enough > 0 or (enough == 0 and is_better(merits[name], merits[best])):
            best = name
    lost = [
        RejectedCandidate(
            f"{name}: {', '.join(shard.device for replica in plan.replicas for shard in replica.shards)}",
            f"{describe_loss(wanted.objective, merits[name][0], merits[best][0])} than the plan's",
            Role.TARGET.value,
            plan.goodput_tokens_per_s,
            plan.cost_per_million_tokens,
            plan.joules_per_token,
            plan.pool.tpot_p95_ms,
        )
        for name, plan in plans.items()
        if name != best
    ]
    lost += [RejectedCandidate(name, str(why), Role.TARGET.value) for name, why in refused.items()]
    return replace(plans[best], rejected=(*plans[best].rejected, *lost))
