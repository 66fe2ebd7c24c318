"""Replicas as a pool: each with the requests that routing will send it, and without those that are not worth it.

A kind of replica is not worth it where 95 % of requests take longer with it by a larger factor than the pool's merit
becomes better by (`PoolPrediction.tail_ms`): a request that it serves late costs more than its tokens bring. With
`latency` the merit is such a percentile itself, so what makes the time of a token longer is out in any case.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from device_profiles.device_load import COUNTS_FROM
from policies.planning.merit import ALIKE, describe_merit, is_better, sum_expense, weigh_pool
from policies.planning.placement.candidate import (
    Candidate,
    PlacedShard,
    ScoredCandidate,
    Where,
    rate_candidate,
    sum_used_bytes,
)
from policies.planning.placement.links import Links
from policies.planning.placement.several import FEW, Fleet
from policies.planning.placement.workers import room_bytes
from policies.planning.plan import Objective, PlanGoal, Prediction, RejectedCandidate, Role
from policies.planning.pool import PoolPrediction, predict_end_ms, predict_pool, share_requests, take_share

# Pools that are all looked at, of few devices. Bounds time: some 50 us each. Not tuned.
_MOST_POOLS = 2048
# Kinds of devices that are explained where there are more than FEW devices. Bounds time. Not tuned.
_EXPLAINED = 8


class Curve:
    """What is predicted of one replica by how many requests it has: as many run at once as its memory allows.
    `routed`: what routing takes it for, None: for what it is."""

    def __init__(self, candidate: Candidate, links: Links, wanted: PlanGoal, routed: Curve | None = None) -> None:
        self._candidate, self._links, self._wanted, self._routed = candidate, links, wanted, routed
        self._most = find_most_sequences(candidate, wanted)
        self._rated: dict[int, ScoredCandidate] = {}
        self._shares: dict[int, ScoredCandidate] = {}
        self._ends_ms: dict[int, float] = {}

    def end_ms(self, requests: int) -> float:
        """Return when routing predicts that one of so many requests ends there."""
        if self._routed is not None:
            return self._routed.end_ms(requests)
        end_ms = self._ends_ms.get(requests)
        if end_ms is None:
            prediction = self._rate(requests).prediction
            end_ms = predict_end_ms(prediction, requests, self._wanted.workload.output_tokens)
            self._ends_ms[requests] = end_ms
        return end_ms

    def predict_share(self, requests: int) -> ScoredCandidate:
        """Return it with so many requests; one without any is predicted with one."""
        if requests not in self._shares:
            scored, output = self._rate(requests), self._wanted.workload.output_tokens
            self._shares[requests] = replace(scored, prediction=take_share(scored.prediction, requests, output))
        return self._shares[requests]

    def _rate(self, requests: int) -> ScoredCandidate:
        sequences = max(1, min(requests, self._most))
        if sequences not in self._rated:
            candidate = replace(self._candidate, sequences=sequences)
            self._rated[sequences] = rate_candidate(candidate, self._links, self._wanted)
        return self._rated[sequences]


def _as_routed(candidate: Candidate) -> Candidate:
    """Return a replica as routing sees it, which counts no small load of other programs
    (policies/serving/device_load.py)."""
    target = tuple(_place_as_routed(placed) for placed in candidate.target)
    draft = _place_as_routed(candidate.draft) if candidate.draft is not None else None
    return replace(candidate, target=target, draft=draft)


def _place_as_routed(placed: PlacedShard) -> PlacedShard:
    device = placed.device
    load = device.utilisation if device.utilisation >= COUNTS_FROM else 0.0
    return replace(placed, device=replace(device, utilisation=load))


def find_most_sequences(candidate: Candidate, wanted: PlanGoal) -> int:
    """Return how many of all requests run at once as memory allows, at least as many as the candidate has."""
    room = {placed.device.id: room_bytes(placed.device, wanted.constraints) for placed in candidate.placed}

    def is_full(sequences: int) -> bool:
        used = sum_used_bytes(replace(candidate, sequences=sequences), wanted.workload)
        return any(used[device] > room[device] for device in used)

    load = wanted.workload
    more = range(candidate.sequences + 1, load.bound_running(load.concurrency) + 1)
    return candidate.sequences + bisect_left(more, True, key=is_full)


Drawn = tuple[Candidate, Curve]
"""A replica and its curve, which is one for all that are alike."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas with what is predicted of each by its share, and of all; the pool's merit with its second figure.
    `left_out`: why it is without devices that could run another one."""

    replicas: tuple[Drawn, ...]
    predictions: tuple[Prediction, ...]
    prediction: PoolPrediction
    merit: tuple[float, float]
    left_out: tuple[RejectedCandidate, ...] = ()

    def list_members(self) -> list[ScoredCandidate]:
        """Return its replicas, each with its share; the score is that of one that is alike."""
        members = []
        for (candidate, curve), prediction in zip(self.replicas, self.predictions, strict=True):
            scored = curve.predict_share(prediction.requests or 0)
            members.append(replace(scored, candidate=replace(candidate, sequences=prediction.sequences)))
        return members


class Pools:
    """Makes pools of what a fleet has, with every kind of replica predicted once."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._wanted = fleet, fleet.wanted
        self._curves: dict[Hashable, Curve] = {}
        self._routed: dict[Hashable, Curve] = {}

    def draw(self, candidate: Candidate) -> Drawn:
        """Return a replica with its curve."""
        kind = self._fleet.describe(replace(candidate, sequences=0))
        if kind not in self._curves:
            self._curves[kind] = self._draw_curve(candidate)
        return candidate, self._curves[kind]

    def build(self, replicas: Sequence[Drawn]) -> Pool:
        """Return the pool of these; those that get no request are left out while there are as many as there are to be
        at least."""
        shares = share_requests([curve.end_ms for _, curve in replicas], self._wanted.workload.concurrency)
        idle = [number for number, share in enumerate(shares) if not share]
        lacking = self._wanted.constraints.min_replicas - (len(shares) - len(idle))
        out = set(idle[max(0, lacking) :])
        kept = sorted(set(range(len(shares))) - out, key=lambda number: (-shares[number], number))
        mine = tuple(replicas[number] for number in kept)
        predictions = tuple(replicas[number][1].predict_share(shares[number]).prediction for number in kept)
        prediction = predict_pool(predictions)
        burden = self._sum_burden(zip(mine, predictions, strict=True))
        return Pool(mine, predictions, prediction, weigh_pool(self._wanted.objective, prediction, burden))

    def place(self, count: int) -> tuple[Pool, int]:
        """Return a pool of up to so many replicas, placed one after the other, without those that are not worth it, and
        how many there is room for."""
        placed = self._fleet.place(count)
        pool = self.build([self.draw(_without_idle_draft(scored)) for scored in placed])
        while burdens := self._list_burdens(pool):
            pool = max(burdens, key=lambda burden: burden[1])[0]
        return pool, len(placed)

    def place_any(self) -> Pool | None:
        """Return the best pool of few devices by trying all; None where there are too many, or none is worth it."""
        requests, devices = self._wanted.workload.concurrency, len(self._fleet.list_targets())
        if not devices or 2**devices > _MOST_POOLS:
            return None
        variants = list(
            self._list_variants((1, -(-requests // devices), requests), self._fleet.list_targets()).values()
        )
        if prod(len(some) + 1 for some in variants) > _MOST_POOLS:
            return None
        best: Pool | None = None
        limits = self._wanted.constraints
        pools = sorted(product(*((None, *some) for some in variants)), key=lambda pool: len(pool) - pool.count(None))
        for chosen in pools:
            candidates = [candidate for candidate in chosen if candidate is not None]
            if not limits.min_replicas <= len(candidates) <= limits.max_replicas or not self._fit(candidates):
                continue
            pool = self.build([self.draw(candidate) for candidate in candidates])
            if (best is None or is_better(pool.merit, best.merit)) and not any(self._list_burdens(pool)):
                best = pool
        return best

    def explain_left_out(self, pool: Pool) -> Iterator[RejectedCandidate]:
        """Yield of devices that could run another replica why the pool is without it; of very many, for a few kinds."""
        used = {placed.device.id for candidate, _ in pool.replicas for placed in candidate.placed}
        few = len(self._fleet.index.devices) <= FEW
        by_kind: dict[int, list[int]] = {}
        for number in self._fleet.list_targets():
            if self._fleet.index.devices[number].id not in used:
                by_kind.setdefault(number if few else self._fleet.kinds[number], []).append(number)
        alike = list(by_kind.values())[: FEW if few else _EXPLAINED]
        part = -(-self._wanted.workload.concurrency // (len(pool.replicas) + 1))
        variants = self._list_variants((1, part), [numbers[0] for numbers in alike])
        for numbers in alike:
            mine = [some for some in variants[numbers[0]] if not used & {placed.device.id for placed in some.placed}]
            why = next((why for candidate in mine if (why := self._explain_one(pool, candidate)) is not None), None)
            if why is not None:
                yield from (replace(why, what=self._fleet.index.devices[number].id) for number in numbers)

    def _explain_one(self, pool: Pool, candidate: Candidate) -> RejectedCandidate | None:
        members, drawn = [member for member, _ in pool.replicas], self.draw(candidate)
        if len(members) >= self._wanted.constraints.max_replicas or not self._fit([*members, candidate]):
            return None
        more, requests = self.build([*pool.replicas, drawn]), self._wanted.workload.concurrency
        shares = zip(more.replicas, more.predictions, strict=True)
        added = next((prediction for other, prediction in shares if other[0] is candidate), None)
        device, curve = candidate.target[0].device.id, drawn[1]
        if added is None or not added.requests:
            others = zip(pool.replicas, pool.predictions, strict=True)
            slowest_ms = max(other.end_ms(prediction.requests or 0) for (_, other), prediction in others)
            alone = curve.predict_share(1).prediction
            why = (
                f"left out: none of {requests} requests would go to it: one takes {curve.end_ms(1):.0f} ms there, and "
                f"at most {slowest_ms:.0f} ms on the replicas with all of them"
            )
            return _reject(device, why, alone)
        merits = [describe_merit(self._wanted.objective, each.merit[0], self._wanted.currency) for each in (pool, more)]
        before, after = pool.prediction, more.prediction
        why = (
            f"left out: with it, for {added.requests} of {requests} requests, the replicas' {merits[0]} become "
            f"{merits[1]}"
        )
        if is_better(more.merit, pool.merit):
            if not self._list_burdens(more):
                return None
            why += (
                f", which is less than 95 % of requests lose: TPOT {before.tpot_p95_ms:.1f} -> "
                f"{after.tpot_p95_ms:.1f} ms, TTFT {before.ttft_p95_ms:.0f} -> {after.ttft_p95_ms:.0f} ms"
            )
        return _reject(device, why, added)

    def _draw_curve(self, candidate: Candidate) -> Curve:
        """Return a replica's curve, by which it is routed as those on devices that are alike but for small loads."""
        routed, links = _as_routed(candidate), self._fleet.links
        key = (
            tuple(
                (
                    replace(placed.device, id="", host=""),
                    id(placed.option),
                    self._fleet.describe_place(placed.device.host),
                )
                for placed in routed.placed
            ),
            id(candidate.drafter),
            candidate.where,
        )
        if key not in self._routed:
            self._routed[key] = Curve(routed, links, self._wanted)
        return Curve(candidate, links, self._wanted, self._routed[key])

    def _list_burdens(self, pool: Pool) -> list[tuple[Pool, float]]:
        """Return the pool without each kind that is not worth it, and by what factor it is not."""
        burdens: list[tuple[Pool, float]] = []
        kinds = dict.fromkeys(curve for _, curve in pool.replicas)
        if len(kinds) < 2:
            return burdens
        output = self._wanted.workload.output_tokens
        for kind in kinds:
            others = [drawn for drawn in pool.replicas if drawn[1] is not kind]
            if len(others) < self._wanted.constraints.min_replicas:
                continue
            without = self.build(others)
            loss = pool.prediction.tail_ms(output) / without.prediction.tail_ms(output)
            gain = pool.merit[0] / without.merit[0] if without.merit[0] else float("inf")
            if loss > max(1.0, gain) * (1.0 + ALIKE):
                burdens.append((without, loss / gain))
        return burdens

    def _list_variants(self, parts: Iterable[int], numbers: Sequence[int]) -> dict[int, list[Candidate]]:
        """Return for each device of these numbers how a replica on it may be: the best for so many requests, with
        drafts from anywhere and with none from elsewhere."""
        variants: dict[int, dict[Hashable, Candidate]] = {number: {} for number in numbers}
        for part in sorted(set(parts)):
            for number, candidate in self._fleet.list_best(part, numbers):
                variants[number].setdefault(self._fleet.describe(replace(candidate, sequences=0)), candidate)
        return {number: list(some.values()) for number, some in variants.items()}

    def _fit(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether these can be beside one another: no device, core, host or zone is used twice."""
        devices = [device for candidate in candidates for device in {placed.device.id for placed in candidate.placed}]
        if len(set(devices)) < len(devices):
            return False
        hosts, apart = self._fleet.left.hosts, self._wanted.constraints.replicas_apart
        if apart != "device":
            homes = [{placed.device.host for placed in candidate.target} for candidate in candidates]
            homes = homes if apart == "host" else [{hosts[host].zone for host in some} for some in homes]
            if sum(map(len, homes)) > len(set().union(*homes)):
                return False
        threads: dict[str, int] = {}
        for candidate in candidates:
            for placed in candidate.target if candidate.where is Where.IN_TARGET else candidate.placed:
                threads[placed.device.host] = threads.get(placed.device.host, 0) + placed.option.threads
        return all(not hosts[host].cores or count <= hosts[host].cores for host, count in threads.items())

    def _sum_burden(self, replicas: Iterable[tuple[Drawn, Prediction]]) -> float:
        if self._wanted.objective in (Objective.THROUGHPUT, Objective.LATENCY):
            return 1.0
        used = (candidate.placed if prediction.depth else candidate.target for (candidate, _), prediction in replicas)
        devices = [placed.device for some in used for placed in some]
        return sum_expense(devices, self._fleet.left.hosts).burden(self._wanted.objective)


def _without_idle_draft(scored: ScoredCandidate) -> Candidate:
    """Return it without a draft model that has no cores there, as it would not draft."""
    candidate = scored.candidate
    if candidate.draft is None or scored.prediction.depth:
        return candidate
    return replace(candidate, drafter=None, draft=None, where=Where.NOWHERE)


def _reject(device: str, why: str, prediction: Prediction) -> RejectedCandidate:
    return RejectedCandidate(device, why, Role.TARGET, prediction.goodput_tokens_per_s, tpot_ms=prediction.tpot_ms)
