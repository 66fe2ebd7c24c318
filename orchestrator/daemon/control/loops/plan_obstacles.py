"""What a plan does without: runtimes that a host lacks, or that refused a worker, and drafts that help nobody."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace

from device_profiles.device_names import is_same_device
from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.control.actions import TellLacking, TellRefused, TellUseless
from orchestrator.daemon.control.loops.planner_port import StartPlan
from orchestrator.daemon.control.rollout.replica_diff import leave_name
from orchestrator.planning.lacking import Lacks, leave_lacking
from orchestrator.planning.proposal import PlanProposal
from orchestrator.planning.wanted import DraftCandidate
from orchestrator.protocol.contract import WorkerSpec
from policies.planning.plan import Plan, ReplicaPlacement
from policies.serving.draft_rest import REST_S

Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class UselessDraft:
    """A draft model that helped nobody, and why, while so many `requests` came at once, at `since_s`."""

    draft: DraftCandidate
    why: str
    requests: int
    since_s: float

    def holds(self, requests: int, now_s: float) -> bool:
        """Return whether it is so with so many requests at once. Fewer leave more time for drafts."""
        return requests >= self.requests and now_s < self.since_s + REST_S


class PlanObstacles:
    """Why, by device and runtime. `refused`: of workers that were started. `useless`: drafts that help nobody."""

    def __init__(self) -> None:
        self.lacking: dict[Place, str] = {}
        self.refused: dict[Place, str] = {}
        self.useless: list[UselessDraft] = []
        self._refused_specs: list[WorkerSpec] = []

    def note_lacking(self, first: PlanProposal, event: TellLacking) -> bool:
        """A host lacks a runtime, whatever its agent says. Returns whether that is news."""
        return self._note(first, event, self.lacking)

    def note_refused(self, first: PlanProposal, event: TellRefused, started: Iterable[WorkerSpec]) -> bool:
        """A worker will never serve where it is. Returns whether that is news of one of those that were `started`."""
        spec = leave_name(event.spec)
        if spec not in map(leave_name, started):
            return False
        self._refused_specs.append(spec)
        return self._note(first, event, self.refused)

    def note_useless(
        self, first: PlanProposal, running: StartPlan, event: TellUseless, requests: int, now_s: float
    ) -> bool:
        """The workers of a draft help no replica, with so many `requests` at once; it counts where one of them is of
        those that the plan runs beside its replicas. Returns whether that is news."""
        models = {
            replica.draft.drafter
            for replica, beside in zip(running.proposal.plan.replicas, running.drafts, strict=False)
            if replica.draft is not None and event.spec in beside
        }
        drafts = [draft for draft in first.request.drafts if draft.model.name in models]
        news = [draft for draft in drafts if not self._explain_useless(draft)]
        self.useless += [UselessDraft(draft, event.why, requests, now_s) for draft in news]
        return bool(news)

    def try_useless(self, requests: int, now_s: float) -> None:
        """Another number of requests comes at once: plans may have those drafts again that may help now."""
        self.useless = [useless for useless in self.useless if useless.holds(requests, now_s)]

    def _explain_useless(self, draft: DraftCandidate) -> str:
        return next((known.why for known in self.useless if draft.is_unchanged(known.draft)), "")

    def leave_drafts(self, first: PlanProposal) -> PlanProposal:
        """Return what to plan from without draft models that help nobody, and say so in what is assumed."""
        whys = [(draft, "" if draft.placed else self._explain_useless(draft)) for draft in first.request.drafts]
        left = tuple(draft for draft, why in whys if not why)
        notes = [f"{draft.model.name} drafts nothing: {why}" for draft, why in whys if why]
        return replace(first, request=replace(first.request, drafts=left), assumed=(*first.assumed, *notes))

    def _note(self, first: PlanProposal, event: TellLacking | TellRefused, known: dict[Place, str]) -> bool:
        places = dict.fromkeys(find_places(first, event.spec), event.why)
        if places.keys() <= known.keys():
            return False
        known |= places
        return True

    def forget_absent(self, devices: Collection[str]) -> None:
        """Only these devices are there: who comes again tells anew."""
        for known in (self.lacking, self.refused):
            for place in [place for place in known if place[0] not in devices]:
                del known[place]

    def starts_alike(self, targets: Sequence[WorkerSpec], running: Sequence[WorkerSpec]) -> bool:
        known = [leave_name(spec) for spec in (*running, *self._refused_specs)]
        return any(leave_name(spec) in known for spec in targets)

    def inherit(self, before: PlanObstacles, *, refused: bool) -> None:
        self.lacking, self.useless = dict(before.lacking), list(before.useless)
        if refused:
            self.refused, self._refused_specs = dict(before.refused), list(before._refused_specs)

    def leave_out(self, first: PlanProposal, *, refused: bool = True) -> PlanProposal:
        """Return what to plan from without these runtimes on these devices, and say so in what is assumed."""
        lacks: Lacks = self.lacking | (self.refused if refused else {})
        cluster, behind, notes = leave_lacking(first.cluster, first.behind, lacks)
        return replace(first, cluster=cluster, behind=behind, assumed=(*first.assumed, *notes))

    def list_in_use(self, plan: Plan) -> set[Place]:
        used = {(shard.device, shard.runtime) for replica in plan.replicas for shard in replica.shards}
        return used & (self.lacking | self.refused).keys()

    def list_possible(self, plan: Plan, starved: Set[Place] = frozenset()) -> list[ReplicaPlacement]:
        """Return the replicas of a plan that can be run where they are; none can where workers are `starved`."""
        out = self.list_in_use(plan) | starved
        places = [{(shard.device, shard.runtime) for shard in replica.shards} for replica in plan.replicas]
        return [replica for replica, used in zip(plan.replicas, places, strict=True) if not used & out]

    def describe_news(self, plan: Plan, before: Set[str], hosts: Set[str], refusing: Set[str]) -> str:
        """Return what a plan does without, or has again, in a line. `before` and `hosts`: those that it was made for,
        and those of now; `refusing`: parts that refuse work."""
        lacking = sorted(self.list_in_use(plan))
        words = {place: "has no" if place in self.lacking else "refuses" for place in lacking}
        happened = [
            *(f"{host} has left" for host in sorted(before - hosts)),
            *(f"{host} has come" for host in sorted(hosts - before)),
            *(f"{part} refuses work" for part in sorted(refusing)),
            *(f"{device} {words[device, runtime]} {runtime}" for device, runtime in lacking),
        ]
        return ", ".join(happened) or "all devices take work again"


def find_places(first: PlanProposal, spec: WorkerSpec) -> set[Place]:
    """Return where a worker runs, and of one on a single device the groups of ranks that this one is in. Of a target in
    layer shards nobody knows which runtime it is."""
    model = spec.options.get("model", {})
    if model.get("shards"):
        return set()
    runtime, host, ranks = model.get("adapter", ""), spec.node or THIS_NODE, model.get("tensor_parallel", 1)
    used = {
        device.id
        for device in first.cluster.devices
        if device.host == host
        and max(1, len(device.ranks)) == ranks
        and is_same_device(device.name_for(runtime), spec.device)
    }
    groups = {device.id for device in first.cluster.devices if not used.isdisjoint(device.ranks)}
    return {(device, runtime) for device in used | groups}
