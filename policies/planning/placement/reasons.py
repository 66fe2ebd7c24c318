"""Why everything else lost: other plans, other options, and every device that is not in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from device_profiles.units import MILLION, S_PER_HOUR
from policies.planning.draft_yield import depth_bound
from policies.planning.merit import describe_loss, describe_merit, fill_in_expense, sum_expense
from policies.planning.placement.candidate import Candidate, ScoredCandidate, merit_at, sides
from policies.planning.placement.filters import Usable
from policies.planning.placement.links import Links
from policies.planning.placement.pairs import Pairs
from policies.planning.placement.rows import Floats, Index, Ints
from policies.planning.placement.search import SearchResult, candidate_of
from policies.planning.plan import NoPlan, Option, PlanGoal, RejectedCandidate, Role
from policies.planning.shard_cost import context_tokens, stretch_cost
from policies.planning.throughput import predict

# Of what was rejected, where there is no plan. Not tuned: what a person reads.
_MOST_TOLD = 4


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What everything else is compared with: the plan's first replica, its merit and whose people call it."""

    first: ScoredCandidate
    merit: float
    whose: str
    wanted: PlanGoal

    @classmethod
    def of(cls, chosen: Sequence[ScoredCandidate], wanted: PlanGoal) -> _Chosen:
        whose = "the plan's" if len(chosen) == 1 else "replica 0's"
        return cls(chosen[0], chosen[0].merit[0], whose, wanted)


@dataclass(frozen=True, slots=True)
class _Figures:
    """What was predicted of something that lost, 0 where it is not known."""

    merit: float
    goodput_tokens_per_s: float
    cost_per_million_tokens: float
    joules_per_token: float
    tpot_ms: float

    def reject(self, what: str, chosen: _Chosen, role: str) -> RejectedCandidate:
        why = _explain_loss(self.merit, chosen)
        rates = (self.goodput_tokens_per_s, self.cost_per_million_tokens, self.joules_per_token, self.tpot_ms)
        return RejectedCandidate(what, why, role, *rates)


def alternatives(
    chosen: Sequence[ScoredCandidate], search: SearchResult, links: Links, wanted: PlanGoal
) -> list[RejectedCandidate]:
    """Return the other depths of the first replica, the best one with every other drafter, and the other options on the
    same devices. `search`: all that could be in its place, with its part of the requests."""
    first = _Chosen.of(chosen, wanted)
    return [*_depths(first, links), *_drafters(first, search), *_options(first, search)]


def _explain_loss(merit: float, chosen: _Chosen) -> str:
    wanted, best = chosen.wanted, chosen.merit
    aim, currency, shards = wanted.objective, wanted.currency, wanted.constraints.shards
    described, plan = (describe_merit(aim, value, currency) for value in (merit, best))
    whose = f"{chosen.whose} {plan.partition(' ')[0]}"
    if merit <= 0.0:
        return f"{described} predicted"
    if 1.0 - merit / best >= 1e-6:
        return f"{described} predicted, {describe_loss(aim, merit, best)} than {whose}"
    if merit <= best * (1.0 + 1e-6):
        return f"{described} predicted, as {whose}; it scores lower, takes more devices, or is later by name"
    if shards > 1:
        return f"{described} predicted whole on one device, better than {whose}, but `shards` asks for {shards}"
    if chosen.whose != "the plan's":
        return f"{described} predicted, better than {whose}, but all replicas together reach no more with it"
    return f"{described} predicted, better than {whose} by no more than `indifference` allows"


def _depths(chosen: _Chosen, links: Links) -> list[RejectedCandidate]:
    one_replica, wanted = chosen.first, chosen.wanted
    load, merit = wanted.workload, merit_at(one_replica.candidate, links, wanted)
    target, draft = sides(one_replica.candidate, links, load)
    if draft is None:
        return []
    lost = []
    for depth in range(depth_bound(load, draft.drafter) + 1):
        if depth != one_replica.prediction.depth:
            used = one_replica.candidate.placed if depth else one_replica.candidate.target
            prediction = predict(target, draft, load, depth, merit)
            prediction = fill_in_expense(prediction, sum_expense([placed.device for placed in used], links.hosts))
            what = f"depth {depth}" if depth else "depth 0, not speculating"
            rates = (
                prediction.goodput_tokens_per_s,
                prediction.cost_per_million_tokens,
                prediction.joules_per_token,
                prediction.tpot_ms,
            )
            lost.append(_Figures(merit(prediction), *rates).reject(what, chosen, "depth"))
    return lost


