"""What is asked of a plan, from the section `placement` and what is to be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adapters.names import SHARDING_ADAPTERS
from device_profiles.acceptance import PairAcceptance
from device_profiles.profile import Exactness
from orchestrator.config.drafts import EndpointDraft, HeadDraft, ModelDraft, draft_names
from orchestrator.config.load import store_directory
from orchestrator.config.lora_checks import find_lora_runtimes
from orchestrator.config.model import ClusterConfig
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.config.placement import PlacementSection
from orchestrator.config.sketch import Sketch
from orchestrator.config.target import AUTO, OwnTarget, Target
from orchestrator.errors import OutriderError
from orchestrator.planning.models import PlannedModel, build_sketched_model, model_at_hand
from orchestrator.planning.neighbours import ReservedDraft, TakenPlace, beside_the_plan
from policies.planning.plan import Constraints, DrafterFacts, Objective, PlanGoal, TermWeights, Workload
from policies.serving.failover.standby import NO_RULES, FailoverRules

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
    cluster.yaml; `name`: what the daemon calls it. `placed`: cluster.yaml says that it runs in the target's process,
    and where: it is there whatever a plan chooses. `entry`: what stands there; None where it is sketched."""

    model: PlannedModel
    acceptance: tuple[float, ...]
    index: int = -1
    name: str = ""
    placed: bool = False
    entry: ModelDraft | None = None

    def is_unchanged(self, before: DraftCandidate) -> bool:
        """Return whether it is the same model, started by the same entry, wherever that stands."""
        return (self.model, self.entry) == (before.model, before.entry)


class PlanError(OutriderError):
    """Nothing can be planned; the message says why, and the way out."""


class NoProfile(PlanError):
    """The target was measured nowhere where it may be."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The models to place, and how. `suffix`: drafts from the text itself are allowed. `canary`: some requests are
    served in another way, which is not planned; `beside`: what is loaded for that. `one_host`: a target in layer shards
    is on one, as workers without a cluster run it; `shard_runtimes` alone run shards.
    `no_drafts`: why the target can have none, "" where it can.
    `price_per_hour`: of this machine with its devices, 0 where not known. `taken`: what the daemon's other targets
    take. There are to be `least_replicas`, and at most `replicas`, `alike`: of one group of equal bits. `failover` says
    when streams go on with other bits. `max_running`: sequences that a replica decodes at once (None: as fit).
    `draft_servers`: the addresses of those that draft, which nobody prices. `kv_cache_bytes`: as configured, 0 where it
    is not. `fixed_depth`: nobody asks what drafts take."""

    target: PlannedModel
    drafts: tuple[DraftCandidate, ...]
    suffix: bool
    exactness: Exactness
    depth_bound: int
    replicas: int
    placement: PlacementSection
    canary: bool = False
    beside: tuple[ReservedDraft, ...] = ()
    price_per_hour: float = 0.0
    least_replicas: int = 1
    taken: tuple[TakenPlace, ...] = ()
    one_host: bool = False
    shard_runtimes: tuple[str, ...] = SHARDING_ADAPTERS
    no_drafts: str = ""
    alike: bool = False
    failover: FailoverRules = NO_RULES
    max_running: int | None = None
    draft_servers: tuple[str, ...] = ()
    kv_cache_bytes: int = 0
    fixed_depth: bool = False

    @property
    def most_replicas(self) -> int:
        """Return how many a plan may have: no more than there are requests at once, if they need not be there."""
        return min(self.replicas, max(self.least_replicas, self.placement.concurrency))


def build_request_from_sketch(sketch: Sketch, config: ClusterConfig | None, base: Path) -> PlanRequest:
    """Return what a sketch asks for; a sketch without a target takes cluster.yaml's.

    Raises PlanError, and what `build_request_from_config` raises.
    """
    if sketch.target is None:
        if config is None:
            raise PlanError("the sketch has no `target` and there is no cluster.yaml; write one of them")
        return replace(
            build_request_from_config(config, base, sketch.placement), beside=()
        )  # it is loaded here, not there
    drafts = tuple(DraftCandidate(build_sketched_model(draft), (draft.acceptance,)) for draft in sketch.drafts)
    return PlanRequest(
        build_sketched_model(sketch.target),
        drafts,
        True,
        sketch.exactness,
        sketch.num_speculative_tokens,
        sketch.replicas,
        sketch.placement or (config.placement if config is not None else PlacementSection()),
    )


