"""The cores of a host that each worker of a plan gets, where several share its processor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.config.drafts import ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.target import Replicas
from orchestrator.planning.proposal import PlanProposal
from policies.planning.core_split import CoreNeed, split_cores


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
    """Return what runs on a host, by the replica's number and whether it is its draft."""
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
