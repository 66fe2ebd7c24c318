"""What the loss of a part of a pool costs, and who goes on for whom: as routing and standbys have it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.serving.failover.pool import Member, StreamFate, list_groups, list_losses
from policies.serving.failover.standby import FailoverRules, OtherBits

RULES: list[OtherBits] = ["never", "new_requests", "streams"]


@st.composite
def pools(draw: st.DrawFn) -> list[Member]:
    """Replicas of up to three groups on up to three devices of two hosts, and perhaps a standby."""
    count = draw(st.integers(1, 6))
    members = []
    for number in range(count):
        device, host = draw(st.integers(0, 2)), draw(st.integers(0, 1))
        parts = (f"device h{host}/{device}", f"host h{host}")
        group, speed = draw(st.sampled_from("abc")), draw(st.floats(1.0, 100.0))
        members.append(Member(f"r{number}", group, parts, speed, standby=number > 0 and draw(st.booleans())))
    return members


@given(pools(), st.sampled_from(RULES))
def test_streams_keep_their_bits_where_a_member_is_left_and_else_change_or_wait_as_the_rules_say(
    members: list[Member], other_bits: OtherBits
) -> None:
    by_name = {member.name: member for member in members}
    losses = list_losses(members, FailoverRules(other_bits=other_bits))
    assert len({loss.part for loss in losses}) == len(losses)
    for loss in losses:
        gone = [by_name[name] for name in loss.members]
        left = [member for member in members if member not in gone]
        left = [member for member in left if not member.standby] or left
        heirs = {by_name[name] for name in loss.to}
        groups = {member.group for member in gone if not member.standby}
        kept = {member.group for member in left} & groups
        assert heirs <= set(left)
        if groups == kept:
            assert loss.streams is StreamFate.PAUSE
            assert {member.group for member in heirs} == groups
        elif other_bits == "streams" and left:
            assert loss.streams is StreamFate.CHANGE_BITS
            assert heirs
        else:
            assert loss.streams is StreamFate.WAIT
            assert {member.group for member in heirs} == kept
        assert loss.share is not None
    workers = [loss for loss in losses if loss.part.startswith("worker ")]
    assert sum(loss.share or 0.0 for loss in workers) == pytest.approx(1.0)


@given(pools(), st.sampled_from(RULES))
def test_every_replica_is_in_one_group_and_others_go_on_only_where_they_may(
    members: list[Member], other_bits: OtherBits
) -> None:
    groups = list_groups(members, FailoverRules(other_bits=other_bits))
    assert sorted(name for group in groups for name in group.members) == sorted(member.name for member in members)
    for group in groups:
        assert not set(group.then) & set(group.members)
        assert other_bits == "streams" or not group.then


def test_what_is_not_known_of_one_replica_leaves_no_share_known() -> None:
    losses = list_losses([Member("a", "x", (), 10.0), Member("b", "x")], FailoverRules())
    assert [loss.share for loss in losses] == [None, None]


def test_thousands_of_replicas_are_told_without_naming_each_for_each() -> None:
    members = [Member(f"r{number}", "x", (f"host h{number}",), 1.0) for number in range(3000)]
    losses = list_losses(members, FailoverRules())
    assert len(losses) == 6000
    assert max(len(loss.to) for loss in losses) < 10
