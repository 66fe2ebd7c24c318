"""Replicas that share the load and no device: one after the other, each the best that is left.

What every option costs is computed once for all of them. Of many devices a few of each kind are looked at (see
alike.py), and where what is left is like what was left before, the choice is, too. So thousands of devices take as many
searches as they have kinds, not as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from policies.planning.merit import describe_merit
from policies.planning.placement.alike import AlikeHosts, find_single_hosts, number_kinds
from policies.planning.placement.candidate import Candidate, PlacedShard, ScoredCandidate, count_threads, rate_candidate
from policies.planning.placement.cut_reasons import explain_cut
from policies.planning.placement.filters import Usable
from policies.planning.placement.links import HostLinks, Links
from policies.planning.placement.rows import Index, OptionRows, draft_rows, target_rows
from policies.planning.placement.search import SearchResult, SearchSpace, best, find_best_on, find_members, pair_rows
from policies.planning.placement.sharded import best_sharded
from policies.planning.plan import DrafterFacts, PlanGoal

FEW = 64
"""Devices; so many are all looked at."""
_KEPT = 4  # of each kind: one more than the fastest drafts that a search keeps of a place
_TABLES = 8  # of rows that are kept: for so many numbers of sequences


def choose_replica(ground: SearchSpace, looked: SearchResult) -> tuple[ScoredCandidate | None, list[str]]:
    """Return the best single replica, whole or in shards, and what decided between the two."""
    limits = ground.wanted.constraints
    whole = best(looked, ground) if limits.shards in (0, 1) else None
    if not may_cut(ground.wanted, whole):
        return whole, []
    cut = best_cut(ground)
    if cut is not None and not limits.shards and whole is None:
        return cut, list(explain_cut(cut, ground, best_cut))
    if whole is None or cut is None:
        return whole or cut, []
    aim = (ground.wanted.objective, ground.wanted.currency)
    alone, parted = (describe_merit(aim[0], scored.merit[0], aim[1]) for scored in (whole, cut))
    comparison = f"whole on one device: {alone} predicted, in {len(cut.candidate.target)} shards: {parted}"
    return (cut if cut.beats(whole) else whole), [comparison]


def may_cut(wanted: PlanGoal, whole: ScoredCandidate | None) -> bool:
    """Return whether shards are to be looked at, where this is the best without."""
    limits = wanted.constraints
    if limits.sharding == "never" or limits.shards == 1:
        return False
    return whole is None or limits.sharding != "when_needed"


def best_cut(ground: SearchSpace) -> ScoredCandidate | None:
    able = ground.wanted.constraints.shard_runtimes
    targets = {
        profile: tuple(option for option in options if option.ranks == 1 and (not able or option.runtime in able))
        for profile, options in ground.left.targets.items()
    }
    ground = replace(ground, left=replace(ground.left, targets=targets))
    return _best_on_one_host(ground) if ground.wanted.constraints.one_host else best_sharded(ground)


def _best_on_one_host(ground: SearchSpace) -> ScoredCandidate | None:
    best: ScoredCandidate | None = None
    devices = ground.left.target_devices
    for host in sorted({device.host for device in devices}):
        mine = tuple(device for device in devices if device.host == host)
        if len(mine) < 2:
            continue
        scored = best_sharded(replace(ground, left=replace(ground.left, target_devices=mine)))
        if scored is not None and (best is None or scored.beats(best)):
            best = scored
    return best


class Fleet:
    """All there is to place replicas on, as arrays. `few`: so many devices are all looked at."""

    def __init__(self, left: Usable, links: Links, wanted: PlanGoal, few: int = FEW) -> None:
        self.left, self.links, self.wanted = left, links, wanted
        self.index = SearchSpace(left, links, wanted, wanted.workload.concurrency).all_devices()
        self.host_links = HostLinks(links)
        self.numbers = {device.id: number for number, device in enumerate(self.index.devices)}
        self.by_host: dict[str, list[int]] = {}
        for number, device in enumerate(self.index.devices):
            self.by_host.setdefault(device.host, []).append(number)
        self.may_target = find_members(self.index, [device.id for device in left.target_devices])
        self.may_draft = find_members(self.index, [device.id for device in left.draft_devices])
        self.kinds = number_kinds(self.index.devices, self.may_target, self.may_draft)
        self._single = find_single_hosts(self.by_host, links, wanted.client_host)
        self.rated: dict[object, ScoredCandidate] = {}
        self._groups = len(self.index.devices) > few
        self._tables: dict[object, OptionRows] = {}

    def place(self, count: int) -> list[ScoredCandidate]:
        """Return up to `count` replicas, the best first. Each has an equal part of the requests that those before it
        left. Of several that are alike all have the score of the first."""
        free, chosen, requests = _Free(self), list[ScoredCandidate](), self.wanted.workload.concurrency
        for number in range(count):
            scored = free.choose(max(1, -(-requests // (count - number))))
            if scored is None:
                break
            chosen.append(scored)
            requests -= scored.candidate.sequences
            free.take(scored)
        return chosen

    def list_targets(self) -> list[int]:
        """Return the numbers of the devices on which an option of the target may run."""
        return [int(number) for number in np.unique(self.target_rows(1).device)]

    def list_best(self, part: int, numbers: Sequence[int]) -> Iterator[tuple[int, Candidate]]:
        """Yield for each of these devices, by its number, the best replica on it for so many sequences: with any draft,
        and with none on another device."""
        rows = self.target_rows(part)
        fits = rows.of(np.flatnonzero(rows.threads <= self.index.cores[rows.device]))

        def find_drafts(drafter: DrafterFacts, sequences: int) -> OptionRows:
            drafts = self.draft_rows(drafter, sequences)
            return drafts.of(np.flatnonzero(drafts.threads <= self.index.cores[drafts.device]))

        pairs = pair_rows(self.index, fits, find_drafts, self.host_links, self.wanted)
        for number in numbers:
            for own in (False, True):
                candidate = find_best_on(SearchResult(self.index, pairs, ()), number, own=own)
                if candidate is not None:
                    yield number, candidate

    def group(self, *, cut: bool) -> AlikeHosts | None:
        """Return the hosts by their kinds, None where all are looked at. `cut`: to cut shards from."""
        if not self._groups:
            return None
        limits = self.wanted.constraints
        pairs = cut or any(drafter.model is not None for drafter in self.wanted.workload.drafters)
        keep = max(_KEPT, limits.shards, limits.max_shards + 1) if cut else _KEPT if pairs else 1
        return AlikeHosts(
            self.by_host, self.kinds, self.left.hosts, self._single, self.wanted.client_host, keep, zones=pairs
        )

    def describe(self, candidate: Candidate) -> tuple[object, ...]:
        """Return all that is predicted and scored by, without names."""
        parts = tuple(
            (self.kinds[self.numbers[part.device.id]], id(part.option), self.describe_place(part.device.host))
            for part in candidate.placed
        )
        return parts, candidate.sequences, id(candidate.drafter), candidate.where

    def describe_place(self, name: str) -> tuple[object, ...]:
        """Return what is predicted and scored by of a host."""
        host, client = self.left.hosts[name], self.left.hosts.get(self.wanted.client_host)
        near = client is not None and client.zone == host.zone
        return host.price_per_hour, near, name if name in self._single else ""

    def target_rows(self, concurrency: int) -> OptionRows:
        """Return the rows of all devices, whatever cores are left, with as many sequences as fit."""
        load, index = self.wanted.workload, self._with_cores()
        return self._keep(
            concurrency, lambda: target_rows(index, self.left.targets, load, self.may_target, concurrency)[0]
        )

    def draft_rows(self, drafter: DrafterFacts, sequences: int) -> OptionRows:
        """Return the rows of a drafter's model on all devices, whatever cores are left."""
        load, index = self.wanted.workload, self._with_cores()
        return self._keep(
            (drafter, sequences),
            lambda: draft_rows(index, self.left.drafts, drafter, load, self.may_draft, sequences)[0],
        )

    def _with_cores(self) -> Index:
        return replace(self.index, cores=np.full(len(self.index.devices), np.inf))

    def _keep(self, key: object, make: Callable[[], OptionRows]) -> OptionRows:
        if key not in self._tables:
            while len(self._tables) >= _TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = make()
        return self._tables[key]