def _drafters(chosen: _Chosen, search: SearchResult) -> list[RejectedCandidate]:
    drafter = chosen.first.candidate.drafter
    mine = drafter.name if drafter else ""
    top: dict[str, tuple[_Figures, Candidate]] = {}
    for pairs in search.pairs:
        name = pairs.drafter.name if pairs.drafter else ""
        if not len(pairs.merit) or name == mine:
            continue
        at = int(np.argmax(pairs.merit))
        if name not in top or pairs.merit[at] > top[name][0].merit:
            top[name] = (_figures_of(search.index, pairs, at), candidate_of(search, pairs, at))
    return [figures.reject(candidate.label, chosen, "plan") for _, (figures, candidate) in sorted(top.items())]


def _options(chosen: _Chosen, search: SearchResult) -> list[RejectedCandidate]:
    placed = chosen.first.candidate.target[0]
    top: dict[str, tuple[float, Pairs, int]] = {}
    for pairs in search.pairs:
        rows = pairs.targets
        on = np.flatnonzero(pairs.target_device == _number(search, placed.device.id))
        for pair in on:
            label = rows.options[rows.option[pairs.target[pair]]].label
            if label not in top or pairs.merit[pair] > top[label][0]:
                top[label] = (float(pairs.merit[pair]), pairs, int(pair))
    return [
        _figures_of(search.index, pairs, pair).reject(f"{label} on {placed.device.id}", chosen, Role.TARGET)
        for label, (_, pairs, pair) in sorted(top.items())
        if label != placed.option.label
    ]


def _figures_of(index: Index, pairs: Pairs, at: int) -> _Figures:
    return _Figures(*(float(figure[0]) for figure in _predict_figures(index, pairs, np.array([at]))))


def _predict_figures(index: Index, pairs: Pairs, at: Ints) -> tuple[Floats, ...]:
    target, draft = pairs.target_device[at], None if pairs.draft_device is None else pairs.draft_device[at]
    goodput, priced = pairs.goodput[at], index.priced[target]
    if draft is not None:
        priced = priced & index.priced[draft]
    cost = np.where(priced, index.sum_prices(target, draft), 0.0) / goodput / S_PER_HOUR * MILLION
    return pairs.merit[at], goodput, cost, index.sum_powers(target, draft) / goodput, pairs.tpot_ms[at]


def _number(search: SearchResult, device_id: str) -> int:
    return next((number for number, device in enumerate(search.index.devices) if device.id == device_id), -1)


def device_reasons(
    chosen: Sequence[ScoredCandidate],
    search: SearchResult,
    left: Usable,
    wanted: PlanGoal,
    left_out: Sequence[RejectedCandidate] = (),
) -> list[RejectedCandidate]:
    """Return why each usable device that is not in use is not. `search`: as `alternatives` takes it; `left_out`: of
    those with which there would be another replica."""
    first, why_out = _Chosen.of(chosen, wanted), {rejection.what: rejection for rejection in left_out}
    in_use = {placed.device.id for scored in chosen for placed in scored.in_use}
    as_target, as_draft = _best_by_device(search)
    as_shard = _layer_times(chosen[0], search.index, left, wanted) if len(chosen[0].candidate.target) > 1 else {}
    explained = {rejection.what for rejection in (*left.rejected, *search.rejected)}
    reasons = []
    for number, device in enumerate(search.index.devices):
        if device.id in in_use:
            continue
        if device.id in why_out:
            reasons.append(why_out[device.id])
        elif number in as_shard:
            reasons.append(RejectedCandidate(device.id, as_shard[number], "shard"))
        elif number in as_target:
            reasons.append(as_target[number].reject(device.id, first, Role.TARGET))
        elif number in as_draft:
            reasons.append(as_draft[number].reject(device.id, first, Role.DRAFT))
        elif device.id not in explained:
            reasons.append(RejectedCandidate(device.id, _why_nothing(device.profile, left)))
    return reasons


