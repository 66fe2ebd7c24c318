"""The best candidates for one target: every place for it, with every drafter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from policies.planning.merit import ALIKE, compute_second_merit
from policies.planning.placement.candidate import Candidate, PlacedShard, ScoredCandidate, Where, rate_candidate
from policies.planning.placement.filters import Usable
from policies.planning.placement.links import HostLinks, Links
from policies.planning.placement.pairs import Pairs, model_pairs, plain_pairs, text_pairs
from policies.planning.placement.rows import Bools, Floats, Index, Ints, OptionRows, draft_rows, index_of, target_rows
from policies.planning.plan import DrafterFacts, ModelFacts, Objective, PlanGoal, RejectedCandidate

# Candidates that are scored, of those that are predicted alike. Bounds time: exact ties are devices of one profile (ADR
# 0025).
_SCORED = 512


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What is still free to be chosen: without `taken` devices, and without cores that are spoken for. Hosts that are
    `paid` cost nothing more."""

    left: Usable
    links: Links
    wanted: PlanGoal
    concurrency: int
    taken: frozenset[str] = frozenset()
    taken_cores: Mapping[str, int] = field(default_factory=dict)
    paid: Collection[str] = ()

    def all_devices(self) -> Index:
        """Return the devices that may host either."""
        either = {device.id: device for device in (*self.left.target_devices, *self.left.draft_devices)}
        free = tuple(either[name] for name in sorted(either) if name not in self.taken)
        return index_of(free, self.left.hosts, self.wanted.constraints, self.taken_cores, self.paid)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search looked at: pairings by drafter, over the devices of one index."""

    index: Index
    pairs: tuple[Pairs, ...]
    rejected: tuple[RejectedCandidate, ...]


def search(ground: SearchSpace) -> SearchResult:
    """Return every pairing that can be the best one with the whole target on one device."""
    load = ground.wanted.workload
    index = ground.all_devices()
    may_target = find_members(index, [device.id for device in ground.left.target_devices])
    may_draft = find_members(index, [device.id for device in ground.left.draft_devices])
    targets, rejected = target_rows(index, ground.left.targets, load, may_target, ground.concurrency)
    least = int(targets.sequences.min(initial=ground.concurrency))

    def find_drafts(drafter: DrafterFacts, sequences: int) -> OptionRows:
        drafts, refused = draft_rows(index, ground.left.drafts, drafter, load, may_draft, sequences)
        rejected.extend(refused if sequences == least else ())
        return drafts

    pairs = pair_rows(index, targets, find_drafts, HostLinks(ground.links), ground.wanted)
    return SearchResult(index, pairs, tuple(rejected))


def pair_rows(
    index: Index,
    targets: OptionRows,
    find_drafts: Callable[[DrafterFacts, int], OptionRows],
    links: HostLinks,
    wanted: PlanGoal,
) -> tuple[Pairs, ...]:
    """Return the targets with every drafter. `find_drafts`: the rows of a drafter's model by how many sequences run."""
    pairs = [plain_pairs(index, targets, wanted)]
    counts = [int(count) for count in np.unique(targets.sequences)]
    for drafter in sorted(wanted.workload.drafters, key=lambda drafter: (drafter.name, drafter.runtime)):
        if drafter.model is None:
            pairs.append(text_pairs(index, targets.of(_find_served_rows(targets, drafter)), drafter, wanted))
            continue
        for sequences in reversed(counts):
            some = targets.of(np.flatnonzero(targets.sequences == sequences))
            pairs.append(model_pairs(index, some, find_drafts(drafter, sequences), drafter, links, wanted))
    return tuple(pairs)


def _find_served_rows(targets: OptionRows, drafter: DrafterFacts) -> Ints:
    serves = np.array([drafter.serves(option.runtime) for option in targets.options], np.bool_)
    return np.flatnonzero(serves[targets.option]) if len(targets) else np.empty(0, np.int64)


def find_members(index: Index, names: Sequence[str]) -> Bools:
    known = set(names)
    return np.array([device.id in known for device in index.devices], np.bool_)


