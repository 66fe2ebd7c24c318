"""What the figures of a plan rest on: measured, or stated by a datasheet and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from device_profiles.datasheet import EFFICIENCY, GB, RANK_LINK_BYTES_PER_S, RANK_SUM_MS
from device_profiles.measured import MeasuredModel
from device_profiles.units import human_bytes
from orchestrator.planning.correction import Key, key_of
from orchestrator.planning.estimates import DeviceSource
from orchestrator.planning.models import PlannedModel
from orchestrator.planning.proposal import PlanProposal
from orchestrator.planning.stored import MeasuredHardware
from policies.planning.placement import UNLIKE
from policies.planning.plan import Option, Plan, Role, Shard, Source
from policies.serving.failover.pool import Member, list_groups, list_losses
from policies.speculation.branching import explain_branches


@dataclass(frozen=True, slots=True)
class Basis:
    """What stands behind the costs on one device in use. `error`: how far predictions may be off, as a share.
    `figures`: one line each, with its source."""

    device: str
    source: Source
    error: float
    figures: tuple[str, ...]


def plain(proposal: PlanProposal) -> dict[str, Any]:
    """Return a proposal as plain data: the plan, its predicted goodput, cost and energy (None where not known).

    `pool`: what is predicted of all its replicas together, and its groups of equal bits with what losses cost. `basis`:
    what its figures rest on. `no_drafts`: why there can be none, "" where there can."""
    plan = proposal.plan
    return {
        "plan": asdict(plan),
        "goodput_tokens_per_s": plan.goodput_tokens_per_s,
        "cost_per_million_tokens": plan.cost_per_million_tokens or None,
        "joules_per_token": plan.joules_per_token or None,
        "price_per_hour": plan.price_per_hour or None,
        "pool": {**asdict(plan.pool), **describe_pool(proposal)},
        "basis": [asdict(part) for part in basis(proposal)],
        "assumed": list(proposal.assumed),
        "no_drafts": proposal.request.no_drafts,
        "workload": asdict(proposal.wanted.workload),
        "beside": [draft.describe_reserve(proposal.request.most_replicas) for draft in proposal.request.beside],
    }


def describe_pool(proposal: PlanProposal) -> dict[str, Any]:
    """Return as plain data the groups of equal bits of a plan, who goes on for whom, and what losses cost."""
    members, rules = list_members(proposal.plan), proposal.request.failover
    return {
        "other_bits": rules.other_bits,
        "after_s": rules.after_s,
        "figures": "predicted",
        "groups": [asdict(group) for group in list_groups(members, rules)],
        "losses": [asdict(loss) for loss in list_losses(members, rules)],
    }


def list_members(plan: Plan) -> list[Member]:
    """Return a plan's replicas as failover sees them, with the standby."""
    placed = [(f"replica {number}", replica.shards, replica.prediction) for number, replica in enumerate(plan.replicas)]
    standby = plan.standby
    if standby is not None:
        placed.append(("standby", standby.shards, standby.prediction))
    return [
        Member(
            name,
            ", ".join(shard.group for shard in shards),  # as Plan.groups has it
            tuple(dict.fromkeys(part for shard in shards for part in _list_parts(shard))),
            prediction.goodput_tokens_per_s,
            standby=name == "standby",
        )
        for name, shards, prediction in placed
    ]


def _list_parts(shard: Shard) -> list[str]:
    return [*(f"device {name}" for name in shard.devices), f"host {shard.host}"]


def basis(proposal: PlanProposal) -> list[Basis]:
    parts: dict[str, Basis] = {}
    for shard in proposal.plan.shards:
        source = proposal.behind[shard.profile]
        sheet = source.sheet
        if sheet is not None:
            efficiency = EFFICIENCY[sheet.kind]
            lines = [
                f"{key} {figure.value:g}: {figure.source.title}{f' ({figure.how})' if figure.how else ''}, "
                f"{figure.source.url}"
                for key, figure in sheet.figures().items()
            ]
            lines.append(
                f"estimate: {efficiency.bandwidth:.0%} of the bandwidth, {efficiency.compute:.0%} of the rate, "
                f"{efficiency.layer_ms:g} ms a layer beside ({efficiency.source})"
            )
            parts[shard.device] = Basis(shard.device, "datasheet", efficiency.error, (*lines, *_describe_ranks(shard)))
            continue
        options = [option for option in proposal.cluster.options if key_of(option) == key_of(shard)]
        costs = [option.cost for option in options if option.role == Role.TARGET]
        error = max((option.cost.error for option in options), default=0.0)
        held = [line for option in options for line in _describe_memory(source, option, proposal.request.target)]
        if shard.source == "estimate":
            parts[shard.device] = Basis(
                shard.device, "estimate", error, (_describe_estimate(source), *_describe_ranks(shard), *held)
            )
            continue
        behind = profiles_behind(proposal, key_of(shard))
        doubts = [f"{profile.doubt}: to be measured again" for profile in behind if profile.doubt]
        lines = [
            f"stored profile of {shard.profile}",
            *(_describe_few(profile) for profile in behind if profile.few_layers),
            *doubts,
            *(line for profile in behind for line in _of_class(profile)),
            *_describe_ranks(shard),
            *(f"branches of drafts: {explain_branches(cost)}" for cost in costs[:1]),
            *held,
        ]
        parts[shard.device] = Basis(shard.device, shard.source, error, tuple(lines))
    return list(parts.values())


