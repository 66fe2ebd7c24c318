"""In which order the hosts of a sharded target follow each other.

Shards of one host stay together. With links by default, hosts of a zone stay together too, and the draft's host (or
zone) comes last, where it is decided what is accepted. Where links were measured, all orders of a few hosts are tried,
and of more the nearest host follows next, from every start. Whatever the order, the first and the last shard have room
for the embedding and the output layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from device_profiles.link import LinkProfile
from device_profiles.units import MS_PER_S
from policies.planning.placement.candidate import PlacedShard, hops
from policies.planning.placement.links import Links

# Hosts, of which all orders are tried. Bounded by 720 orders (ADR 0025); of more hosts the median link of a kind
# decides.
_TRIED = 6


@dataclass(frozen=True, slots=True)
class Traffic:
    """What crosses a hop in a round: so many `trips` with `size_bytes` in all, and as many back to the first shard."""

    trips: float
    size_bytes: float

    def forward_ms(self, link: LinkProfile) -> float:
        """Return what a hop to the next shard takes."""
        return self.trips * link.rtt_ms / 2 + self.size_bytes / link.bytes_per_s * MS_PER_S

    def back_ms(self, link: LinkProfile) -> float:
        """Return what the last shard's tokens take to the first."""
        return self.trips * link.rtt_ms / 2


@dataclass(frozen=True, slots=True)
class EndRoom:
    """Devices, by their ids, that have room for the model's `first` layer or its `last` one with what goes with it, and
    as many layers as their shards have."""

    first: frozenset[str]
    last: frozenset[str]


def order_shards(
    target: tuple[PlacedShard, ...], draft_host: str, links: Links, traffic: Traffic, room: EndRoom
) -> tuple[PlacedShard, ...]:
    """Return the shards in the order that costs least, where their draft is on that host ("": there is none). They stay
    as they are where no such order has `room`."""
    by_host: dict[str, list[PlacedShard]] = {}
    for placed in target:
        by_host.setdefault(placed.device.host, []).append(placed)
    if not any(left in by_host and right in by_host for left, right in links.measured):
        zone = links.hosts[draft_host].zone if draft_host else ""
        zones = list(dict.fromkeys(links.hosts[host].zone for host in by_host))
        of = {host: links.hosts[host].zone for host in by_host}
        by_zone = sorted(
            by_host, key=lambda host: (bool(draft_host) and of[host] == zone, zones.index(of[host]), host == draft_host)
        )
        orders: Sequence[Sequence[str]] = [by_zone]
    else:
        orders = sorted(_orders(list(by_host), links), key=lambda hosts: _cost(hosts, draft_host, links, traffic))
    arranged = (_arrange([by_host[host] for host in hosts], room) for hosts in orders)
    return number_layers(next((shards for shards in arranged if shards), target))


def _arrange(hosts: Sequence[Sequence[PlacedShard]], room: EndRoom) -> list[PlacedShard]:
    """Return the shards of these hosts, in this order, with one at each end that has room for it; none where there is
    none."""
    firsts = [placed for placed in hosts[0] if placed.device.id in room.first]
    lasts = [placed for placed in reversed(hosts[-1]) if placed.device.id in room.last]
    for first, last in product(firsts, lasts):
        if first is not last:
            between = [placed for some in hosts for placed in some if placed is not first and placed is not last]
            return [first, *between, last]
    return []


def number_layers(target: Sequence[PlacedShard]) -> tuple[PlacedShard, ...]:
    numbered, first = [], 0
    for placed in target:
        numbered.append(replace(placed, first=first, end=first + placed.layers))
        first += placed.layers
    return tuple(numbered)


def _orders(hosts: list[str], links: Links) -> Iterator[tuple[str, ...]]:
    if len(hosts) <= _TRIED:
        yield from permutations(sorted(hosts))
        return
    for start in sorted(hosts):
        path, left = [start], sorted(set(hosts) - {start})
        while left:
            path.append(min(left, key=lambda host: (links.between(path[-1], host).rtt_ms, host)))
            left.remove(path[-1])
        yield tuple(path)


def _cost(hosts: Sequence[str], draft_host: str, links: Links, traffic: Traffic) -> float:
    known = hops(hosts, links)
    asking = links.between(hosts[-1], draft_host).rtt_ms if draft_host else 0.0
    return sum(traffic.forward_ms(link) for link in known[:-1]) + sum(map(traffic.back_ms, known[-1:])) + asking
