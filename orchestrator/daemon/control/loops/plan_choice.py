"""Whether another plan than the running one is worth a move of workers, by the plans' objective. No effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from device_profiles.units import human_bytes
from orchestrator.planning.correction import key_of
from orchestrator.planning.proposal import PlanProposal
from orchestrator.planning.wanted import PlanError
from policies.planning.merit import describe_merit, sum_merits
from policies.planning.placement.workers import room_bytes
from policies.planning.plan import Plan, Prediction, ReplicaPlacement, diff
from policies.serving import drift


def weigh_move(running: Plan, other: PlanProposal, reached: Sequence[Prediction]) -> tuple[bool, str]:
    """Return whether workers move for another plan, and why, in a line: it may be the same by now. `reached`: what the
    running one reaches. Raises PlanError, with the reason, where the move is not worth it."""
    plan = other.plan
    promised = [replica.prediction for replica in plan.replicas]
    merits = [sum_merits(plan.objective, predictions)[0] for predictions in (reached, promised)]
    texts = [describe_merit(plan.objective, merit, plan.currency) for merit in merits]
    changes = "; ".join(
        f"{change.part}: {change.before or 'none'} -> {change.after or 'none'}"
        for change in diff(running, plan).changes
        if change.restart
    )
    now = f"{texts[0]} with corrected costs"
    if not changes:
        return False, f"kept: {now}, and still the best"
    few = len(running.replicas) < len(plan.replicas) <= other.wanted.constraints.min_replicas
    if not few and not drift.worth_moving(*merits):
        raise PlanError(f"{now}, and the best other is predicted to reach {texts[1]} only")
    return True, f"changed, {texts[0]} -> {texts[1]} predicted: {changes}"


def refuse_crowding(running: Sequence[ReplicaPlacement], other: PlanProposal) -> None:
    """Raise PlanError where a device has no room for the workers of both plans: those of the other one are loaded while
    the `running` ones still have theirs."""
    held = [_name_worker(replica) for replica in running]
    coming = [replica for replica in other.plan.replicas if _name_worker(replica) not in held]
    takes, adds = _sum_memory(running), _sum_memory(coming)
    for device in other.cluster.devices:
        room, added = room_bytes(device, other.wanted.constraints), adds.get(device.id, 0.0)
        needed = takes.get(device.id, 0.0) + added
        if added and needed > room:
            raise PlanError(
                f"{device.id} has no room for another worker beside what runs: together they take "
                f"{human_bytes(needed)}, and {human_bytes(room)} may be filled"
            )


def _name_worker(replica: ReplicaPlacement) -> tuple[object, ...]:
    """Return what tells whether a worker of one plan is that of another, too."""
    drafter = replica.draft.drafter if replica.draft is not None and replica.draft.process == "target" else ""
    shards = [(*key_of(shard), shard.device, shard.first_layer, shard.end_layer) for shard in replica.shards]
    return replica.kv_cache_bytes, drafter, shards


def _sum_memory(replicas: Iterable[ReplicaPlacement]) -> dict[str, float]:
    """Return what replicas take of each device, in bytes."""
    taken: dict[str, float] = {}
    for shard in (shard for replica in replicas for shard in replica.shards):
        for device in shard.devices:
            taken[device] = taken.get(device, 0.0) + shard.memory.total / len(shard.devices)
    return taken


def refuse_idle_growth(fewer: Plan, more: PlanProposal, count: int) -> None:
    """Raise PlanError where more replicas than the `count` that run are not predicted to serve more than `fewer`."""
    plan = more.plan
    predictions = [[replica.prediction for replica in made.replicas] for made in (fewer, plan)]
    merits = [sum_merits(plan.objective, predicted)[0] for predicted in predictions]
    if not drift.worth_moving(*merits):
        texts = [describe_merit(plan.objective, merit, plan.currency) for merit in merits]
        raise PlanError(f"{texts[1]} predicted with {len(plan.replicas)} replicas, {texts[0]} with {count}")
