"""What lies between two devices: measured where it was, by default by host and zone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from device_profiles.link import LinkProfile
from policies.planning.plan import DefaultLinks, Host, Inventory


@dataclass(frozen=True, slots=True)
class Links:
    """Links by pairs of host names, in either order."""

    hosts: Mapping[str, Host]
    measured: Mapping[tuple[str, str], LinkProfile]
    defaults: DefaultLinks

    def typical(self) -> tuple[LinkProfile, LinkProfile, LinkProfile]:
        """Return what lies between two devices of a host, two hosts of a zone and two zones: the median of what was
        measured, where something was."""
        kinds: tuple[list[LinkProfile], ...] = ([], [], [])
        for (left, right), link in sorted(self.measured.items()):
            apart = self.hosts[left].zone != self.hosts[right].zone
            kinds[0 if left == right else 2 if apart else 1].append(link)
        defaults = (self.defaults.same_host, self.defaults.same_zone, self.defaults.other_zone)
        host, zone, far = (_median(known, default) for known, default in zip(kinds, defaults, strict=True))
        return host, zone, far

    def between(self, left: str, right: str) -> LinkProfile:
        """Return the link between workers on these hosts, each in a process of its own."""
        known = self.measured.get((left, right)) or self.measured.get((right, left))
        if known is not None:
            return known
        if left == right:
            return self.defaults.same_host
        same = self.hosts[left].zone == self.hosts[right].zone
        return self.defaults.same_zone if same else self.defaults.other_zone


def _median(known: list[LinkProfile], default: LinkProfile) -> LinkProfile:
    if not known:
        return default
    rtt, rate = (median([getattr(link, name) for link in known]) for name in ("rtt_ms", "bytes_per_s"))
    return replace(default, rtt_ms=rtt, bytes_per_s=rate)


def links_of(cluster: Inventory) -> Links:
    """Return a cluster's links, whatever their order: of several for one pair, the one with the longest round trip.
    Links of hosts that are not in the cluster are left out."""
    hosts = {host.name: host for host in cluster.hosts}
    measured: dict[tuple[str, str], LinkProfile] = {}
    for link in sorted(cluster.links, key=lambda link: (link.rtt_ms, -link.bytes_per_s)):
        first, second = sorted((link.left, link.right))
        if first in hosts and second in hosts:
            measured[(first, second)] = link
    return Links(hosts, measured, cluster.default_links)


class HostLinks:
    """The same for arrays of host numbers (of hosts in the order of their names)."""

    def __init__(self, links: Links) -> None:
        names = sorted(links.hosts)
        numbers = {name: number for number, name in enumerate(names)}
        zones = {zone: number for number, zone in enumerate(sorted({host.zone for host in links.hosts.values()}))}
        self._zone = np.array([zones[links.hosts[name].zone] for name in names], np.int64)
        self._defaults = links.defaults
        self._hosts = len(names)
        known = sorted(
            (numbers[left] * len(names) + numbers[right], link) for (left, right), link in links.measured.items()
        )
        self._keys = np.array([key for key, _ in known], np.int64)
        self._rtt_ms = np.array([link.rtt_ms for _, link in known])
        self._bytes_per_s = np.array([link.bytes_per_s for _, link in known])
        far = [(numbers[left], numbers[right]) for left, right in links.measured if left != right]
        self.pairs = sorted(far + [(right, left) for left, right in far])
        """Pairs of hosts whose link was measured, both ways round."""

    def between(
        self, left: NDArray[np.int64], right: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return round trips in ms, and bytes per second."""
        same_host, same_zone = left == right, self._zone[left] == self._zone[right]
        kinds = (self._defaults.same_host, self._defaults.same_zone, self._defaults.other_zone)
        rtt = np.where(same_host, kinds[0].rtt_ms, np.where(same_zone, kinds[1].rtt_ms, kinds[2].rtt_ms))
        rate = np.where(
            same_host, kinds[0].bytes_per_s, np.where(same_zone, kinds[1].bytes_per_s, kinds[2].bytes_per_s)
        )
        if len(self._keys):
            key = np.minimum(left, right) * self._hosts + np.maximum(left, right)
            at = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
            known = self._keys[at] == key
            rtt, rate = np.where(known, self._rtt_ms[at], rtt), np.where(known, self._bytes_per_s[at], rate)
        return rtt, rate
