"""What stored profiles lead to expect of configurations, and which the plan chooses: by the code that plans."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from adapters.device_memory import read_host_memory
from device_profiles.store import ProfileStore
from orchestrator.planning.proposal import PlanProposal, propose_here
from orchestrator.planning.wanted import SUFFIX, PlanRequest, build_measured_drafter
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.plan.runs import CONTROL_BEHIND, CONTROL_ROWS, PLAIN, POLICY, Configuration, RunLoad
from policies.planning.draft_yield import compute_draft_length_shares
from policies.planning.merit import sum_expense
from policies.planning.plan import Option, Prediction, Role
from policies.planning.shard_cost import ModelPart
from policies.planning.throughput import DraftSide, TargetSide, predict

Place = tuple[str, int]
"""A runtime, and its threads."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What is predicted of a configuration. `drafts_per_round`: verified ones of a sequence; `output_tokens`: of a
    request."""

    whole: Prediction
    drafts_per_round: float
    output_tokens: int

    @property
    def components(self) -> dict[str, float]:
        """Its parts, as `RunMeasurement.components`."""
        one = self.whole
        return {
            "tokens_per_round": one.tokens_per_round,
            "drafts_per_round": self.drafts_per_round,
            "round_ms": one.round_ms - one.prefill_ms,
            "draft_ms": one.draft_ms,
            "prefill_ms": one.prefill_ms * self.output_tokens / (one.sequences * one.tokens_per_round),
        }


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What is planned for a load, of the runtimes that are measured."""

    proposal: PlanProposal
    load: RunLoad

    @property
    def chosen(self) -> Configuration:
        """The configuration that the plan's target runs as: its depth is where the policy starts, so that all depths
        but 0 come to the same."""
        replica = self.proposal.plan.replicas[0]
        return Configuration(replica.shards[0].runtime, POLICY if replica.depth else PLAIN, self.load)

    def predict_configuration(self, configuration: Configuration) -> Predicted:
        """Return what is predicted of a configuration. Raises BenchError for one without a profile."""
        load = self.proposal.wanted.workload
        side = TargetSide((ModelPart(self._option(configuration.runtime)),), (), self.load.concurrency)
        if configuration.depth == PLAIN:
            return Predicted(predict(side, None, load, 0), 0.0, load.output_tokens)
        rule = "policy" if configuration.depth == POLICY else "fixed"
        depth = load.depth_bound if rule == "policy" else min(int(configuration.depth), load.depth_bound)
        known = (self.proposal.pairs, self.proposal.request.target.name, self.load.concurrency, depth)
        drafter = build_measured_drafter(SUFFIX, "suffix", *known, rule=rule, runtime=configuration.runtime)
        drafts = sum(count * share for count, share in compute_draft_length_shares(drafter, depth))
        return Predicted(predict(side, DraftSide(drafter), load, depth), drafts, load.output_tokens)

    def price_per_hour(self, configuration: Configuration) -> float:
        """Return what the device that runs it costs with its host; 0 where not known."""
        profile, cluster = self._option(configuration.runtime).profile, self.proposal.cluster
        used = [one for one in cluster.devices if one.profile == profile][:1]
        return sum_expense(used, {host.name: host for host in cluster.hosts}).price_per_hour

    def control_ms(self, runtime: str) -> float:
        """Return what the control's forward is predicted to take. Raises BenchError for one without a profile."""
        return self._option(runtime).cost.ms(CONTROL_ROWS, 1, CONTROL_BEHIND)

    def _option(self, runtime: str) -> Option:
        for option in self.proposal.cluster.options:
            if option.role is Role.TARGET and option.runtime == runtime:
                return option
        raise BenchError(f"{runtime} has no profile of {self.proposal.request.target.name}: run `outrider profile`")


def plan_load(
    asked: PlanRequest, store: ProfileStore, load: RunLoad, tokens: tuple[int, int], places: Collection[Place]
) -> PlannedLoad:
    """Plan for a load of prompts and outputs of so many tokens, with nothing but the target's `places` to choose from.

    Raises PlanError.
    """
    prompt_tokens, output_tokens = tokens
    placement = asked.placement.model_copy(
        update={
            "concurrency": load.concurrency,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "objective": "throughput",  # what is compared
        }
    )
    mine = replace(asked, placement=placement, drafts=())

    def is_allowed(option: Option, device: str) -> bool:
        return (option.runtime, option.threads) in places

    free = {"CPU": read_host_memory().free_bytes}
    return PlannedLoad(propose_here(mine, store, free, is_allowed), load)
