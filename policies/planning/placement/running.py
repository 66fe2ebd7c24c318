"""What replicas that run already are predicted to reach, on devices as they are now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.planning.placement.candidate import Candidate, PlacedShard, Where
from policies.planning.placement.links import Links, links_of
from policies.planning.placement.pools import Curve
from policies.planning.plan import (
    Device,
    DrafterFacts,
    DraftPlacement,
    Inventory,
    ModelFacts,
    PlanGoal,
    Prediction,
    ReplicaPlacement,
    Role,
    Shard,
)
from policies.planning.pool import share_requests


def predict_running(replicas: Sequence[ReplicaPlacement], cluster: Inventory, wanted: PlanGoal) -> list[Prediction]:
    """Return what is predicted of these replicas where they are, at the depth that is best for each now, where they
    share the requests that there are now. A replica is left out where a device or an option of it is not there any
    more."""
    devices, links = {device.id: device for device in cluster.devices}, links_of(cluster)
    candidates = [_find_candidate(replica, devices, cluster, links, wanted) for replica in replicas]
    curves = [Curve(candidate, links, wanted) for candidate in candidates if candidate is not None]
    shares = share_requests([curve.end_ms for curve in curves], wanted.workload.concurrency) if curves else []
    return [curve.predict_share(share).prediction for curve, share in zip(curves, shares, strict=True)]


def _find_candidate(
    replica: ReplicaPlacement, devices: Mapping[str, Device], cluster: Inventory, links: Links, wanted: PlanGoal
) -> Candidate | None:
    load, runs = wanted.workload, replica.prediction.sequences
    target = [_find_shard(shard, Role.TARGET, load.target, devices, cluster) for shard in replica.shards]
    placed = tuple(shard for shard in target if shard is not None)
    if len(placed) < len(target):
        return None
    if replica.draft is None:
        return Candidate(placed, runs)
    drafter = _find_drafter(replica.draft, replica.shards[0].runtime, load.drafters)
    if drafter is None or replica.draft.shard is None or drafter.model is None:
        return Candidate(placed, runs, drafter)
    draft = _find_shard(replica.draft.shard, Role.DRAFT, drafter.model, devices, cluster)
    if draft is None:
        return Candidate(placed, runs)
    return Candidate(placed, runs, drafter, draft, _find_where(placed[-1].device, draft.device, replica.draft, links))


def _find_shard(
    shard: Shard, role: Role, model: ModelFacts, devices: Mapping[str, Device], cluster: Inventory
) -> PlacedShard | None:
    wanted = (shard.profile, shard.runtime, shard.weights, shard.threads, role, model.name)
    option = next(
        (
            option
            for option in cluster.options
            if (option.profile, option.runtime, option.weights, option.threads, option.role, option.model) == wanted
        ),
        None,
    )
    if option is None or shard.device not in devices:
        return None
    return PlacedShard(devices[shard.device], option, shard.first_layer, shard.end_layer, model.layers)


def _find_drafter(draft: DraftPlacement, runtime: str, drafters: Sequence[DrafterFacts]) -> DrafterFacts | None:
    return next((drafter for drafter in drafters if drafter.name == draft.drafter and drafter.serves(runtime)), None)


def _find_where(target: Device, device: Device, draft: DraftPlacement, links: Links) -> Where:
    if draft.process == "target":
        return Where.IN_TARGET
    if device.id == target.id:
        return Where.BESIDE
    if device.host == target.host:
        return Where.HOST
    return Where.ZONE if links.hosts[device.host].zone == links.hosts[target.host].zone else Where.FAR
