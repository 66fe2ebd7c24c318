"""candidates -> filters -> score -> plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from policies.pairing import DraftSide, Part, TargetSide, best_depth, context_tokens
from policies.placement import workers
from policies.placement.filters import Usable, usable
from policies.placement.links import Links, links_of
from policies.plan import (
    Cluster,
    Device,
    Drafter,
    DraftPlacement,
    NoPlan,
    Option,
    Plan,
    Prediction,
    RejectedCandidate,
    Replica,
    Role,
    Wanted,
)
from policies.score import placement_score


@dataclass(frozen=True, slots=True)
class _Candidate:
    device: Device
    option: Option
    side: TargetSide
    draft_device: Device | None
    draft_option: Option | None
    draft: DraftSide | None
    prediction: Prediction

    @property
    def label(self) -> str:
        where = f"target on {self.device.id} ({self.option.label})"
        if self.draft is None:
            return f"{where}, no drafts"
        on = (
            f" on {self.draft_device.id} ({self.draft_option.label})" if self.draft_device and self.draft_option else ""
        )
        return f"{where}, {self.draft.drafter.name}{on}"


def plan(cluster: Cluster, wanted: Wanted) -> Plan:
    """Return the plan with the highest predicted goodput, whatever the order of what is given.

    Raises NoPlan, with the reasons and the way out, where nothing satisfies what was asked for.
    """
    left = usable(cluster, wanted)
    rejected = list(left.rejected)
    found = list(_candidates(left, links_of(cluster), wanted, rejected))
    if not found:
        reasons = "; ".join(sorted({f"{one.what}: {one.why}" for one in rejected})[:8]) or "there are no options for it"
        raise NoPlan(f"no device can hold {wanted.workload.target.name}: {reasons}")
    best = max(found, key=lambda one: (one.prediction.goodput_tokens_per_s, one.draft is None, _rank(one)))
    chosen = _replica(best, wanted)
    rejected += [
        RejectedCandidate(
            one.label,
            f"{one.prediction.goodput_tokens_per_s:.1f} tokens/s predicted, the plan "
            f"{best.prediction.goodput_tokens_per_s:.1f}",
            Role.TARGET,
            one.prediction.goodput_tokens_per_s,
        )
        for one in found
        if one is not best
    ]
    return Plan(wanted.workload.target.name, (chosen,), None, tuple(rejected))


def _rank(one: _Candidate) -> tuple[str, ...]:
    draft = one.draft_device.id if one.draft_device else ""
    return (one.device.id, one.option.label, draft)


def _candidates(left: Usable, links: Links, wanted: Wanted, rejected: list[RejectedCandidate]) -> Iterator[_Candidate]:
    load = wanted.workload
    for device in left.target_devices:
        for option in left.targets.get(device.profile, ()):
            fits = workers.sequences_on(option, load.target, device, load, wanted.constraints, load.concurrency)
            why = workers.too_small(option, load.target, device, load, wanted.constraints)
            why = why or workers.too_many_threads(option, left.hosts[device.host])
            if why:
                rejected.append(RejectedCandidate(f"{option.label} on {device.id}", why, Role.TARGET))
                continue
            side = TargetSide((Part(option, 1.0, device.utilisation),), (), fits)
            yield _Candidate(device, option, side, None, None, None, best_depth(side, None, load))
            for drafter in load.drafters:
                for found in _drafts(drafter, device, option, left, links, wanted, fits):
                    yield _Candidate(device, option, side, *found, best_depth(side, found[2], load))


def _drafts(
    drafter: Drafter, target: Device, option: Option, left: Usable, links: Links, wanted: Wanted, sequences: int
) -> Iterator[tuple[Device | None, Option | None, DraftSide]]:
    if drafter.model is None:
        yield None, None, DraftSide(drafter)
        return
    load, constraints = wanted.workload, wanted.constraints
    for device in left.draft_devices:
        for draft in left.drafts.get(device.profile, ()):
            if draft.model != drafter.model.name:
                continue
            host = left.hosts[device.host]
            own = device.host != target.host or not workers.too_many_threads(draft, host, option.threads)
            part = Part(draft, 1.0, device.utilisation)
            if device.id != target.id:
                fit = workers.sequences_on(draft, drafter.model, device, load, constraints, sequences)
                if own and fit >= sequences and not workers.too_many_threads(draft, host):
                    yield device, draft, DraftSide(drafter, part, True, links.between(device, target))
                continue
            used = workers.memory(option, load.target.layers, load.target, load, sequences).total
            rest = replace(device, memory_bytes=int(device.memory_bytes - used / (1.0 - constraints.keep_free)))
            if workers.sequences_on(draft, drafter.model, rest, load, constraints, sequences) >= sequences:
                yield device, draft, DraftSide(drafter, part)


def _replica(best: _Candidate, wanted: Wanted) -> Replica:
    load, sequences = wanted.workload, best.side.sequences
    shard = workers.whole(best.device, best.option, load.target, load, sequences, best.prediction.verify_ms)
    draft = None
    used = [float(shard.memory.total)]
    if best.draft is not None and best.prediction.depth:
        drafted = None
        if best.draft_device and best.draft_option and best.draft.drafter.model:
            ms = best.draft.part.ms(sequences, sequences, context_tokens(load)) if best.draft.part else 0.0
            first = best.option.threads if best.draft.overlap and best.draft_device.host == best.device.host else 0
            drafted = workers.whole(
                best.draft_device, best.draft_option, best.draft.drafter.model, load, sequences, ms, first
            )
        process = "own" if best.draft.overlap else "target"
        draft = DraftPlacement(best.draft.drafter.name, drafted, process, best.draft.overlap)  # type: ignore[arg-type]
    score = placement_score(best.side.parts, (best.device,), used, best.prediction, load, wanted.weights)
    return Replica((shard,), draft, best.prediction.depth, best.prediction, score, best.option.load_s)
