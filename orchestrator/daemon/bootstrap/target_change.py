"""What another configuration of a target takes: nothing, other options of its workers, or other workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from orchestrator.config.changes import Change
from orchestrator.config.effects import Effect, is_of_workers
from orchestrator.config.model import ClusterConfig
from orchestrator.config.source_text import Place
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.events import StandbySpec
from orchestrator.daemon.control.loops.planner_port import StartPlan
from orchestrator.daemon.control.rollout.replica_diff import leave_name
from orchestrator.daemon.control.rollout.retune import match_retunable
from orchestrator.errors import WorkerError
from orchestrator.fitting.worker_options import list_draft_pools
from orchestrator.planning.proposal import PlanProposal
from orchestrator.protocol.contract import WorkerSpec
from policies.planning.plan import Plan, diff
from policies.serving.draft_pool import PoolSize

_COMPARED: Final = "a canary is compared with what there is"
How = Literal["nothing", "retune", "roll"]
_BITS = (
    *("source", "identity", "adapter", "device", "exactness", "weights", "activations", "kv_cache_precision"),
    "tensor_parallel",
)
"""Options of the model that may decide its bits: one with others does not take the place of a replica by itself."""


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """The workers of one target: of its replicas, the draft workers beside each, and its standbys."""

    targets: tuple[WorkerSpec, ...]
    drafts: tuple[tuple[WorkerSpec, ...], ...]
    standbys: tuple[StandbySpec, ...]
    pools: Mapping[str, PoolSize]


def list_plan_workers(planned: StartPlan, config: ClusterConfig) -> WorkerSet:
    return WorkerSet(planned.targets, planned.drafts, planned.standbys, list_draft_pools(config))


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Another plan. `first`: what it is by profiles alone; `plan`: by what the running plan's keeper knows, too."""

    first: PlanProposal
    plan: StartPlan


@dataclass(frozen=True, slots=True)
class TargetChange:
    """Another configuration of a target, and how it is reached. `workers`: None where nothing changes for them. `plan`:
    where anything is left to one. `replaced`: which models are taken anew, as they were replaced, in a line each."""

    config: ClusterConfig
    workers: WorkerSet | None = None
    how: How = "nothing"
    plan: PlanChange | None = None
    notes: tuple[str, ...] = ()
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
    kinds = [
        [tuple(str(spec.options.get("model", {}).get(name)) for name in _BITS) for spec in specs]
        for specs in (before, after)
    ]
    return kinds[0] == kinds[1]


async def move_workers(control: TargetControl, how: How, old: WorkerSet | None, new: WorkerSet) -> list[int]:
    """Let other workers be the target's; returns the numbers of the replicas, in their order. `old`: as they are to be
    now. Raises WorkerError; all is as before then."""
    before = control.list_specs()
    if how == "nothing" or old is None:
        return list(before)
    if how == "retune":
        wanted = match_retunable(before, new.targets) or {}
        try:
            await control.retune(wanted, new.drafts, new.standbys, new.pools)
        except WorkerError:
            await control.retune(before, old.drafts, old.standbys, old.pools)
            raise
        return [engine for spec in new.targets for engine, match in wanted.items() if match is spec]
    if len(before) > 1 and may_mix(list(before.values()), new.targets):
        await _roll_in_turn(control, list(before.values()), old, new)
    return await control.change(new.targets, new.drafts, new.standbys, new.pools)


async def _roll_in_turn(control: TargetControl, before: list[WorkerSpec], old: WorkerSet, new: WorkerSet) -> None:
    """Replace all replicas but the last, one after the other. Raises WorkerError; all run as before then."""
    for done in range(1, len(before)):
        try:
            await control.change([*new.targets[:done], *before[done:]], old.drafts)
        except WorkerError:
            if done > 1:
                await control.change(before, old.drafts)
            raise


def describe_change(how: How, running: Mapping[int, WorkerSpec], after: WorkerSet) -> list[str]:
    if how == "nothing":
        return []
    if how == "retune":
        wanted = [leave_name(spec) for spec in after.targets]
        count = sum(leave_name(spec) not in wanted for spec in running.values())
        return [f"{count} target workers go on by other options; no model is loaded again"]
    stay, coming = [leave_name(spec) for spec in running.values()], 0
    for spec in map(leave_name, after.targets):
        if spec in stay:
            stay.remove(spec)
        else:
            coming += 1
    turns = "one after the other" if may_mix(list(running.values()), after.targets) else "all together"
    kept = f", of which {goes_on} go on" if (goes_on := len(running) - len(stay)) else ""
    return [f"{coming} target workers are started beside the {len(running)} that serve, {turns}{kept}"]


def describe_plan_change(before: Plan, after: Plan) -> list[str]:
    """Return in a line each what another plan places otherwise, and what it predicts."""
    difference = diff(before, after)
    lines = [
        f"plan: {change.part}: {change.before or 'none'} -> {change.after or 'none'}" for change in difference.changes
    ]
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
    if any(config.model.bounds is not None for config in both):
        return "the number of replicas follows load"
    if any(config.plans_hosts for config in both):
        return "the plan is made over the hosts of a cluster"
    if any(config.planned for config in both) and not planned:
        return "there is no plan yet"
    return ""


def _is_about(place: Place, running: ClusterConfig, wanted: ClusterConfig) -> bool:
    """Return whether what stands at a place is another value for this target. A further target may have its own."""
    if place[0] == "models":
        return True
    values: list[Any] = [running, wanted]
    for key in place:
        values = [getattr(value, str(key), None) for value in values]
    return bool(values[0] != values[1])


def affects_workers(changes: Sequence[Change], number: int) -> bool:
    """Return whether any of these changes is one for the workers of the target of this number."""
    return any(
        change.effect is not Effect.RESTART
        and is_of_workers(change.place)
        and (change.place[0] != "models" or change.place[1] == number - 1)
        for change in changes
    )