@dataclass(frozen=True, slots=True)
class _Known:
    """What was chosen, and where: for each part the number of its host among those that were looked at, and of its
    device among those on it."""

    scored: ScoredCandidate
    places: tuple[tuple[int, int], ...]


class _Choice:
    """Chooses among what is free, once for each kind of what there is left."""

    def __init__(self, hosts: AlikeHosts, look: Callable[[int, Sequence[int]], ScoredCandidate | None]) -> None:
        self.hosts = hosts
        self._look = look
        self._known: dict[object, _Known | None] = {}

    def choose(self, part: int, fleet: Fleet) -> ScoredCandidate | None:
        few, zones = self.hosts.hosts(), dict[str, int]()
        key = (part, tuple((state, zones.setdefault(zone, len(zones))) for _, state, zone in few))
        if key not in self._known:
            devices = [self.hosts.devices(host) for host, _, _ in few]
            self._known[key] = self._first(part, devices, fleet)
        known = self._known[key]
        if known is None:
            return None
        numbers = [self.hosts.devices(few[host][0])[place] for host, place in known.places]
        chosen = [fleet.index.devices[number] for number in numbers]
        candidate = known.scored.candidate
        parts = [replace(placed, device=device) for placed, device in zip(candidate.placed, chosen, strict=True)]
        whole = len(candidate.target)
        draft: PlacedShard | None = parts[whole] if candidate.draft is not None else None
        placed: Candidate = replace(candidate, target=tuple(parts[:whole]), draft=draft)
        return replace(known.scored, candidate=placed)

    def _first(self, part: int, devices: list[list[int]], fleet: Fleet) -> _Known | None:
        scored = self._look(part, sorted(number for some in devices for number in some))
        if scored is None:
            return None
        at = {number: (host, place) for host, some in enumerate(devices) for place, number in enumerate(some)}
        return _Known(scored, tuple(at[fleet.numbers[placed.device.id]] for placed in scored.candidate.placed))


