"""One way to place a target and its draft, spelt out: what is predicted of it, how it scores, what it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import ceil

from device_profiles.link import LinkProfile
from device_profiles.units import MS_PER_S
from policies.planning.merit import compute_second_merit, fill_in_expense, is_better, merit_of, sum_expense
from policies.planning.placement import workers
from policies.planning.placement.links import Links
from policies.planning.plan import (
    Constraints,
    Device,
    DrafterFacts,
    DraftPlacement,
    Host,
    Memory,
    Option,
    PlanGoal,
    Prediction,
    ReplicaPlacement,
    Score,
    Shard,
    Workload,
)
from policies.planning.score import placement_score
from policies.planning.shard_cost import ModelPart, TargetTimes, context_tokens, kv_bytes
from policies.planning.throughput import DraftSide, TargetSide, best_depth

# Of a prompt on its way to the target: ids alone, four bytes each.
_BYTES_PER_TOKEN = 4.0


class Where(IntEnum):
    """Where a draft is, seen from its target."""

    NOWHERE = 0  # no model is run
    IN_TARGET = 1  # the same device, in the target's process
    BESIDE = 2  # the same device (a CPU) on cores of its own
    HOST = 3  # another device of the host
    ZONE = 4  # another host of the zone
    FAR = 5  # another zone


@dataclass(frozen=True, slots=True)
class PlacedShard:
    """Layers `first` to `end` (not included) of a model on a device. The model has `model_layers`."""

    device: Device
    option: Option
    first: int
    end: int
    model_layers: int

    @property
    def layers(self) -> int:
        return self.end - self.first

    @property
    def has_first(self) -> bool:
        """Whether the model's first layer is among them, with which the embedding goes."""
        return self.first == 0

    @property
    def has_last(self) -> bool:
        """Whether the model's last layer is among them, with which the output layer goes."""
        return self.end == self.model_layers

    @property
    def part(self) -> ModelPart:
        """What its forwards take."""
        return ModelPart(self.option, self.layers / self.model_layers, self.device.utilisation)

    def measure_memory(self, load: Workload, sequences: int, kv_cache_bytes: int = 0) -> Memory:
        """Return the bytes that it takes with its share of a KV cache of all layers, or with that of so many sequences
        where none is given."""
        option = self.option
        weights = option.ends.sum_weights(first=self.has_first, last=self.has_last) + self.layers * option.layer_bytes
        share = self.layers / self.model_layers
        kv_cache = share * kv_cache_bytes if kv_cache_bytes else kv_bytes(option, load, share) * sequences
        workspace = workers.sum_workspace_bytes(option, last=self.has_last)
        return Memory(int(option.fixed_bytes), int(weights), int(kv_cache), int(workspace))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target (one part, or layer shards in order), how many sequences it runs at once, and its draft.

    `draft` is None where no model is run for it, `drafter` where nothing is drafted.
    """

    target: tuple[PlacedShard, ...]
    sequences: int
    drafter: DrafterFacts | None = None
    draft: PlacedShard | None = None
    where: Where = Where.NOWHERE

    @property
    def placed(self) -> tuple[PlacedShard, ...]:
        return self.target if self.draft is None else (*self.target, self.draft)

    @property
    def key(self) -> tuple[object, ...]:
        return (
            len(self.placed),
            tuple((placed.device.id, placed.option.label, placed.first) for placed in self.placed),
            self.drafter.name if self.drafter else "",
        )

    @property
    def label(self) -> str:
        if len(self.target) == 1:
            target = f"{self.target[0].device.id} ({self.target[0].option.label})"
        else:
            target = f"{len(self.target)} shards on " + ", ".join(placed.device.id for placed in self.target)
        if self.drafter is None:
            return f"{target}, no drafts"
        if self.draft is None:
            return f"{target}, {self.drafter.name}"
        beside = {Where.IN_TARGET: " in the target's process", Where.BESIDE: " on cores of its own"}.get(self.where, "")
        return f"{target}, {self.drafter.name} on {self.draft.device.id} ({self.draft.option.label}){beside}"


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate, what is predicted of it at its best depth, and its score. `merit`: by the objective, with the figure
    that decides between equals (policies/planning/merit.py)."""

    candidate: Candidate
    prediction: Prediction
    score: Score
    merit: tuple[float, float]

    @property
    def in_use(self) -> tuple[PlacedShard, ...]:
        """The parts that are run: without the draft's where nothing is drafted."""
        return self.candidate.placed if self.prediction.depth else self.candidate.target

    def beats(self, other: ScoredCandidate | None) -> bool:
        return other is None or is_better(self.merit, other.merit)


