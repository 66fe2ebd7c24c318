"""When a standby takes the target's place, which one, and when it gives it back.

Ordered actions, as a plain function of what is there: a standby that is loaded takes over at once, another is started
after a while, the next in the list where the one before it cannot serve either. New requests go back to the target at
once, the rest when the target has served for a while: so a target that comes and goes does not move streams each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

OtherBits = Literal["never", "new_requests", "streams"]


class Readiness(StrEnum):
    """Of a standby: loaded, prepared in the store, or neither."""

    HOT = "hot"
    WARM = "warm"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class FailoverRules:
    """`after_s`: how long the target may be away before a standby is started. `back_after_s`: how long it must have
    served again before a standby gives back. `other_bits`: what a replica or a standby may do for streams whose tokens
    are of other bits. `alike`: no replica of other bits serves at all."""

    after_s: float = 2.0
    back_after_s: float = 10.0
    other_bits: OtherBits = "new_requests"
    alike: bool = False


NO_RULES: Final = FailoverRules()


@dataclass(frozen=True, slots=True)
class StandbyState:
    """One standby. `loaded`: it is loaded, or is being loaded. `ready`: it could serve. `active`: it has the target's
    place. `refused`: its part takes nothing, it failed, or its tokens would differ and may not. `lost`: it ended since
    it was loaded."""

    readiness: Readiness
    loaded: bool = False
    ready: bool = False
    active: bool = False
    refused: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class TargetState:
    """All replicas together. `serves`: one takes requests. `hopeless`: none can come back by itself soon: its part
    refuses work, or it has failed for good. `since_s`: for how long it has served, or has not. `began`: one has served
    or was lost before: a target that loads for the first time is not away."""

    serves: bool
    hopeless: bool
    since_s: float
    began: bool


@dataclass(frozen=True, slots=True)
class FailoverSteps:
    """By the standbys' numbers, in this order: load these, let these serve, let these give back. `look_s`: when to look
    again, None where only an event can change anything."""

    begin: tuple[int, ...] = ()
    activate: tuple[int, ...] = ()
    retire: tuple[int, ...] = ()
    look_s: float | None = None


def plan_failover(target: TargetState, standbys: Sequence[StandbyState], rules: FailoverRules) -> FailoverSteps:
    hot = tuple(
        number
        for number, standby in enumerate(standbys)
        if standby.readiness is Readiness.HOT and not standby.loaded and not standby.refused and target.began
    )
    active = tuple(number for number, standby in enumerate(standbys) if standby.active)
    if target.serves:
        if not active:
            return FailoverSteps(begin=hot)
        if target.since_s >= rules.back_after_s:
            return FailoverSteps(begin=hot, retire=active)
        return FailoverSteps(begin=hot, look_s=rules.back_after_s - target.since_s)
    gone = tuple(number for number in active if standbys[number].refused)
    if set(active) - set(gone) or not (target.began or target.hopeless):
        return FailoverSteps(begin=hot, retire=gone)
    ready = next((number for number, standby in enumerate(standbys) if standby.ready and not standby.refused), None)
    if ready is not None:
        return FailoverSteps(begin=hot, activate=(ready,), retire=gone)
    if not target.hopeless and target.since_s < rules.after_s:
        return FailoverSteps(begin=hot, retire=gone, look_s=rules.after_s - target.since_s)
    chosen = next((number for number, standby in enumerate(standbys) if not standby.refused and not standby.lost), None)
    begin = () if chosen is None or standbys[chosen].loaded else (chosen,)
    return FailoverSteps(begin=tuple(dict.fromkeys((*hot, *begin))), retire=gone)
