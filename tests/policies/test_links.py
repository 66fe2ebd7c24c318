"""What lies between two hosts where it was measured, and where it was not."""

from device_profiles.link import LinkProfile
from policies.planning.placement.links import Links
from policies.planning.plan import DefaultLinks, Host

HOSTS = {name: Host(name, zone) for name, zone in (("a", "east"), ("b", "east"), ("c", "west"))}
WITHIN, NEAR, FAR = LinkProfile("a", "a", 0.1, 3e9), LinkProfile("a", "b", 1.0, 2e9), LinkProfile("a", "c", 30.0, 1e9)


def make_links(*known):
    return Links(HOSTS, {(one.left, one.right): one for one in known}, DefaultLinks())


def test_what_was_measured_is_typical_of_its_distance():
    told = [(one.rtt_ms, one.bytes_per_s) for one in make_links(WITHIN, NEAR, FAR).typical()]
    assert told == [(0.1, 3e9), (1.0, 2e9), (30.0, 1e9)]


def test_distances_of_which_nothing_was_measured_have_their_defaults():
    defaults = DefaultLinks()
    assert make_links().typical() == (defaults.same_host, defaults.same_zone, defaults.other_zone)
    assert make_links(FAR).typical()[:2] == (defaults.same_host, defaults.same_zone)
    assert make_links(NEAR).typical()[2] == defaults.other_zone


def test_a_link_counts_both_ways_and_else_the_distance_decides():
    links = make_links(FAR)
    assert links.between("a", "c") is links.between("c", "a") is FAR
    assert links.between("b", "c") == DefaultLinks().other_zone
    assert links.between("b", "a") == DefaultLinks().same_zone
    assert links.between("b", "b") == DefaultLinks().same_host