class _Free:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._free = np.ones(len(fleet.index.devices), np.bool_)
        self._index = replace(fleet.index, cores=fleet.index.cores.copy(), host_price=fleet.index.host_price.copy())
        self._host_numbers = {name: number for number, name in enumerate(self._index.hosts)}
        self._taken: set[int] = set()
        self._cores: dict[str, int] = {}
        self._paid: set[str] = set()
        self._whole = self._group(self._look_whole)
        self._cut: _Choice | None = None

    def choose(self, part: int) -> ScoredCandidate | None:
        """Return the best replica for so many sequences on what is free, None where there is none."""
        limits = self._fleet.wanted.constraints
        whole = self._choose(self._whole, self._look_whole, part) if limits.shards in (0, 1) else None
        if not may_cut(self._fleet.wanted, whole):
            return whole
        if self._cut is None:
            self._cut = self._group(self._look_cut, cut=True)
        cut = self._choose(self._cut, self._look_cut, part)
        if whole is None or cut is None:
            return whole or cut
        return cut if cut.beats(whole) else whole

    def take(self, scored: ScoredCandidate) -> None:
        """A replica has these devices, and cores of their hosts."""
        fleet, index = self._fleet, self._index
        used = {placed.device.host for placed in scored.candidate.placed}
        mine = {fleet.numbers[placed.device.id] for placed in scored.candidate.placed}
        barred = self._list_barred_hosts(scored)
        mine.update(number for host in barred for number in fleet.by_host.get(host, ()))
        self._taken |= mine
        self._free[list(mine)] = False
        for host, threads in count_threads(scored, fleet.left.hosts).items():
            self._cores[host] = self._cores.get(host, 0) + threads
            index.cores[fleet.by_host[host]] = fleet.left.hosts[host].cores - self._cores[host]
        for part in scored.in_use:
            self._paid.add(part.device.host)
            index.host_price[self._host_numbers[part.device.host]] = 0.0
        for choice in (self._whole, self._cut):
            if choice is not None:
                choice.hosts.update(used | set(barred), self._taken, self._cores, self._paid)

    def _list_barred_hosts(self, scored: ScoredCandidate) -> Sequence[str]:
        """Return the hosts on which no other replica may be beside it."""
        apart, fleet = self._fleet.wanted.constraints.replicas_apart, self._fleet
        if apart == "device":
            return ()
        hosts = {placed.device.host for placed in scored.candidate.target}
        if apart == "host":
            return sorted(hosts)
        zones = {fleet.left.hosts[host].zone for host in hosts}
        return [host for host in fleet.by_host if fleet.left.hosts[host].zone in zones]

    def _group(
        self, look: Callable[[int, Sequence[int]], ScoredCandidate | None], *, cut: bool = False
    ) -> _Choice | None:
        hosts = self._fleet.group(cut=cut)
        if hosts is None:
            return None
        hosts.update(self._fleet.by_host, self._taken, self._cores, self._paid)
        return _Choice(hosts, look)

    def _choose(
        self, among: _Choice | None, look: Callable[[int, Sequence[int]], ScoredCandidate | None], part: int
    ) -> ScoredCandidate | None:
        if among is not None:
            return among.choose(part, self._fleet)
        return look(part, [int(number) for number in np.flatnonzero(self._free)])

    def _look_whole(self, part: int, numbers: Sequence[int]) -> ScoredCandidate | None:
        fleet, index = self._fleet, self._index
        free = np.zeros(len(index.devices), np.bool_)
        free[list(numbers)] = True

        def find_free(rows: OptionRows) -> OptionRows:
            return rows.of(np.flatnonzero(free[rows.device] & (rows.threads <= index.cores[rows.device])))

        pairs = pair_rows(
            index,
            find_free(fleet.target_rows(part)),
            lambda drafter, sequences: find_free(fleet.draft_rows(drafter, sequences)),
            fleet.host_links,
            fleet.wanted,
        )
        return best(SearchResult(index, pairs, ()), self._space(part, ()), self._rate)

    def _rate(self, candidate: Candidate) -> ScoredCandidate:
        like, paid = self._fleet.describe(candidate), tuple(part.device.host in self._paid for part in candidate.placed)
        known = self._fleet.rated.get((like, paid))
        if known is None:
            known = rate_candidate(candidate, self._fleet.links, self._fleet.wanted, paid=self._paid)
            self._fleet.rated[like, paid] = known
        return replace(known, candidate=candidate)

    def _look_cut(self, part: int, numbers: Sequence[int]) -> ScoredCandidate | None:
        return best_cut(self._space(part, numbers))

    def _space(self, part: int, numbers: Sequence[int]) -> SearchSpace:
        fleet, devices = self._fleet, self._fleet.index.devices
        left = replace(
            fleet.left,
            target_devices=tuple(devices[number] for number in numbers if fleet.may_target[number]),
            draft_devices=tuple(devices[number] for number in numbers if fleet.may_draft[number]),
        )
        return SearchSpace(left, fleet.links, fleet.wanted, part, frozenset(), self._cores, self._paid)
