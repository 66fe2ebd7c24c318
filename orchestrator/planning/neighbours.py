"""What the other targets of a daemon take of devices, for the plan of one: their memory, and a share of the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from device_profiles.device_names import is_same_device
from device_profiles.units import human_bytes
from orchestrator.config.drafts import ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.planning.models import PlannedModel, model_at_hand
from policies.planning.plan import Device, Inventory, Plan


@dataclass(frozen=True, slots=True)
class ReservedDraft:
    """A draft model that only the canary has, and where each replica loads it."""

    model: PlannedModel
    adapter: str
    device: str
    kv_cache_bytes: int
    share: float = 1.0
    """Of it, what is on this device: others have the rest, as ranks or as layers."""

    def is_on(self, device: Device) -> bool:
        return is_same_device(device.name_for(self.adapter), self.device)

    def memory_bytes(self, kind: str) -> int:
        """Return what it holds on a device of that kind, as estimated from its file and its KV cache."""
        elements, bits = self.model.shape.elements, self.model.bits(self.model.formats(kind)[0])
        return round(self.share * (elements * bits / 8 + self.kv_cache_bytes))

    def describe_reserve(self, replicas: int) -> str:
        each = ", for each replica" if replicas > 1 else ""
        size = human_bytes(self.memory_bytes("cpu"))
        return f"the canary's {self.model.name}: {size} on {self.adapter} {self.device} are left for it{each}"


def beside_the_plan(config: ClusterConfig, base: Path) -> tuple[ReservedDraft, ...]:
    """Return the draft models that only the canary has. Raises ModelRefused or DownloadFailed."""
    if not config.canary.share or not config.canary_speculation.depth:
        return ()
    drafts = config.canary_drafts or (() if config.speculation.depth else config.drafts)
    return tuple(reserve_draft(draft, base, draft.device) for draft in drafts if isinstance(draft, ModelDraft))


def reserve_draft(draft: ModelDraft, base: Path, device: str) -> ReservedDraft:
    """Return what a draft takes of `device`, by its files' heads. Raises ModelRefused or DownloadFailed."""
    model = model_at_hand(draft.source, "", base, draft.weights, adapter=draft.adapter, drafts=True)
    return ReservedDraft(model, draft.adapter, device, int(draft.kv_cache))


def sum_reserved_bytes(device: Device, beside: Sequence[ReservedDraft], replicas: int) -> int:
    """Return the bytes of a device that are not the plan's."""
    return replicas * sum(draft.memory_bytes(device.kind) for draft in beside if draft.is_on(device))


@dataclass(frozen=True, slots=True)
class TakenPlace:
    """What a model of another target takes. `device`: as plans name it, with the memory that its plan gave it. Where no
    plan placed it that is "", and `fixed` says what it is; `host`: where, "" for any. `first`: its target goes before
    the one that is planned, in the order of the file, and so has its share of the time."""

    target: str
    device: str = ""
    memory_bytes: int = 0
    host: str = ""
    fixed: ReservedDraft | None = None
    first: bool = True

    def count_bytes(self, device: Device) -> int | None:
        if self.fixed is None:
            return self.memory_bytes if device.id == self.device else None
        is_here = self.host in ("", device.host) and self.fixed.is_on(device)
        return self.fixed.memory_bytes(device.kind) if is_here else None


def list_plan_places(target: str, plan: Plan, *, first: bool) -> list[TakenPlace]:
    shards = [shard for replica in plan.replicas for shard in replica.shards]
    shards += [
        replica.draft.shard
        for replica in plan.replicas
        if replica.draft is not None and replica.draft.shard is not None
    ]
    return [
        TakenPlace(target, device, shard.memory.total // len(shard.devices), first=first)
        for shard in shards
        for device in shard.devices
    ]


def leave_taken(cluster: Inventory, taken: Sequence[TakenPlace], before: Sequence[TakenPlace] = ()) -> Inventory:
    """Return the cluster without the memory that others take. `before`: what was taken off already."""

    def leave(device: Device) -> Device:
        known = [sum(place.count_bytes(device) or 0 for place in places) for places in (before, taken)]
        return replace(device, memory_bytes=max(0, device.memory_bytes + known[0] - known[1]))

    return replace(cluster, devices=tuple(map(leave, cluster.devices))) if taken or before else cluster


def share_time(cluster: Inventory, taken: Sequence[TakenPlace]) -> Inventory:
    """Return the cluster with the time that targets take which go before: on a device with one of them half is left,
    with two a third. Where more is in use now, that counts."""

    def share(device: Device) -> Device:
        sharers = len(_list_sharers(device, taken))
        return replace(device, utilisation=max(device.utilisation, 1.0 - 1.0 / (1 + sharers)))

    return replace(cluster, devices=tuple(map(share, cluster.devices))) if taken else cluster


def describe_taken(cluster: Inventory, taken: Sequence[TakenPlace]) -> Iterable[str]:
    """Yield in a line what others take of each device."""
    for device in cluster.devices:
        size = sum(place.count_bytes(device) or 0 for place in taken)
        sharers = _list_sharers(device, taken)
        if sharers:
            left = f"1/{1 + len(sharers)} of its time is planned with"
            yield f"{', '.join(sharers)} on {device.id}: {human_bytes(size)} of its memory, and {left}"


def _list_sharers(device: Device, taken: Iterable[TakenPlace]) -> list[str]:
    sharing = (place.target for place in taken if place.first and place.count_bytes(device) is not None)
    return list(dict.fromkeys(sharing))
