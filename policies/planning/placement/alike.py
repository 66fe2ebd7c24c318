"""Hosts that are alike, so that a search looks at a few of each kind instead of at all.

Two devices are alike where everything but their names is. Two hosts are, where they have the same cores left, the same
price and like devices in the same order. Two zones are, where their hosts are. Of those that are alike the best plan
takes the first by name. A pairing needs one for the target and one for the draft. A search keeps the three fastest
drafts of every place (see pairs.py). So a few of each kind stand for all.

Hosts that are named by a measured link, or that clients come in at, are like no other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

from policies.planning.placement.links import Links
from policies.planning.plan import Device, Host

_Ranked = tuple[int, str]  # where it comes by name, and its name
_View = tuple[int, ...]  # what there is to choose from in a zone: its marks and states of its first hosts, in order

FEW = 64
"""Devices that a search looks at one by one (ADR 0096); of more, a few of each kind. Not tuned."""


@dataclass(slots=True)
class _Zone:
    """The hosts of a zone by their states, in order; `first`: the few of each state that stand for all."""

    mark: int
    hosts: dict[int, list[_Ranked]] = field(default_factory=dict)
    first: list[tuple[int, str, int]] = field(default_factory=list)
    view: _View = ()


class AlikeHosts:
    """What is free of a cluster, by kinds of hosts and zones; `keep` of each kind stand for all of it.

    `devices`: the numbers of each host's devices, in the order of their ids; `kinds`: of each device. `single` hosts
    are like no other. `zones`: whether it counts which hosts share a zone.
    """

    def __init__(
        self,
        devices: Mapping[str, Sequence[int]],
        kinds: Sequence[int],
        hosts: Mapping[str, Host],
        single: Collection[str],
        client_host: str,
        keep: int,
        *,
        zones: bool = True,
    ) -> None:
        self._keep, self._kinds = keep, kinds
        self._numbers: dict[object, int] = {}
        self._free = {host: list(numbers) for host, numbers in devices.items()}
        self._rank = {host: numbers[0] for host, numbers in devices.items()}
        self._marks = {host: _mark(hosts[host], host in single) for host in devices}
        own_zone = hosts[client_host].zone if client_host in hosts else None
        self._of_zone = {host: hosts[host].zone if zones or hosts[host].zone == own_zone else "" for host in devices}
        self._zones = {
            zone: _Zone(self._number(("zone", zone if zone == own_zone else "")))
            for zone in sorted(set(self._of_zone.values()))
        }
        self._views: dict[_View, list[list[_Ranked]]] = {}
        self._state: dict[str, int] = {}

    def update(
        self, hosts: Iterable[str], taken: Collection[int], cores: Mapping[str, int], paid: Collection[str]
    ) -> None:
        """Take in what became of hosts: `taken` devices, `cores` that are spoken for, and whether they are paid."""
        zones: dict[str, _Zone] = {}
        for host in hosts:
            if host not in self._free:
                continue
            zone = zones.setdefault(self._of_zone[host], self._zones[self._of_zone[host]])
            entry = (self._rank[host], host)
            if host in self._state:
                _remove(zone.hosts, self._state.pop(host), entry)
            self._free[host] = [number for number in self._free[host] if number not in taken]
            if self._free[host]:
                kinds = tuple(self._kinds[number] for number in self._free[host])
                state = self._number((self._marks[host], cores.get(host, 0), host in paid, kinds))
                self._state[host] = state
                insort(zone.hosts.setdefault(state, []), entry)
        for name, zone in zones.items():
            self._regroup(name, zone)

    def hosts(self) -> list[tuple[str, int, str]]:
        """Return hosts that stand for all, in order: each with its state and its zone."""
        zones = {name: None for places in self._views.values() for place in places for _, name in place[: self._keep]}
        hosts = [(rank, host, state, zone) for zone in zones for rank, host, state in self._zones[zone].first]
        return [(host, state, zone) for _, host, state, zone in sorted(hosts)]

    def devices(self, host: str) -> list[int]:
        seen: dict[int, int] = {}
        kept = []
        for number in self._free[host]:
            seen[self._kinds[number]] = seen.get(self._kinds[number], 0) + 1
            if seen[self._kinds[number]] <= self._keep:
                kept.append(number)
        return kept

    def _number(self, what: object) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _regroup(self, name: str, zone: _Zone) -> None:
        if zone.view:
            places = self._views[zone.view]
            for place, (rank, _, _) in zip(places, zone.first, strict=True):
                del place[bisect_left(place, (rank, name))]
            if not places[0]:
                del self._views[zone.view]
        zone.first = sorted(
            (rank, host, state) for state, hosts in zone.hosts.items() for rank, host in hosts[: self._keep]
        )
        zone.view = (zone.mark, *(state for _, _, state in zone.first)) if zone.first else ()
        if zone.view:
            places = self._views.setdefault(zone.view, [[] for _ in zone.first])
            for place, (rank, _, _) in zip(places, zone.first, strict=True):
                insort(place, (rank, name))


def _remove(hosts: dict[int, list[_Ranked]], state: int, entry: _Ranked) -> None:
    alike = hosts[state]
    del alike[bisect_left(alike, entry)]
    if not alike:
        del hosts[state]


def _mark(host: Host, single: bool) -> tuple[object, ...]:
    """Return what a host is like beside its devices."""
    return (host.cores, host.price_per_hour, host.name if single else "")


def number_kinds(devices: Sequence[Device], may_target: Iterable[object], may_draft: Iterable[object]) -> list[int]:
    """Return the kind of each device as a number: those that differ by name alone have the same."""
    like = attrgetter(*(field.name for field in fields(Device) if field.name not in ("id", "host", "names", "ranks")))
    kinds: dict[object, int] = {}
    rows = zip(devices, may_target, may_draft, strict=True)
    return [kinds.setdefault((like(device), bool(target), bool(draft)), len(kinds)) for device, target, draft in rows]


def find_single_hosts(devices: Mapping[str, Sequence[int]], links: Links, client_host: str) -> set[str]:
    """Return hosts that are like no other. So are those between whose devices, by id, another host's lie: they have no
    place in the order of hosts."""
    mixed = {host for host, numbers in devices.items() if numbers[-1] - numbers[0] >= len(numbers)}
    return mixed | {client_host} | {host for pair in links.measured for host in pair}
