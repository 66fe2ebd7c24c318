"""Whether another plan than the running one is worth a move of workers, by the plans' objective. No effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from device_profiles.units import human_bytes
from orchestrator.daemon.control.loops.planner_port import StartPlan
from orchestrator.daemon.control.rollout.replica_diff import leave_name
from orchestrator.planning.proposal import PlanProposal
from orchestrator.planning.wanted import PlanError
from orchestrator.protocol.contract import WorkerSpec
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


class NoRoomBeside(PlanError):
    """The workers of another plan have no room beside those that run."""


def refuse_crowding(alive: Sequence[ReplicaPlacement], targets: Sequence[WorkerSpec], other: StartPlan) -> None:
    """Raise NoRoomBeside where a device cannot hold the workers of both plans: those of the `other` one are loaded
    while those that run have their memory. `alive`: the replicas that have workers, and `targets` the specs of these,
    which stay where the other plan has the same."""
    proposal, staying = other.proposal, [leave_name(spec) for spec in targets]
    placed = zip(proposal.plan.replicas, other.targets, strict=True)
    coming = [replica for replica, spec in placed if leave_name(spec) not in staying]
    takes, adds = _sum_memory(alive), _sum_memory(coming)
    for device in proposal.cluster.devices:
        room, added = room_bytes(device, proposal.wanted.constraints), adds.get(device.id, 0.0)
        needed = takes.get(device.id, 0.0) + added
        if added and needed > room:
            raise NoRoomBeside(
                f"{device.id} has no room for another worker beside what runs: together they take "
                f"{human_bytes(needed)}, and {human_bytes(room)} may be filled"
            )


def leave_room(first: PlanProposal, alive: Iterable[ReplicaPlacement]) -> PlanProposal:
    """Return what to plan from where the replicas that run keep their memory."""
    taken = _sum_memory(alive)
    devices = tuple(
        replace(device, memory_bytes=max(0, device.memory_bytes - round(taken.get(device.id, 0.0))))
        for device in first.cluster.devices
    )
    return replace(first, cluster=replace(first.cluster, devices=devices))


def _sum_memory(replicas: Iterable[ReplicaPlacement]) -> dict[str, float]:
    """Return what replicas take of each device, with their own draft workers, in bytes."""
    taken: dict[str, float] = {}
    for replica in replicas:
        draft = replica.draft.shard if replica.draft is not None and replica.draft.process == "own" else None
        for shard in (*replica.shards, *([draft] if draft is not None else [])):
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
