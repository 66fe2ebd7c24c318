"""The cores of this host that each worker of a plan gets, where several share its processor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from orchestrator.config.drafts import ModelDraft
from orchestrator.config.model import ClusterConfig
from orchestrator.config.target import THIS_NODE, Placement
from orchestrator.planning.proposal import PlanProposal
from policies.planning.core_split import CoreNeed, split_cores
from policies.planning.plan import Shard


@dataclass(frozen=True, slots=True)
class ReplicaCores:
    """Of one replica's target, and of its draft where that has a worker of its own; () runs on any."""

    target: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()


def place_on_cores(
    config: ClusterConfig, proposal: PlanProposal, groups: Sequence[Collection[int]]
) -> list[ReplicaCores]:
    """Return the cores of each replica of the plan, in its order. `groups`: of this host, by physical core.

    What the configuration names stays. Where one worker alone computes on the processor, it may run anywhere.
    """
    needs: dict[tuple[int, bool], CoreNeed] = {}
    for number, replica in enumerate(proposal.plan.replicas):
        target, draft = replica.shards[0], replica.draft
        _add_need(needs, (number, False), target, _find_target_cores(config, number), config.devices.threads)
        if draft is not None and draft.shard is not None and draft.process == "own":
            entry = _find_draft(config, proposal, draft.drafter)
            fixed, threads = (entry.cores, entry.threads) if entry is not None else ([], 0)
            _add_need(needs, (number, True), draft.shard, fixed, threads)
    found = dict(zip(needs, split_cores(list(needs.values()), groups), strict=True)) if len(needs) > 1 else {}
    numbers = range(len(proposal.plan.replicas))
    return [ReplicaCores(found.get((number, False), ()), found.get((number, True), ())) for number in numbers]


def pin_target(config: ClusterConfig, number: int, cores: tuple[int, ...], threads: int) -> list[Placement]:
    """Return where replicas run, that of this number on these cores, with so many threads where none are written."""
    placements = list(config.model.placements)
    if cores and number < len(placements) and not _find_target_cores(config, number):
        mine = placements[number]
        own_threads = mine.threads or config.devices.threads or threads
        placements[number] = mine.model_copy(update={"cores": list(cores), "threads": own_threads})
    return placements


def _add_need(
    needs: dict[tuple[int, bool], CoreNeed], key: tuple[int, bool], shard: Shard, fixed: Sequence[int], threads: int
) -> None:
    if shard.host == THIS_NODE and shard.cores:
        needs[key] = CoreNeed(threads or shard.threads, tuple(fixed))


def _find_target_cores(config: ClusterConfig, number: int) -> list[int]:
    placements = config.model.placements
    own = placements[number].cores if number < len(placements) else []
    return own or config.devices.cores


def _find_draft(config: ClusterConfig, proposal: PlanProposal, drafter: str) -> ModelDraft | None:
    index = next((one.index for one in proposal.asked.drafts if one.model.name == drafter), None)
    found = config.drafts[index] if index is not None else None
    return found if isinstance(found, ModelDraft) else None