def _layer_times(scored: ScoredCandidate, index: Index, left: Usable, wanted: PlanGoal) -> dict[int, str]:
    """Return, by device number, how a device's layers compare with the plan's shards."""
    load, rows = wanted.workload, scored.candidate.sequences * (scored.prediction.depth + 1)

    def layer_ms(option: Option, utilisation: float) -> float:
        alone_ms = option.cost.ms(rows, scored.candidate.sequences, context_tokens(load)) / load.target.layers
        return alone_ms * stretch_cost(option.taken, utilisation)

    slowest = max(layer_ms(part.option, part.device.utilisation) for part in scored.candidate.target)
    allowed, times = {device.id for device in left.target_devices}, {}
    for profile in sorted(left.targets.keys() & index.profiles.keys()):
        for number in index.profiles[profile]:
            ms = min(layer_ms(option, index.utilisation[number]) for option in left.targets[profile])
            if index.devices[number].id in allowed:
                times[int(number)] = (
                    f"a layer takes {ms:.2f} ms on it, and at most {slowest:.2f} ms on the plan's shards"
                    if ms > slowest
                    else f"a layer takes {ms:.2f} ms on it, but it holds fewer, or is further from the other shards"
                )
    return times


def _why_nothing(profile: str, left: Usable) -> str:
    if profile not in left.targets and profile not in left.drafts:
        return f"no option for its profile {profile!r}: it was not measured, and no datasheet names it"
    return "only drafts can run on it, and none is wanted there: others draft sooner, or nearer to the target"


def _best_by_device(search: SearchResult) -> tuple[dict[int, _Figures], dict[int, _Figures]]:
    best = (_Best(search.index), _Best(search.index))
    for pairs in search.pairs:
        order = np.argsort(pairs.merit, kind="stable")
        best[0].add(pairs, pairs.target_device, order)
        if pairs.draft_device is not None:
            best[1].add(pairs, pairs.draft_device, order)
    return best[0].figures(), best[1].figures()


class _Best:
    def __init__(self, index: Index) -> None:
        self._index = index
        self._found = np.zeros((5, len(index.devices)))

    def add(self, pairs: Pairs, device: Ints, order: Ints) -> None:
        """Take in some pairings; `order` of their merit, ascending."""
        last = np.full(len(self._index.devices), -1)
        last[device[order]] = order  # of several for one device the last one stays
        known = np.flatnonzero(last >= 0)
        known = known[pairs.merit[last[known]] > self._found[0, known]]
        self._found[:, known] = _predict_figures(self._index, pairs, last[known])

    def figures(self) -> dict[int, _Figures]:
        """Return them by the device's number."""
        rows = self._found.T.tolist()
        return {number: _Figures(*row) for number, row in enumerate(rows) if row[0] > 0.0}


def no_plan(search: SearchResult, left: Usable, wanted: PlanGoal) -> NoPlan:
    """Return the error that says why nothing can be done, and the way out."""
    model, limits = wanted.workload.target.name, wanted.constraints
    if not left.target_devices:
        return NoPlan(f"{model}: there is no device left to place it on; {_first(left.rejected)}")
    if not left.targets:
        return NoPlan(
            f"{model}: no device has an option for it; measure it (`outrider profile`) or allow more; "
            f"{_first(left.rejected)}"
        )
    ways = ["fewer or shorter requests at once", "weights in fewer bits", "more or larger devices"]
    if limits.sharding == "never" or limits.shards == 1:
        ways.insert(0, "layer shards (`sharding: when_needed`)")
    elif limits.shards:
        ways.insert(0, "another number of shards (`shards`)")
    if limits.pin_target or limits.exclude or limits.zones:
        ways.insert(0, "a wider choice (`pin_target`, `exclude`, `zones`)")
    return NoPlan(f"{model} fits nowhere: {_first(search.rejected)}. What helps: {', '.join(ways)}")


def _first(rejected: Sequence[RejectedCandidate]) -> str:
    lines = sorted({f"{rejection.what}: {rejection.why}" for rejection in rejected})
    more = f"; and {len(lines) - _MOST_TOLD} more" if len(lines) > _MOST_TOLD else ""
    return "; ".join(lines[:_MOST_TOLD]) + more if lines else "nothing was given"