def _describe_few(profile: MeasuredModel) -> str:
    return (
        f"measured on {profile.few_layers} of {profile.layers} layers, as all would take "
        f"{human_bytes(profile.planned_bytes)}: what rounds take beside their forwards is not known"
    )


def _describe_ranks(shard: Shard) -> list[str]:
    """Return a line on what is assumed of ranks that were not measured."""
    if not shard.ranks or shard.source == "measured":
        return []
    return [
        f"split over {len(shard.ranks)} ranks: of one device's time each has its part; a sum of parts is assumed to "
        f"take {RANK_SUM_MS:g} ms, and {RANK_LINK_BYTES_PER_S / GB:g} GB/s to lie between two of them"
    ]


def _describe_estimate(source: DeviceSource) -> str:
    known = source.rates
    if not known.matmul or not known.bandwidth_bytes_per_s:
        return f"estimate: the model was not measured yet, and the rates of a {source.kind} are assumed"
    return (
        f"estimate: the model was not measured yet; by the device's rates, {known.bandwidth_bytes_per_s / GB:.0f} GB/s"
    )


def _describe_memory(source: DeviceSource, option: Option, target: PlannedModel) -> list[str]:
    """Return a line on what the memory of a target's worker is planned by, where that is what the last one held."""
    last = None
    if isinstance(source, MeasuredHardware) and option.role == Role.TARGET:
        last = source.find_memory(option, target)
    if last is None:
        return []
    held, announced = human_bytes(last.held_bytes), human_bytes(last.announced_bytes)
    return [f"memory: by the last load, which held {held} where {announced} was announced of as much use"]


def _of_class(profile: MeasuredModel) -> list[str]:
    if not profile.numerical_class:
        return []
    mark = f", fingerprint {profile.class_fingerprint}" if profile.class_fingerprint else ""
    rejected = [f"class not taken: {other}" for other in profile.classes_rejected]
    return [f"class: {profile.numerical_class}{mark}; {profile.class_reason or 'the first of the runtime'}", *rejected]


def profiles_behind(proposal: PlanProposal, key: Key) -> list[MeasuredModel]:
    profile, runtime, weights, threads = key
    source, target = proposal.behind[profile], proposal.request.target
    targets = (option for option in proposal.cluster.options if option.role == Role.TARGET)
    option = next((option for option in targets if key_of(option) == key), None)
    if option is None or not isinstance(source, MeasuredHardware):
        return []
    return [
        model
        for model in source.models
        if (model.adapter, model.weights, model.threads) == (runtime, weights, threads)
        and model.role == Role.TARGET
        and model.exactness == proposal.request.exactness
        and model.model_digest == target.digest
        and (not model.few_layers or option.source == "few layers")
        and model.ranks == option.ranks
    ]


def list_doubtful_profiles(proposal: PlanProposal) -> list[str]:
    """Return in a line each which of the profiles that a plan rests on are to be measured again, and why."""
    return sorted(
        {
            f"{_name_profile(profile, shard)}: {profile.doubt}"
            for shard, profile in _list_behind(proposal)
            if profile.doubt
        }
    )


def list_doubts(proposal: PlanProposal) -> tuple[str, ...]:
    """Return in a line each which of a plan's figures were measured while other programs took the device, were not
    measured to the end, or are estimates."""
    doubtful = {
        f"{_name_profile(profile, shard)}: {why}"
        for shard, profile in _list_behind(proposal)
        for why in (profile.unfinished, profile.disturbed)
        if why
    }
    return (*list_estimates(proposal), *sorted(doubtful))


def list_estimates(proposal: PlanProposal) -> list[str]:
    """Return in a line each where a plan's target was not measured."""
    return sorted(
        {
            f"{shard.device}: {proposal.request.target.name} in {shard.runtime} has no profile, and is planned by an "
            "estimate"
            for shard in proposal.plan.shards
            if shard.source == "estimate"
        }
    )


def list_left_out_as_unlike(proposal: PlanProposal) -> str:
    """Return in a line what keeps a plan from its replicas where all are to be alike; "" where nothing does."""
    wanted, planned = proposal.request.replicas, len(proposal.plan.replicas)
    out = sorted({candidate.what for candidate in proposal.plan.rejected if candidate.why == UNLIKE})
    if planned >= wanted or not out:
        return ""
    return f"{wanted - planned} of {wanted} replicas left out as unlike: {', '.join(out)}: {UNLIKE}"


def _name_profile(profile: MeasuredModel, shard: Shard) -> str:
    return f"{shard.device}: the profile of {profile.model} in {profile.adapter}"


def _list_behind(proposal: PlanProposal) -> Iterator[tuple[Shard, MeasuredModel]]:
    """Yield the stored profiles behind a plan's targets and draft models."""
    digests = {draft.model.name: draft.model.digest for draft in proposal.request.drafts}
    for replica in proposal.plan.replicas:
        for shard in replica.shards:
            yield from ((shard, profile) for profile in profiles_behind(proposal, key_of(shard)))
        draft = replica.draft
        source = proposal.behind.get(draft.shard.profile) if draft is not None and draft.shard is not None else None
        if draft is None or draft.shard is None or not isinstance(source, MeasuredHardware):
            continue
        wanted = (Role.DRAFT, draft.shard.runtime, draft.shard.threads, digests.get(draft.drafter, ""))
        for model in source.models:
            if (model.role, model.adapter, model.threads, model.model_digest) == wanted:
                yield draft.shard, model
