"""What the figures of a plan rest on: measured, or stated by a datasheet and where."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from device_profiles.datasheet import EFFICIENCY
from device_profiles.measured import MeasuredModel
from orchestrator.planning.correction import Key, key_of
from orchestrator.planning.proposal import PlanProposal
from orchestrator.planning.stored import MeasuredHardware
from policies.planning.plan import Role


@dataclass(frozen=True, slots=True)
class Basis:
    """What stands behind the costs on one device in use. `error`: how far predictions may be off, as a share.
    `figures`: one line each, with its source."""

    device: str
    source: Literal["measured", "datasheet"]
    error: float
    figures: tuple[str, ...]


def plain(proposal: PlanProposal) -> dict[str, Any]:
    """Return a proposal as plain data: the plan, its predicted goodput, cost and energy (None where not known), and
    what its figures rest on."""
    plan = proposal.plan
    return {
        "plan": asdict(plan),
        "goodput_tokens_per_s": plan.goodput_tokens_per_s,
        "cost_per_million_tokens": plan.cost_per_million_tokens or None,
        "joules_per_token": plan.joules_per_token or None,
        "price_per_hour": plan.price_per_hour or None,
        "basis": [asdict(one) for one in basis(proposal)],
        "assumed": list(proposal.assumed),
        "workload": asdict(proposal.wanted.workload),
        "beside": [one.describe_reserve(proposal.asked.replicas) for one in proposal.asked.beside],
    }


def basis(proposal: PlanProposal) -> list[Basis]:
    """Return it for each device that the plan uses, in order."""
    found: dict[str, Basis] = {}
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
            found[shard.device] = Basis(shard.device, "datasheet", efficiency.error, tuple(lines))
            continue
        options = [one for one in proposal.cluster.options if key_of(one) == key_of(shard)]
        error = max((one.cost.error for one in options), default=0.0)
        behind = profiles_behind(proposal, key_of(shard))
        drifted = [f"drifted: {one.drifted}" for one in behind if one.drifted]
        lines = [f"stored profile of {shard.profile}", *drifted, *(line for one in behind for line in _of_class(one))]
        found[shard.device] = Basis(shard.device, "measured", error, tuple(lines))
    return list(found.values())


def _of_class(one: MeasuredModel) -> list[str]:
    """Return which numerical class was measured, why that one, and why not the others."""
    if not one.numerical_class:
        return []
    mark = f", fingerprint {one.class_fingerprint}" if one.class_fingerprint else ""
    rejected = [f"class not taken: {other}" for other in one.classes_rejected]
    return [f"class: {one.numerical_class}{mark}; {one.class_reason or 'the first of the runtime'}", *rejected]


def profiles_behind(proposal: PlanProposal, key: Key) -> list[MeasuredModel]:
    """Return the stored profiles behind a target's costs."""
    profile, runtime, weights, threads = key
    source, target = proposal.behind[profile], proposal.asked.target
    return [
        one
        for one in (source.models if isinstance(source, MeasuredHardware) else ())
        if (one.adapter, one.weights, one.threads) == (runtime, weights, threads)
        and one.role == Role.TARGET
        and one.exactness == proposal.asked.exactness
        and one.model_digest == target.digest
    ]


def list_drifted_profiles(proposal: PlanProposal) -> list[str]:
    """Return in a line each which of the profiles that a plan's targets rest on do not hold any more."""
    found = {
        f"{shard.device}: the profile of {proposal.asked.target.name} in {shard.runtime} has drifted ({one.drifted})"
        for replica in proposal.plan.replicas
        for shard in replica.shards
        for one in profiles_behind(proposal, key_of(shard))
        if one.drifted
    }
    return sorted(found)