def best(
    search: SearchResult, ground: SearchSpace, rate: Callable[[Candidate], ScoredCandidate] | None = None
) -> ScoredCandidate | None:
    """Return the candidate with most merit. `rate`: what rates one, where it is known from before.

    Several may be predicted alike, or within the `indifference` that is allowed. Among those that are alike the second
    figure of the objective decides. Then the best score does, then the fewest devices, then the name.
    """
    top, wanted = max((float(pair.merit.max()) for pair in search.pairs if len(pair.merit)), default=0.0), ground.wanted
    if top <= 0.0:
        return None
    alike = wanted.weights.indifference <= ALIKE
    least = top * (1.0 - max(ALIKE, wanted.weights.indifference))
    top_ones = _top(search, least, wanted.objective if alike else Objective.THROUGHPUT)
    known = [
        rate(candidate) if rate else rate_candidate(candidate, ground.links, wanted, paid=ground.paid)
        for candidate in top_ones
    ]
    if alike:
        lead = max(scored.merit[1] for scored in known)
        known = [scored for scored in known if scored.merit[1] >= lead - ALIKE * abs(lead)]
    return max(known, key=_Order)


def find_best_on(search: SearchResult, device: int, *, own: bool) -> Candidate | None:
    """Return the candidate with most merit whose target is on this device, of equals the first by name; None where
    there is none. `own`: its draft is on no other device."""
    rated: list[tuple[float, Pairs, int]] = []
    for pairs in search.pairs:
        on = pairs.target_device == device
        if own and pairs.draft_device is not None:
            on &= pairs.draft_device == device
        rated += [(float(pairs.merit[pair]), pairs, int(pair)) for pair in np.flatnonzero(on)]
    top = max((merit for merit, _, _ in rated), default=0.0)
    alike = [(pairs, pair) for merit, pairs, pair in rated if merit > 0.0 and merit >= top * (1.0 - ALIKE)]
    return min((candidate_of(search, *each) for each in alike), key=lambda candidate: candidate.key, default=None)


class _Order:
    """Compares rated candidates: by score, then by key, the first key being the best."""

    __slots__ = ("_scored",)

    def __init__(self, scored: ScoredCandidate) -> None:
        self._scored = scored

    def __lt__(self, other: _Order) -> bool:
        mine, others = round(self._scored.score.total, 9), round(other._scored.score.total, 9)
        return mine < others or (mine == others and self._scored.candidate.key > other._scored.candidate.key)


def _top(search: SearchResult, least: float, objective: Objective) -> list[Candidate]:
    """Return the candidates that are predicted to reach that much. Where there are many, it is those with most of the
    objective's second figure, then those on the devices that come first (see rows.Index)."""
    columns = []
    for number, pairs in enumerate(search.pairs):
        alike = np.flatnonzero(pairs.merit >= least)
        target = search.index.tie[pairs.targets.device[pairs.target[alike]]]
        draft = np.full(len(alike), -1)
        if pairs.drafts is not None:
            draft = search.index.tie[pairs.drafts.device[pairs.draft[alike]]]
        columns.append((target, draft, np.full(len(alike), number), alike, _seconds(pairs, alike, objective)))
    target, draft, numbers, alike, second = (np.concatenate(column) for column in zip(*columns, strict=True))
    lead = second >= second.max() - ALIKE * abs(second.max())
    order = np.lexsort((alike, numbers, draft, target, ~lead))[:_SCORED]
    return [candidate_of(search, search.pairs[numbers[number]], int(alike[number])) for number in order]


def _seconds(pairs: Pairs, alike: Ints, objective: Objective) -> Floats:
    second: Floats = compute_second_merit(objective, pairs.goodput[alike], pairs.ttft_ms(alike))
    return second


def candidate_of(search: SearchResult, pairs: Pairs, pair: int) -> Candidate:
    row = int(pairs.target[pair])
    device = search.index.devices[int(pairs.targets.device[row])]
    option = pairs.targets.options[int(pairs.targets.option[row])]
    target = PlacedShard(device, option, 0, pairs.layers, pairs.layers)
    sequences = int(pairs.targets.sequences[row])
    if pairs.drafts is None:
        return Candidate((target,), sequences, pairs.drafter)
    drafted = int(pairs.draft[pair])
    draft = PlacedShard(
        search.index.devices[int(pairs.drafts.device[drafted])],
        pairs.drafts.options[int(pairs.drafts.option[drafted])],
        *(0, _layers(pairs.drafter), _layers(pairs.drafter)),
    )
    return Candidate((target,), sequences, pairs.drafter, draft, Where(int(pairs.where[pair])))


def _layers(drafter: DrafterFacts | None) -> int:
    model: ModelFacts | None = drafter.model if drafter else None
    return model.layers if model else 0
