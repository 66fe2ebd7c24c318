"""What lies between two devices: measured where it was, by default by host and zone."""

from __future__ import annotations

from dataclasses import dataclass

from device_profiles.link import LinkProfile
from policies.plan import Cluster, DefaultLinks, Device, Host


@dataclass(frozen=True, slots=True)
class Links:
    """Links by pairs of host names, in either order."""

    hosts: dict[str, Host]
    measured: dict[tuple[str, str], LinkProfile]
    defaults: DefaultLinks

    def between(self, left: Device, right: Device) -> LinkProfile:
        """Return the link between two workers on these devices, each in a process of its own."""
        return self.of_hosts(left.host, right.host)

    def of_hosts(self, left: str, right: str) -> LinkProfile:
        """Return the link between workers on these hosts."""
        known = self.measured.get((left, right)) or self.measured.get((right, left))
        if known is not None:
            return known
        if left == right:
            return self.defaults.same_host
        same = self.hosts[left].zone == self.hosts[right].zone
        return self.defaults.same_zone if same else self.defaults.other_zone


def links_of(cluster: Cluster) -> Links:
    """Return a cluster's links, whatever their order: of several for one pair, the one with the longest round trip."""
    measured: dict[tuple[str, str], LinkProfile] = {}
    for link in sorted(cluster.links, key=lambda one: (one.rtt_ms, -one.bytes_per_s)):
        first, second = sorted((link.left, link.right))
        measured[(first, second)] = link
    return Links({host.name: host for host in cluster.hosts}, measured, cluster.default_links)
