"""The section `failover`: what takes the target's place when no replica of it can serve."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.config.section import Section
from orchestrator.config.target import OwnTarget
from policies.serving.failover.standby import OtherBits


class StandbyTarget(OwnTarget):
    """The same model in another way or place. What is not set is as in `model`, `devices` and `limits`."""

    readiness: Literal["hot", "warm", "cold"] = "warm"
    """`hot`: loaded beside the target. `warm`: its model is prepared in the store beforehand, and loaded when it is
    needed. `cold`: nothing is done beforehand."""


class FailoverSection(Section):
    """What happens when no replica of the target can serve."""

    standby: tuple[StandbyTarget, ...] = Field(default=(), max_length=8, strict=False)
    """Tried in this order. Empty: the plan's standby, where `placement.standby` and a plan name one."""
    after_s: float = Field(default=2.0, ge=0, le=3600)
    """How long the target may be lost before a standby that is not `hot` is started. One that is `hot` takes over at
    once, and nothing is waited for where the target's device refuses work."""
    back_after_s: float = Field(default=10.0, ge=0, le=3600)
    """How long the target must have served again before the standby gives its requests back. New requests go to the
    target at once."""
    other_bits: Literal["auto", "never", "new_requests", "streams"] = "auto"
    """What a replica or a standby may do for answers whose tokens so far have other bits than its own.
    `never`: nothing, and a standby of other bits serves nothing at all. `new_requests`: answers that have no token yet.
    `streams`: also those that have, where no replica with their bits serves or comes back within `after_s`. These may
    then end in another way. Answers say so: `system_fingerprint`, `usage`, and the header `X-Outrider-Standby`.
    `auto`: `streams` where items of `model.replicas` differ in how they compute, else `new_requests`."""

    def choose_other_bits(self, *, unlike: bool) -> OtherBits:
        """Return what may be done for answers of other bits. `unlike`: the operator wrote replicas that differ."""
        if self.other_bits == "auto":
            return "streams" if unlike else "new_requests"
        return self.other_bits
