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
from policies.planning.plan import PlanGoal, RejectedCandidate, Role
from policies.planning.pool import PoolPrediction, predict_end_ms, predict_pool, share_requests, take_share

# Pools that are all looked at, of few devices. Bounds time: some 50 us each. Not tuned.
_MOST_POOLS = 2048


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas with their shares, what is predicted of all, and the merit of it with its second figure. `kinds`: equal
    where replicas are alike. `left_out`: why it is without devices that could run another one."""

    members: tuple[ScoredCandidate, ...]
    kinds: tuple[Hashable, ...]
    prediction: PoolPrediction
    merit: tuple[float, float]
    left_out: tuple[RejectedCandidate, ...] = ()


class Curve:
    """What is predicted of one replica by how many requests it has: as many run at once as its memory allows.
    `routed`: what routing takes it for, None: for what it is."""

    def __init__(self, candidate: Candidate, links: Links, wanted: PlanGoal, routed: Curve | None = None) -> None:
        self._candidate, self._links, self._wanted, self._routed = candidate, links, wanted, routed
        self._most = find_most_sequences(candidate, wanted)
        self._rated: dict[int, ScoredCandidate] = {}
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

    def share(self, requests: int) -> ScoredCandidate:
        """Return it with so many requests; one without any is predicted with one."""
        scored = self._rate(requests)
        load = self._wanted.workload
        return replace(scored, prediction=take_share(scored.prediction, requests, load.output_tokens))

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

    more = range(candidate.sequences + 1, wanted.workload.concurrency + 1)
    return candidate.sequences + bisect_left(more, True, key=is_full)


class Pools:
    """Makes pools of what a fleet has, with every kind of replica predicted once."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._wanted = fleet, fleet.wanted
        self._curves: dict[Hashable, Curve] = {}
        self._routed: dict[Hashable, Curve] = {}

    def build(self, candidates: Sequence[Candidate]) -> Pool:
        """Return the pool of these; those that get no request are left out while there are as many as there are to be
        at least."""
        kinds = [self._fleet.describe(replace(candidate, sequences=0)) for candidate in candidates]
        for kind, candidate in zip(kinds, candidates, strict=True):
            if kind not in self._curves:
                self._curves[kind] = self._draw_curve(candidate)
        curves = [self._curves[kind] for kind in kinds]
        shares = share_requests([curve.end_ms for curve in curves], self._wanted.workload.concurrency)
        idle = [number for number, share in enumerate(shares) if not share]
        lacking = self._wanted.constraints.min_replicas - (len(shares) - len(idle))
        out = set(idle[max(0, lacking) :])
        kept = sorted(set(range(len(shares))) - out, key=lambda number: (-shares[number], number))
        members = tuple(_put(curves[number].share(shares[number]), candidates[number]) for number in kept)
        prediction = predict_pool([member.prediction for member in members])
        merit = weigh_pool(self._wanted.objective, prediction, self._sum_burden(members))
        return Pool(members, tuple(kinds[number] for number in kept), prediction, merit)

    def place(self, count: int) -> tuple[Pool, int]:
        """Return a pool of up to so many replicas, placed one after the other, without those that are not worth it, and
        how many there is room for."""
        placed = self._fleet.place(count)
        pool = self.build([_without_idle_draft(scored) for scored in placed])
        while burdens := self._list_burdens(pool):
            pool = max(burdens, key=lambda found: found[1])[0]
        return pool, len(placed)

    def place_any(self) -> Pool | None:
        """Return the best pool of few devices by trying all; None where there are too many, or none is worth it."""
        requests, devices = self._wanted.workload.concurrency, len(self._fleet.list_targets())
        if not devices or 2**devices > _MOST_POOLS:
            return None
        variants = self._list_variants((1, -(-requests // devices), requests))
        if prod(len(some) + 1 for some in variants) > _MOST_POOLS:
            return None
        best: Pool | None = None
        limits = self._wanted.constraints
        pools = sorted(product(*((None, *some) for some in variants)), key=lambda pool: len(pool) - pool.count(None))
        for chosen in pools:
            candidates = [candidate for candidate in chosen if candidate is not None]
            if not limits.min_replicas <= len(candidates) <= limits.max_replicas or not self._fit(candidates):
                continue
            pool = self.build(candidates)
            if (best is None or is_better(pool.merit, best.merit)) and not any(self._list_burdens(pool)):
                best = pool
        return best

    def explain_left_out(self, pool: Pool) -> Iterator[RejectedCandidate]:
        """Yield of devices that could run another replica why the pool is without it; of very many, for FEW kinds."""
        used = {placed.device.id for member in pool.members for placed in member.candidate.placed}
        part = -(-self._wanted.workload.concurrency // (len(pool.members) + 1))
        known: dict[Hashable, RejectedCandidate | None] = {}
        for some in self._list_variants((1, part)):
            mine = [candidate for candidate in some if not used & {placed.device.id for placed in candidate.placed}]
            kind = tuple(self._fleet.describe(replace(candidate, sequences=0)) for candidate in mine)
            if kind not in known and len(known) < FEW:
                reasons = (self._explain_one(pool, candidate) for candidate in mine)
                known[kind] = next((why for why in reasons if why is not None), None)
            why = known.get(kind)
            if why is not None:
                yield replace(why, what=mine[0].target[0].device.id)

    def _explain_one(self, pool: Pool, candidate: Candidate) -> RejectedCandidate | None:
        members = [member.candidate for member in pool.members]
        if len(members) >= self._wanted.constraints.max_replicas or not self._fit([*members, candidate]):
            return None
        more, requests = self.build([*members, candidate]), self._wanted.workload.concurrency
        device = candidate.target[0].device.id
        added = next((member for member in more.members if member.candidate.target[0].device.id == device), None)
        if added is None or not added.prediction.requests:
            curve = self._curves[self._fleet.describe(replace(candidate, sequences=0))]
            slowest_ms = max(self._curves[kind].end_ms(member.prediction.requests or 0) for kind, member in _zip(pool))
            alone = curve.share(1).prediction
            why = (
                f"left out: none of {requests} requests would go to it: one takes {curve.end_ms(1):.0f} ms there, and "
                f"at most {slowest_ms:.0f} ms on the replicas with all of them"
            )
            return _reject(device, why, alone.goodput_tokens_per_s, alone.tpot_ms)
        merits = [describe_merit(self._wanted.objective, each.merit[0], self._wanted.currency) for each in (pool, more)]
        tails = [each.prediction for each in (pool, more)]
        share = added.prediction.requests
        why = f"left out: with it, for {share} of {requests} requests, the replicas' {merits[0]} become {merits[1]}"
        if is_better(more.merit, pool.merit):
            if not any(without is not None for without in self._list_burdens(more)):
                return None
            why += (
                f", which is less than 95 % of requests lose: TPOT {tails[0].tpot_p95_ms:.1f} -> "
                f"{tails[1].tpot_p95_ms:.1f} ms, TTFT {tails[0].ttft_p95_ms:.0f} -> {tails[1].ttft_p95_ms:.0f} ms"
            )
        return _reject(device, why, added.prediction.goodput_tokens_per_s, added.prediction.tpot_ms)

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
        kinds = dict.fromkeys(pool.kinds)
        if len(kinds) < 2:
            return burdens
        output = self._wanted.workload.output_tokens
        for kind in kinds:
            others = [member.candidate for other, member in _zip(pool) if other != kind]
            if len(others) < self._wanted.constraints.min_replicas:
                continue
            without = self.build(others)
            loss = pool.prediction.tail_ms(output) / without.prediction.tail_ms(output)
            gain = pool.merit[0] / without.merit[0] if without.merit[0] else float("inf")
            if loss > max(1.0, gain) * (1.0 + ALIKE):
                burdens.append((without, loss / gain))
        return burdens

    def _list_variants(self, parts: Iterable[int]) -> list[list[Candidate]]:
        """Return for each device how a replica on it may be: the best for so many requests, with drafts from anywhere
        and with none from elsewhere."""
        found: dict[int, dict[Hashable, Candidate]] = {number: {} for number in self._fleet.list_targets()}
        for part in sorted(set(parts)):
            for number, candidate in self._fleet.list_best(part):
                found[number].setdefault(self._fleet.describe(replace(candidate, sequences=0)), candidate)
        return [list(some.values()) for some in found.values()]

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

    def _sum_burden(self, members: Iterable[ScoredCandidate]) -> float:
        devices = [placed.device for member in members for placed in member.in_use]
        return sum_expense(devices, self._fleet.left.hosts).burden(self._wanted.objective)


def _zip(pool: Pool) -> Iterator[tuple[Hashable, ScoredCandidate]]:
    return zip(pool.kinds, pool.members, strict=True)


def _put(scored: ScoredCandidate, candidate: Candidate) -> ScoredCandidate:
    """Return what is predicted of a replica on the devices of one that is alike."""
    return replace(scored, candidate=replace(candidate, sequences=scored.candidate.sequences))


def _without_idle_draft(scored: ScoredCandidate) -> Candidate:
    """Return it without a draft model that has no cores there, as it would not draft."""
    candidate = scored.candidate
    if candidate.draft is None or scored.prediction.depth:
        return candidate
    return replace(candidate, drafter=None, draft=None, where=Where.NOWHERE)


def _reject(device: str, why: str, goodput_tokens_per_s: float, tpot_ms: float) -> RejectedCandidate:
    return RejectedCandidate(device, why, Role.TARGET, goodput_tokens_per_s, tpot_ms=tpot_ms)