def sides(candidate: Candidate, links: Links, load: Workload) -> tuple[TargetSide, DraftSide | None]:
    """Return it as policies/planning/throughput.py takes it. The draft speaks to the last shard, which decides what is
    accepted."""
    target = TargetSide(
        tuple(placed.part for placed in candidate.target),
        hops([placed.device.host for placed in candidate.target], links),
        candidate.sequences,
    )
    if candidate.drafter is None:
        return target, None
    if candidate.draft is None:
        return target, DraftSide(candidate.drafter)
    shared = candidate.draft.device.rates.bandwidth_bytes_per_s if candidate.where is Where.BESIDE else 0.0
    return target, DraftSide(
        candidate.drafter,
        candidate.draft.part,
        candidate.where is not Where.IN_TARGET,
        links.between(candidate.draft.device.host, candidate.target[-1].device.host),
        shared,
    )


def hops(hosts: Sequence[str], links: Links) -> tuple[LinkProfile, ...]:
    """Return the links behind each of these hosts, the last of which leads back to the first."""
    if len(hosts) == 1:
        return ()
    return tuple(links.between(host, after) for host, after in zip(hosts, [*hosts[1:], hosts[0]], strict=True))


def client_hop_ms(candidate: Candidate, links: Links, wanted: PlanGoal) -> float:
    """Return what the way between the API and the target adds to the first token: the request crosses it to the first
    shard, and the token from the last. Tokens behind it follow each other, so they come as often as without the way."""
    api, first, last = wanted.client_host, candidate.target[0].device.host, candidate.target[-1].device.host
    if api not in links.hosts:
        return 0.0
    way, back = (links.between(api, host) if host != api else None for host in (first, last))
    asked_ms = wanted.workload.prompt_tokens * _BYTES_PER_TOKEN / way.bytes_per_s * MS_PER_S if way else 0.0
    return asked_ms + sum(link.rtt_ms / 2.0 for link in (way, back) if link is not None)


def rate_candidate(
    candidate: Candidate,
    links: Links,
    wanted: PlanGoal,
    times: TargetTimes | None = None,
    paid: Collection[str] = (),
) -> ScoredCandidate:
    """Return its prediction, its merit and its score. `times`: as policies.planning.throughput.best_depth takes them;
    `paid`: hosts whose price is paid already."""
    load = wanted.workload
    target, draft = sides(candidate, links, load)
    merit = merit_at(candidate, links, wanted, paid)
    prediction = best_depth(target, draft, load, times, merit)
    client_ms = client_hop_ms(candidate, links, wanted)
    prediction = replace(prediction, ttft_ms=prediction.ttft_ms + client_ms, client_ms=client_ms)
    devices = [placed.device for placed in (candidate.placed if prediction.depth else candidate.target)]
    merits = (
        merit(prediction),
        float(compute_second_merit(wanted.objective, prediction.goodput_tokens_per_s, prediction.ttft_ms)),
    )
    prediction = fill_in_expense(prediction, sum_expense(devices, links.hosts, paid))
    score = score_candidate(candidate, prediction, wanted)
    return ScoredCandidate(candidate, prediction, score, merits)


def score_candidate(candidate: Candidate, prediction: Prediction, wanted: PlanGoal) -> Score:
    load = wanted.workload
    parts = [placed.part for placed in candidate.target]
    devices = [placed.device for placed in (candidate.placed if prediction.depth else candidate.target)]
    used = sum_used_bytes(candidate, load)
    return placement_score(parts, devices, [used[device.id] for device in devices], prediction, load, wanted.weights)


def with_own_score(scored: ScoredCandidate, wanted: PlanGoal) -> ScoredCandidate:
    """Return it with the score of its own devices, where it has that of others that are alike."""
    return replace(scored, score=score_candidate(scored.candidate, scored.prediction, wanted))


def count_threads(scored: ScoredCandidate, hosts: Mapping[str, Host]) -> dict[str, int]:
    """Return the cores that it takes of each host whose cores are known."""
    threads: dict[str, int] = {}
    own_draft = scored.prediction.depth > 0 and scored.candidate.where is not Where.IN_TARGET
    for part in scored.candidate.placed if own_draft else scored.candidate.target:
        if hosts[part.device.host].cores:
            threads[part.device.host] = threads.get(part.device.host, 0) + part.option.threads
    return threads


def merit_at(
    candidate: Candidate, links: Links, wanted: PlanGoal, paid: Collection[str] = ()
) -> Callable[[Prediction], float]:
    """Return what gives the merit of its predictions: without drafts the draft's device is not in use."""
    aim, hosts = (wanted.objective, wanted.workload.concurrency), links.hosts
    plain = merit_of(*aim, sum_expense([placed.device for placed in candidate.target], hosts, paid))
    drafting = merit_of(*aim, sum_expense([placed.device for placed in candidate.placed], hosts, paid))
    return lambda prediction: drafting(prediction) if prediction.depth else plain(prediction)


