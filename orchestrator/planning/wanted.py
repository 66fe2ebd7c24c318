"""What is asked of a plan, from the section `placement` and what is to be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from device_profiles.acceptance import PairAcceptance
from device_profiles.profile import Exactness
from orchestrator.config.placement import PlacementSection
from orchestrator.config.target import THIS_NODE
from orchestrator.planning.models import PlannedModel
from policies.models.quantization import AS_FILE
from policies.planning.cascade_yield import MOST_CHECKED
from policies.planning.plan import CheaperDrafter, Constraints, DrafterFacts, Objective, PlanGoal, TermWeights, Workload

SUFFIX = DrafterFacts(
    name="suffix",
    acceptance=(0.83, 0.83, 0.83, 0.83, 0.6),
    coverage=0.41,
    token_ms=0.005,
)
"""Drafts from the text itself, as replayed on Spec-Bench prompts with the default model: 1.05 accepted tokens a round
at depth 4, 1.3 at depth 8."""


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A draft model to choose, and the chance that a token of it is accepted. `index`: its place in `drafts` of
    cluster.yaml; `name`: what the daemon calls it. `cascade`: it checks cheaper drafters' tokens in its steps.
    `placed`: cluster.yaml says that it runs in the target's process, and where: it is there whatever a plan chooses.
    """

    model: PlannedModel
    acceptance: tuple[float, ...]
    index: int = -1
    name: str = ""
    cascade: bool = False
    placed: bool = False


def build_plan_goal(
    placement: PlacementSection,
    target: PlannedModel,
    drafters: Sequence[DrafterFacts],
    *,
    exactness: Exactness,
    depth_bound: int,
    replicas: int,
    least_replicas: int = 1,
    one_host: bool = False,
    shard_runtimes: tuple[str, ...] = (),
) -> PlanGoal:
    """Return it as the planner takes it. The API is the daemon's: on this node, where the plan is for one with it."""
    weights = placement.score_weights.model_dump()
    return PlanGoal(
        Workload(
            target=target.facts,
            drafters=tuple(drafters) if depth_bound else (),
            concurrency=placement.concurrency,
            prompt_tokens=placement.prompt_tokens,
            output_tokens=placement.output_tokens,
            exactness=exactness,
            depth_bound=depth_bound,
        ),
        Constraints(
            pin_target=placement.pin_target,
            pin_draft=placement.pin_draft,
            exclude=placement.exclude,
            apart="" if placement.anti_affinity == "none" else placement.anti_affinity,
            replicas_apart=placement.replicas_apart,
            zones=placement.zones,
            sharding=placement.sharding,
            one_host=one_host,
            shard_runtimes=shard_runtimes,
            max_replicas=replicas,
            min_replicas=least_replicas,
            standby=placement.standby,
            keep_free=placement.keep_free,
        ),
        TermWeights(**weights),
        Objective(placement.objective),
        placement.currency,
        THIS_NODE,
    )


def model_drafter(draft: DraftCandidate) -> DrafterFacts:
    """Return a draft model as the planner takes it."""
    return DrafterFacts(draft.model.name, draft.acceptance, draft.model.facts)


def list_cheaper(
    draft: DraftCandidate,
    drafts: Sequence[DraftCandidate],
    text: DrafterFacts | None,
    pairs: Sequence[PairAcceptance],
    target: str,
) -> tuple[CheaperDrafter, ...]:
    """Return whose tokens a draft model checks in its steps: the text's own (`text`: None where nobody drafts so), and
    those of models before it that are there in any case.

    How often tokens are its own choice is what was measured with it as the target; else what is known with the target.
    A step of a cheaper model takes the share that its weights have of this one's.
    """
    if not draft.cascade:
        return ()
    found = []
    if text is not None:
        known = build_measured_drafter(text, "suffix", pairs, draft.model.name, 1, MOST_CHECKED, rule="fixed")
        if known == text:
            known = build_measured_drafter(text, "suffix", pairs, target, 1, MOST_CHECKED, rule="fixed")
        found.append(CheaperDrafter("suffix", known.acceptance, known.coverage))
    for one in drafts:
        if one.index >= draft.index or not one.placed:
            continue
        known = build_measured_drafter(
            model_drafter(one), one.name, pairs, draft.model.name, 1, MOST_CHECKED, rule="fixed"
        )
        share = _read_bits(one.model) / max(1.0, _read_bits(draft.model))
        below = list_cheaper(one, drafts, text, pairs, target)
        found.append(CheaperDrafter(one.name, known.acceptance, known.coverage, share, below, in_process=True))
    return tuple(found)


def _read_bits(model: PlannedModel) -> float:
    """Return the bits of the weights that a step of a model reads."""
    return model.shape.elements * model.bits(model.weights[0] if model.weights else AS_FILE)


def build_measured_drafters(
    drafter: DrafterFacts, name: str, pairs: Sequence[PairAcceptance], target: str, concurrency: int, bound: int
) -> list[DrafterFacts]:
    """Return a drafter as measured where the policy chooses depths up to a bound: once for each runtime that was
    measured with it, or once for all."""
    known = {one.adapter for one in pairs if (one.drafter, one.target) == (name, target)}
    return [
        build_measured_drafter(drafter, name, pairs, target, concurrency, bound, runtime=runtime)
        for runtime in sorted(known - {""}) or [""]
    ]


def build_measured_drafter(
    drafter: DrafterFacts,
    name: str,
    pairs: Sequence[PairAcceptance],
    target: str,
    concurrency: int,
    depth: int,
    *,
    rule: str = "policy",
    runtime: str = "",
) -> DrafterFacts:
    """Return a drafter with what was measured of it on this target at about this depth, where that was.

    Of several measurements it is the one in which this rule chose the depth (that which serves, else), in this runtime,
    for about so many sequences.
    """
    drafter = replace(drafter, runtime=runtime)
    mine = [one for one in pairs if (one.drafter, one.target) == (name, target) and one.adapter in ("", runtime)]
    if not mine:
        return drafter
    best = min(mine, key=lambda one: (one.rule != rule, abs(one.sequences - concurrency), one.workload))
    found = best.at(depth)
    if not found.offered or not found.offered[0] or not found.accepted[0]:
        return drafter
    coverage = found.offered[0]
    chances = (found.accepted[0] / coverage, *found.conditional[1:])
    text = drafter.model is None
    return replace(
        drafter,
        acceptance=tuple(min(1.0, chance) for chance in chances),
        coverage=min(1.0, coverage),
        offered=found.offered if text else (),
        changes=found.changes if text else 0.0,
        by_policy=text and best.rule == "policy",
        token_ms=best.draft_ms / sum(found.offered) if text else 0.0,
    )
