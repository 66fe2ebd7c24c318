"""What another configuration of a target takes: nothing, other options of its workers, or other workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from orchestrator.config.changes import Change
from orchestrator.config.effects import Effect, is_of_workers
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Place
from orchestrator.daemon.control.events import StandbySpec
from orchestrator.daemon.control.loops.plan_keeper import Planned
from orchestrator.daemon.control.rollout.retune import match_retunable
from orchestrator.planning.proposal import PlanProposal
from orchestrator.protocol.contract import WorkerSpec
from policies.planning.plan import Plan, diff
from policies.serving.draft_pool import PoolSize

_COMPARED: Final = "a canary is compared with what there is"
How = Literal["nothing", "retune", "roll"]
_BITS = ("source", "identity", "adapter", "device", "exactness", "weights", "activations", "kv_cache_precision")
"""Options of the model that may decide its bits: replicas with other ones cannot serve beside each other."""


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """The workers of one target: of its replicas, the draft workers beside each, and its standbys."""

    targets: tuple[WorkerSpec, ...]
    drafts: tuple[tuple[WorkerSpec, ...], ...]
    standbys: tuple[StandbySpec, ...]
    pools: Mapping[str, PoolSize]


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Another plan. `first`: what it is by profiles alone; `found`: by what the running plan's keeper knows, too."""

    first: PlanProposal
    found: Planned


@dataclass(frozen=True, slots=True)
class TargetChange:
    """Another configuration of a target, and how it is reached. `workers`: None where nothing changes for them. `plan`:
    where anything is left to one. `replaced`: which models are taken anew, as they were replaced, in a line each."""

    config: ClusterConfig
    workers: WorkerSet | None = None
    how: How = "nothing"
    plan: PlanChange | None = None
    told: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


def choose_how(running: Mapping[int, WorkerSpec], before: WorkerSet, after: WorkerSet) -> How:
    """Return what it takes that the workers of `before`, whose replicas are `running`, are those of `after`."""
    matched = match_retunable(running, after.targets)
    if matched is None:
        return "roll"
    same = all(matched[engine].options == spec.options for engine, spec in running.items())
    beside = (before.drafts, before.standbys, before.pools) == (after.drafts, after.standbys, after.pools)
    return "nothing" if same and beside else "retune"


def may_mix(before: Sequence[WorkerSpec], after: Sequence[WorkerSpec]) -> bool:
    """Return whether old and new replicas may serve beside each other, so that one is replaced after the other."""
    kinds = {tuple(str(spec.options.get("model", {}).get(name)) for name in _BITS) for spec in (*before, *after)}
    return len(kinds) == 1 and len(before) == len(after)


def describe_change(how: How, running: Mapping[int, WorkerSpec], after: WorkerSet) -> list[str]:
    """Return in a few lines what happens to workers."""
    if how == "nothing":
        return []
    if how == "retune":
        count = sum(msgspec.structs.replace(one, name="") not in _nameless(after) for one in running.values())
        return [f"{count} target workers go on by other options; no model is loaded again"]
    turns = "one after the other" if may_mix(list(running.values()), after.targets) else "all together"
    return [f"{len(after.targets)} target workers are started beside the {len(running)} that serve, {turns}"]


def describe_plan_change(before: Plan, after: Plan) -> list[str]:
    """Return in a line each what another plan places otherwise, and what it predicts."""
    found = diff(before, after)
    lines = [f"plan: {one.part}: {one.before or 'none'} -> {one.after or 'none'}" for one in found.changes]
    rates = [plan.goodput_tokens_per_s for plan in (before, after)]
    return [*(lines or ["plan: the same"]), f"plan: {rates[0]:.1f} -> {rates[1]:.1f} tokens/s predicted"]


def explain_wait(running: ClusterConfig, wanted: ClusterConfig, place: Place, *, planned: bool) -> str:
    """Return why a change waits for a restart, though its effect is another; "" where it does not. Both configurations
    are of one target; where the change is none for that, it does not wait. `planned`: it has a running plan."""
    if not is_of_workers(place) or not _is_about(place, running, wanted):
        return ""
    if running.canary.share and place[0] in ("drafts", "speculation"):
        return _COMPARED
    return _explain_workers_wait((running, wanted), planned=planned)


def explain_models_wait(running: ClusterConfig, *, planned: bool) -> str:
    """Return why models that were replaced are taken with a restart only; "" where a reload takes them."""
    return _COMPARED if running.canary.share else _explain_workers_wait((running,), planned=planned)


def _explain_workers_wait(both: Sequence[ClusterConfig], *, planned: bool) -> str:
    if any(one.model.bounds is not None for one in both):
        return "the number of replicas follows load"
    if any(one.plans_hosts for one in both):
        return "the plan is made over the hosts of a cluster"
    if any(one.planned for one in both) and not planned:
        return "there is no plan yet"
    return ""


def _is_about(place: Place, running: ClusterConfig, wanted: ClusterConfig) -> bool:
    """Return whether what stands at a place is another value for this target. A further target may have its own."""
    if place[0] == "models":
        return True
    values: list[Any] = [running, wanted]
    for key in place:
        values = [getattr(one, str(key), None) for one in values]
    return bool(values[0] != values[1])


def affects_workers(changes: Sequence[Change], number: int) -> bool:
    """Return whether any of these changes is one for the workers of the target of this number."""
    return any(
        change.effect is not Effect.RESTART
        and is_of_workers(change.place)
        and (change.place[0] != "models" or change.place[1] == number - 1)
        for change in changes
    )


def _nameless(after: WorkerSet) -> list[WorkerSpec]:
    return [msgspec.structs.replace(one, name="") for one in after.targets]