def sum_used_bytes(candidate: Candidate, load: Workload) -> dict[str, float]:
    """Return the bytes that it takes of each device, by its id."""
    used: dict[str, float] = {}
    for placed in candidate.placed:
        first, last = placed.has_first, placed.has_last
        taken = workers.sum_fixed_bytes(placed.option, placed.layers, first=first, last=last)
        taken += kv_bytes(placed.option, load, placed.layers / placed.model_layers) * candidate.sequences
        used[placed.device.id] = used.get(placed.device.id, 0.0) + taken
    return used


def choose_kv_cache_bytes(candidate: Candidate, load: Workload, limits: Constraints) -> int:
    """Return the KV cache of all layers that a target in shards is loaded with: what is configured, halved until each
    device has room for its share. It is no less than what the sequences take. 0: a whole target chooses when it is
    loaded."""
    if len(candidate.target) == 1 or not load.kv_cache_bytes:
        return 0
    needed = ceil(max(kv_bytes(placed.option, load) for placed in candidate.target) * candidate.sequences)
    used = sum_used_bytes(candidate, load)

    def has_room(size: int) -> bool:
        return all(
            used[placed.device.id]
            + placed.layers / placed.model_layers * (size - kv_bytes(placed.option, load) * candidate.sequences)
            <= workers.room_bytes(placed.device, limits)
            for placed in candidate.target
        )

    size = load.kv_cache_bytes
    while size > needed and not has_room(size):
        size //= 2
    return min(load.kv_cache_bytes, max(size, needed))


def find_fit_problem(candidate: Candidate, cores: Mapping[str, float], load: Workload, limits: Constraints) -> str:
    """Return why memory or cores do not allow it, "" where they do."""
    room = {placed.device.id: workers.room_bytes(placed.device, limits) for placed in candidate.placed}
    for device, used in sorted(sum_used_bytes(candidate, load).items()):
        if used > room[device]:
            return f"{device}: {workers.too_small(used, room[device])}"
    threads: dict[str, int] = {}
    for placed in candidate.placed:
        if placed is not candidate.draft or candidate.where is not Where.IN_TARGET:
            threads[placed.device.host] = threads.get(placed.device.host, 0) + placed.option.threads
    for host, count in sorted(threads.items()):
        if count > cores[host]:
            return workers.too_many_threads(count, host, cores[host])
    return ""


def replica(
    best: ScoredCandidate, taken_cores: dict[str, int], hosts: Mapping[str, Host], wanted: PlanGoal
) -> ReplicaPlacement:
    """Return it as a part of a plan; the cores that it takes are added to `taken_cores`."""
    candidate, prediction, load = best.candidate, best.prediction, wanted.workload
    first = dict(taken_cores)
    kv_cache_bytes = choose_kv_cache_bytes(candidate, load, wanted.constraints)
    shards = tuple(
        _shard(placed, candidate, prediction, hosts, taken_cores, load, kv_cache_bytes) for placed in candidate.target
    )
    draft = None
    if candidate.drafter is not None and prediction.depth:
        shard = None
        if candidate.draft is not None:
            cores = first if candidate.where is Where.IN_TARGET else taken_cores
            shard = _shard(candidate.draft, candidate, prediction, hosts, cores, load)
        own = candidate.where > Where.IN_TARGET
        draft = DraftPlacement(candidate.drafter.name, shard, "own" if own else "target", own)
    load_s = max(placed.option.load_s for placed in candidate.target)
    return ReplicaPlacement(shards, draft, prediction.depth, prediction, best.score, load_s, kv_cache_bytes)


def _shard(
    placed: PlacedShard,
    candidate: Candidate,
    prediction: Prediction,
    hosts: Mapping[str, Host],
    taken: dict[str, int],
    load: Workload,
    kv_cache_bytes: int = 0,
) -> Shard:
    drafting = placed is candidate.draft
    sequences = -(-candidate.sequences // (1 if drafting else prediction.micro_batches))
    rows = sequences * (1 if drafting else prediction.depth + 1)
    stage_ms = placed.part.ms(rows, sequences, context_tokens(load))
    first = taken.get(placed.device.host, 0)
    threads = placed.option.threads if hosts[placed.device.host].cores else 0
    taken[placed.device.host] = first + threads
    return Shard(
        device=placed.device.id,
        host=placed.device.host,
        profile=placed.device.profile,
        runtime=placed.option.runtime,
        weights=placed.option.weights,
        threads=placed.option.threads,
        first_layer=placed.first,
        end_layer=placed.end,
        memory=placed.measure_memory(load, candidate.sequences, kv_cache_bytes),
        stage_ms=stage_ms,
        cores=tuple(range(first, first + threads)),
        source=placed.option.source,
        group=placed.option.group,
        ranks=placed.device.ranks,
    )
