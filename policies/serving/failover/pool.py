"""Who goes on for whom in a pool of replicas, and what the loss of each part costs.

Replicas of equal bits are a group. Running streams of a lost replica go on in its group, to the bit. Where that has no
member left, they go on with other bits if the rules let them, and else wait until one is back. New requests go to
whatever is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Final

from policies.serving.failover.standby import FailoverRules

# Replicas that are named as going on: what a person reads, as there may be thousands. Not tuned.
_NAMED: Final = 8


class StreamFate(StrEnum):
    """What becomes of a lost replica's running streams, the best first: they go on with the same bits, go on with
    others, or wait until their own are back."""

    PAUSE = "pause"
    CHANGE_BITS = "change_bits"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that serves. `group`: of equal bits; `parts`: the device and the host that it is lost with, as people
    name them. `tokens_per_s`: of all its streams, 0 where not known. `standby`: it serves while no other does."""

    name: str
    group: str
    parts: tuple[str, ...] = ()
    tokens_per_s: float = 0.0
    standby: bool = False


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """A group of equal bits, with its members. `then`: the first that go on for its streams once none of these is
    left."""

    group: str
    members: tuple[str, ...]
    then: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartLoss:
    """What it costs to lose one part. `share`: of the pool's tokens a second, None where not known. `streams`: the
    worst that happens to those that ran on `members`; `to`: the first that go on for them, none where they wait."""

    part: str
    members: tuple[str, ...]
    share: float | None
    streams: StreamFate
    to: tuple[str, ...]


def list_groups(members: Sequence[Member], rules: FailoverRules) -> list[PoolGroup]:
    pool = _Pool(members, rules)
    return [
        PoolGroup(name, tuple(member.name for member in own), pool.find_heirs(own)[1])
        for name, own in pool.by_group.items()
    ]


def list_losses(members: Sequence[Member], rules: FailoverRules) -> list[PartLoss]:
    """Return what the loss of each replica costs, and of each device and host with all that runs there."""
    pool, lost = _Pool(members, rules), dict[str, list[Member]]()
    for member in pool.serving:
        lost[f"worker {member.name}"] = [member]
    for member in members:
        for part in member.parts:
            lost.setdefault(part, []).append(member)
    total = sum(member.tokens_per_s for member in pool.serving)
    known = all(member.tokens_per_s for member in pool.serving)
    return [
        PartLoss(
            part,
            tuple(member.name for member in gone),
            sum(member.tokens_per_s for member in gone if not member.standby) / total if known else None,
            *pool.find_heirs(gone),
        )
        for part, gone in lost.items()
        if not all(member.standby for member in gone)
    ]


class _Pool:
    def __init__(self, members: Sequence[Member], rules: FailoverRules) -> None:
        self.by_group: dict[str, list[Member]] = {}
        for member in members:
            self.by_group.setdefault(member.group, []).append(member)
        self.serving = [member for member in members if not member.standby]
        self._members = members
        self._changes_bits = rules.other_bits == "streams"

    def find_heirs(self, gone: Sequence[Member]) -> tuple[StreamFate, tuple[str, ...]]:
        """Return what becomes of the streams of members that are lost together, and who goes on for them."""
        names = {member.name for member in gone}
        serves = sum(not member.standby for member in gone) < len(self.serving)

        def find_left(members: Sequence[Member]) -> list[str]:
            left = (member.name for member in members if member.name not in names and not (serves and member.standby))
            return list(islice(left, _NAMED))

        worst, heirs = StreamFate.PAUSE, dict[str, None]()
        for group in dict.fromkeys(member.group for member in gone if not member.standby):
            own = find_left(self.by_group[group])
            others = find_left(self._members) if self._changes_bits and not own else []
            fate = StreamFate.PAUSE if own else StreamFate.CHANGE_BITS if others else StreamFate.WAIT
            worst = max(worst, fate, key=list(StreamFate).index)
            heirs |= dict.fromkeys(own or others)
        return worst, tuple(heirs)
