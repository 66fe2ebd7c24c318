"""A plan as a configuration: what is `auto` becomes what the plan chose, and everything else stays as it is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ByteSize

from device_profiles.device_names import is_processor, is_same_device
from orchestrator.config.drafts import Draft, ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.target import AUTO, Replicas, TargetShard
from orchestrator.fitting.worker_options import place_drafts
from orchestrator.planning.here import Allowed
from orchestrator.planning.proposal import PlanProposal
from orchestrator.planning.wanted import PlanRequest
from policies.planning.core_split import CoreNeed, split_cores
from policies.planning.plan import Option, Role, Shard


@dataclass(frozen=True, slots=True)
class ReplicaCores:
    """Of one replica's target, and of its draft where that has a worker of its own; () runs on any."""

    target: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()


CoresByHost = Mapping[str, Sequence[Collection[int]]]


def place_on_cores(config: ClusterConfig, proposal: PlanProposal, cores_by_host: CoresByHost) -> list[ReplicaCores]:
    """Return the cores of each replica of the plan, in its order. `cores_by_host`: those of each host that is known, by
    physical core.

    What the configuration names stays. Where one worker alone computes on a processor, it may run on any core.
    """
    cores: dict[tuple[int, bool], tuple[int, ...]] = {}
    for host, groups in cores_by_host.items():
        needs = _list_needs(config, proposal, host)
        if len(needs) > 1:
            cores |= zip(needs, split_cores(list(needs.values()), groups), strict=True)
    numbers = range(len(proposal.plan.replicas))
    return [ReplicaCores(cores.get((number, False), ()), cores.get((number, True), ())) for number in numbers]


def _list_needs(config: ClusterConfig, proposal: PlanProposal, host: str) -> dict[tuple[int, bool], CoreNeed]:
    needs: dict[tuple[int, bool], CoreNeed] = {}
    for number, replica in enumerate(proposal.plan.replicas):
        target, draft = replica.shards[0], replica.draft
        if target.host == host and target.cores:
            threads = config.devices.threads or target.threads
            needs[number, False] = CoreNeed(threads, tuple(_find_target_cores(config, number)))
        if draft is None or draft.shard is None or draft.process != "own":
            continue
        if draft.shard.host == host and draft.shard.cores:
            named = (candidate for candidate in proposal.request.drafts if candidate.model.name == draft.drafter)
            index = next((candidate.index for candidate in named), None)
            entry = config.drafts[index] if index is not None else None
            fixed, threads = (tuple(entry.cores), entry.threads) if isinstance(entry, ModelDraft) else ((), 0)
            needs[number, True] = CoreNeed(threads or draft.shard.threads, fixed)
    return needs


def pin_target(config: ClusterConfig, number: int, cores: tuple[int, ...], threads: int) -> Replicas:
    """Return where replicas run, that of this number on these cores, with so many threads where none are written."""
    placements = list(config.model.placements)
    if cores and number < len(placements) and not _find_target_cores(config, number):
        mine = placements[number]
        own_threads = mine.threads or config.devices.threads or threads
        placements[number] = mine.model_copy(update={"cores": list(cores), "threads": own_threads})
    return config.model.place(placements)


def _find_target_cores(config: ClusterConfig, number: int) -> list[int]:
    placements = config.model.placements
    own = placements[number].cores if number < len(placements) else []
    return own or config.devices.cores


def build_option_filter(config: ClusterConfig, request: PlanRequest) -> Allowed:
    def fits(option: Option, device: str) -> bool:
        if option.role is Role.TARGET:
            applies = not request.target.runtimes or option.runtime in request.target.runtimes
            return applies and _fits(config.model.adapter, config.model.device, option, device)
        drafts = [
            config.drafts[candidate.index] for candidate in request.drafts if candidate.model.name == option.model
        ]
        return any(
            _fits(draft.adapter, draft.device, option, device) for draft in drafts if isinstance(draft, ModelDraft)
        )

    return fits


