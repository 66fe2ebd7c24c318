"""What a runtime that was not measured could bring at most, beside what is predicted of those that were."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.planning.correction import scale_option
from orchestrator.planning.estimates import EstimableDevice
from orchestrator.planning.proposal import PlanProposal, build_proposal, estimate_targets
from orchestrator.planning.wanted import PlanError
from policies.planning.merit import describe_merit, sum_merits
from policies.planning.plan import Role
from policies.serving.drift import worth_moving


@dataclass(frozen=True, slots=True)
class Promise:
    """Merits by the plan's objective: what is predicted now, and what another runtime reaches at most. `text` says
    that to people."""

    now: float
    most: float
    text: str

    @property
    def is_worth_measuring(self) -> bool:
        """Whether workers would be replaced for it, if it were kept."""
        return worth_moving(self.now, self.most)


def predict_promise(planned: PlanProposal, estimable: EstimableDevice) -> Promise:
    """Return what the target could reach on a device: by its estimate, if that errs on the slow side as far as
    estimates do. `planned`: by all that was measured, for the requests at once that count. Raises PlanError where
    nothing can be planned by what was measured."""
    now = _find_merit(build_proposal(planned.cluster, planned.request, planned.behind, planned.pairs))
    used = {device.profile for device in planned.cluster.devices if not device.ranks}
    estimates = estimate_targets(planned.request.target, planned.behind, [replace(estimable, prepared=True)])
    options = [scale_option(each, 1.0 / (1.0 + each.cost.error)) for each in estimates if each.profile in used]
    drafts = [each for each in planned.cluster.options if each.role is not Role.TARGET]
    cluster = replace(planned.cluster, options=(*drafts, *options))
    try:
        most = _find_merit(build_proposal(cluster, planned.request, planned.behind, planned.pairs))
    except PlanError:  # as where it has no room there
        most = 0.0
    plan, requests = planned.plan, planned.request.placement.concurrency
    most_told, now_told = (describe_merit(plan.objective, merit, plan.currency) for merit in (most, now))
    return Promise(now, most, f"up to {most_told}, where {now_told} is predicted, with {requests} at once")


def _find_merit(proposal: PlanProposal) -> float:
    predictions = [replica.prediction for replica in proposal.plan.replicas]
    return sum_merits(proposal.plan.objective, predictions)[0]