def build_request_from_config(
    config: ClusterConfig, base: Path, placement: PlacementSection | None = None, *, digests: bool = True
) -> PlanRequest:
    """Return what cluster.yaml asks for, without `digests` for a plan that rests on no profile. Raises ModelRefused or
    DownloadFailed."""
    placement = placement or config.placement
    model, store = config.model, store_directory(config) if digests else None

    def find_model(name: str, section: Target | ModelDraft) -> PlannedModel:
        adapter = "" if section.adapter == AUTO and config.plans_hosts else section.adapter
        drafts = isinstance(section, ModelDraft)
        planned = model_at_hand(section.source, name, base, section.weights, store, adapter=adapter, drafts=drafts)
        runtimes = find_lora_runtimes(config, base) if isinstance(section, Target) else ()
        planned = planned if _may_split(config) else replace(planned, splits=())
        return replace(planned, runtimes=runtimes) if runtimes else planned

    return PlanRequest(
        find_model(model.name, model),
        tuple(
            DraftCandidate(
                find_model("", draft),
                (placement.draft_acceptance,),
                index,
                name,
                draft.process == "target" and AUTO not in (draft.adapter, draft.device),
                draft,
            )
            for index, (draft, name) in enumerate(zip(config.drafts, draft_names(config.drafts), strict=True))
            if isinstance(draft, ModelDraft)
        ),
        any(draft.method == "suffix" for draft in config.drafts),
        model.exactness,
        config.speculation.depth,
        model.most_replicas if model.bounds is None else model.bounds.min,
        placement,
        bool(config.canary.share),
        beside_the_plan(config, base),
        config.devices.price_per_hour,
        model.bounds.min if model.bounds is not None else 1,
        no_drafts=config.no_drafts,
        fixed_depth=config.speculation.method == "fixed",
        alike=model.alike,
        failover=FailoverRules(
            config.failover.after_s, other_bits=config.failover.choose_other_bits(unlike=model.unlike)
        ),
        max_running=config.limits.max_running,
        draft_servers=tuple(draft.endpoint for draft in config.drafts if isinstance(draft, EndpointDraft)),
        kv_cache_bytes=int(config.limits.kv_cache),
    )


def _may_split(config: ClusterConfig) -> bool:
    """Return whether a target's layers may be split: LoRA adapters and heads need them whole, and so do graphs of
    fixed shape."""
    heads = any(isinstance(draft, HeadDraft) for _, draft in config.all_drafts)
    return not heads and not config.model.adapters and config.model.static_shapes != "on"


@dataclass(frozen=True, slots=True)
class ReplicaDemand:
    """There are to be `least` replicas, and at most `most`, for so many `requests` at once."""

    least: int
    most: int
    requests: int


def ask_for_replicas(request: PlanRequest, demand: ReplicaDemand) -> PlanRequest:
    """Return what is asked of a plan where load wants this. It is never planned for fewer requests than configured."""
    concurrency = max(request.placement.concurrency, demand.requests)
    placement = request.placement.model_copy(update={"concurrency": concurrency})
    return replace(request, replicas=demand.most, least_replicas=demand.least, placement=placement)


def start_replicas(config: ClusterConfig, count: int) -> ClusterConfig:
    """Return the configuration that starts so many replicas, where load or a plan decides how many there are."""
    bounds = config.model.bounds
    if bounds is None and config.model.replicas != AUTO:
        return config
    places = bounds.places if bounds is not None else []
    placed = config.model.place((places or [OwnTarget()] * count)[:count])
    return config.model_copy(update={"model": config.model.model_copy(update={"replicas": placed})})


def build_plan_goal(request: PlanRequest, drafters: Sequence[DrafterFacts]) -> PlanGoal:
    """Return it as the planner takes it. The API is the daemon's: on this node, where the plan is for one with it."""
    placement = request.placement
    return PlanGoal(
        Workload(
            target=request.target.facts,
            drafters=tuple(drafters) if request.depth_bound else (),
            concurrency=placement.concurrency,
            prompt_tokens=placement.prompt_tokens,
            output_tokens=placement.output_tokens,
            exactness=request.exactness,
            depth_bound=request.depth_bound,
            max_running=request.max_running,
            kv_cache_bytes=request.kv_cache_bytes,
            drafts_read_all=request.fixed_depth,
        ),
        Constraints(
            pin_target=placement.pin_target,
            pin_draft=placement.pin_draft,
            exclude=placement.exclude,
            apart="" if placement.anti_affinity == "none" else placement.anti_affinity,
            replicas_apart=placement.replicas_apart,
            zones=placement.zones,
            sharding="never" if request.target.whole else placement.sharding,
            one_host=request.one_host,
            shard_runtimes=request.shard_runtimes,
            max_replicas=request.replicas,
            min_replicas=request.least_replicas,
            alike=request.alike,
            standby=placement.standby,
            keep_free=placement.keep_free,
        ),
        TermWeights(**placement.score_weights.model_dump()),
        Objective(placement.objective),
        placement.currency,
        THIS_NODE,
    )


def model_drafter(draft: DraftCandidate) -> DrafterFacts:
    return DrafterFacts(draft.model.name, draft.acceptance, draft.model.facts)


def build_measured_drafters(
    drafter: DrafterFacts, name: str, pairs: Sequence[PairAcceptance], target: str, concurrency: int, bound: int
) -> list[DrafterFacts]:
    """Return a drafter as measured where the policy chooses depths up to a bound: once for each runtime that was
    measured with it, or once for all."""
    known = {pair.adapter for pair in pairs if (pair.drafter, pair.target) == (name, target)}
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
    mine = [pair for pair in pairs if (pair.drafter, pair.target) == (name, target) and pair.adapter in ("", runtime)]
    if not mine:
        return drafter
    best = min(mine, key=lambda pair: (pair.rule != rule, abs(pair.sequences - concurrency), pair.workload))
    figures = best.at(depth)
    if not figures.offered or not figures.offered[0] or not figures.accepted[0]:
        return drafter
    coverage = figures.offered[0]
    chances = (figures.accepted[0] / coverage, *figures.conditional[1:])
    text = drafter.model is None
    return replace(
        drafter,
        acceptance=tuple(min(1.0, chance) for chance in chances),
        coverage=min(1.0, coverage),
        offered=figures.offered if text else (),
        changes=figures.changes if text else 0.0,
        by_policy=text and best.rule == "policy",
        token_ms=best.draft_ms / sum(figures.offered) if text else 0.0,
    )