def apply_plan(
    config: ClusterConfig, proposal: PlanProposal, number: int, cores_by_host: CoresByHost | None = None
) -> ClusterConfig:
    """Return the configuration that runs the plan's replica of this number. `cores_by_host`: those that workers may use
    there, by physical core; workers that share a host's processor by plan get cores of their own.

    Layer shards on the first one's host are in the worker's own process; those on other hosts have one each.
    """
    replica = proposal.plan.replicas[number]
    target = replica.shards[0]
    cores = place_on_cores(config, proposal, cores_by_host or {})[number]
    on_ray = config.cluster.on_ray
    drafts = [
        _draft(draft, index, proposal, number, cores.draft, on_ray=on_ray) for index, draft in enumerate(config.drafts)
    ]
    placed = tuple(draft for draft in drafts if draft is not None)
    placed_target: dict[str, Any] = {"adapter": target.runtime, "device": name_shard_device(proposal, target)}
    limits = config.limits
    if replica.kv_cache_bytes:
        limits = limits.model_copy(update={"kv_cache": ByteSize(replica.kv_cache_bytes)})
    if target.ranks:
        placed_target["tensor_parallel"] = len(target.ranks)
    if len(replica.shards) > 1:
        placed_target["shards"] = [_cut(config, proposal, shard, target.host) for shard in replica.shards]
    if cores.target:
        placed_target["replicas"] = pin_target(config, number, cores.target, target.threads)
    changes: dict[str, Any] = {
        "model": config.model.model_copy(update=placed_target),
        "drafts": placed if replica.depth else (),
        "limits": limits,
    }
    if config.canary.share and not config.canary.drafts and not replica.depth:  # the plan is the others'
        changes["canary"] = config.canary.model_copy(update={"drafts": placed})
    if on_ray:  # it was planned for that host
        placements = changes["model"].placements
        placed_there = [
            placement.model_copy(update={"host": placement.host or target.host}) for placement in placements
        ]
        changes["model"] = changes["model"].model_copy(update={"replicas": config.model.place(placed_there)})
        changes["drafts"] = place_drafts(changes["drafts"], target.host)
    if target.threads and not config.devices.threads and not config.devices.cores:
        changes["devices"] = config.devices.model_copy(update={"threads": target.threads})
    return config.model_copy(update=changes)


def list_unplaced_drafts(config: ClusterConfig, proposal: PlanProposal) -> list[str]:
    """Return which drafts of a canary that has those of everybody the plan places nowhere, so that it has none."""
    if not config.canary.share or config.canary.drafts or not config.canary_speculation.depth:
        return []
    everywhere = range(len(proposal.plan.replicas))
    if any(apply_plan(config, proposal, number).all_drafts for number in everywhere):
        return []
    return [f"drafts[{index}]" for index in range(len(config.drafts))]


def _cut(config: ClusterConfig, proposal: PlanProposal, shard: Shard, host: str) -> TargetShard:
    """Return a shard as cluster.yaml says it; `host`: of the worker that has the first one."""
    return TargetShard(
        layers=shard.end_layer - shard.first_layer,
        adapter=shard.runtime,
        device=name_shard_device(proposal, shard),
        threads=0 if config.devices.threads else shard.threads,
        host=shard.host if shard.host != host else "",
    )


def name_shard_device(proposal: PlanProposal, shard: Shard) -> str:
    device = next(device for device in proposal.cluster.devices if device.id == shard.device)
    return device.name_for(shard.runtime)


def _fits(adapter: str, device: str, option: Option, name: str) -> bool:
    simulated = option.runtime == "simulated" and is_processor(device)  # the default, which such devices do not have
    return adapter in (AUTO, option.runtime) and (device == AUTO or is_same_device(device, name) or simulated)


def _draft(
    draft: Draft, index: int, proposal: PlanProposal, number: int, cores: tuple[int, ...], *, on_ray: bool
) -> Draft | None:
    """Return a draft as it runs, on these `cores` where it has none of its own; None where the plan leaves it out."""
    if not isinstance(draft, ModelDraft) or AUTO not in (draft.adapter, draft.device):
        return draft
    chosen = proposal.plan.replicas[number].draft
    mine = next((candidate.model.name for candidate in proposal.request.drafts if candidate.index == index), "")
    if chosen is None or chosen.shard is None or chosen.drafter != mine:
        return None
    update: dict[str, Any] = {
        "adapter": chosen.shard.runtime,
        "device": name_shard_device(proposal, chosen.shard),
        "process": chosen.process,
    }
    if chosen.shard.threads and not draft.threads:
        update["threads"] = chosen.shard.threads
    if cores and chosen.process == "own":
        update["cores"] = list(cores)
    if on_ray and chosen.process == "own" and not draft.host:
        update["host"] = chosen.shard.host
    return draft.model_copy(update=update)
