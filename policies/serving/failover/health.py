"""How healthy a device, a host or a link is: a circuit breaker with hysteresis, fed by failures and by proofs of work.

Failures add to a score that decays by half in HALF_LIFE_S. From SUSPECT_FROM on a part is suspect, and healthy again
only below HEALTHY_BELOW. From OPEN_FROM on its breaker opens: nothing is started there. After a time it is half-open,
and one trial is made. A trial that works closes the breaker, one that fails opens it for twice as long. An operator can
keep work away: a part that drains finishes what it has, and one that is cordoned has nothing left.

M. Nygard, Release It! (2007), "Circuit Breaker".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

from policies.running_mean import update_mean
from policies.serving.failover.blame import LossKind


class Health(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    OPEN = "open"
    HALF_OPEN = "half_open"
    DRAINING = "draining"
    CORDONED = "cordoned"


PartKind = Literal["device", "host", "link", "worker"]
Held = Literal["", "draining", "cordoned"]
"""What an operator may ask of a part; "" lets it work again."""

# ADR 0053: two losses of a device within a minute open it, within five they do not. Not tuned.
HALF_LIFE_S: Final = 60.0
# ADR 0053: one hang or two crashes, by the weights below.
SUSPECT_FROM: Final = 1.0
# ADR 0053: two half-lives after one hang, so that it does not swing.
HEALTHY_BELOW: Final = 0.25
# ADR 0053: a memory error, or two losses of the device within a minute.
OPEN_FROM: Final = 3.0
UNPROVEN_AT_MOST: Final = 2.0
"""The score that failures come to of which none is proof. ADR 0053: with more, a chaos run opened the processor, and
restarts waited for 9 to 19 s."""
# ADR 0053: a device that fails at once is tried after 10, 20, 40 s. Not tuned.
FIRST_OPEN_S: Final = 10.0
# ADR 0053: ten minutes, which costs a load each. Not tuned.
LONGEST_OPEN_S: Final = 600.0
SUSPECT_HEALTH: Final = 0.5
"""The share of its health that a suspect part, or one that slows itself down, has in scores of plans (ADR 0053). Not
tuned: it only decides between plans of equal merit."""
# ADR 0053, as below.
FIRST_HOST_OPEN_S: Final = 1.0
HOST_OPEN_S: Final = 5.0
"""The first time, and the longest, that a host or a link stays open: to look whether it is back costs little. ADR
0053."""
DEVICE_WEIGHT: Final[dict[str, float]] = {
    "out_of_memory": 0.0,
    "model_replaced": 0.0,
    "device_lost": 2.0,
    "ecc": 3.0,
    "thermal": 3.0,
}
"""Of a failure that the device itself reports. Memory runs out where too much is asked of a device that works, and a
model's files are no part of it."""
LOSS_WEIGHT: Final[dict[LossKind, float]] = {
    "crashed": 0.5,
    "hung": 1.0,
    "memory": 0.0,
    "killed": 0.0,
    "device": 2.0,
    "host": 0.0,
}
"""Of a worker's death for its device."""
PROVES: Final[frozenset[LossKind]] = frozenset({"device", "host"})
"""Only these open a breaker. A crash or a hang may be a request's or the program's: it makes a device suspect at
most."""

# ADR 0053. Beside one other program a round takes twice as long, so less is no outlier.
SLOW_FROM: Final = 3.0
# ADR 0053: half of that, against swinging.
SLOW_UNTIL: Final = 1.5
# ADR 0053: 50 rounds, about a second: a burst of another program passes by.
_NEWEST_ROUND: Final = 0.02
# One stalled round moves the mean by 0.4 at most, so that six in a row are needed.
_RATIO_AT_MOST: Final = 20.0
_SURELY_S: Final = 1e-3  # more than rounding makes of a time
_LOST_MS: Final = 5.0
"""What any round may lose to other things: a round of 1 ms that takes 4 tells nothing of its device. Not tuned."""

REFUSES: Final = frozenset({Health.OPEN, Health.DRAINING, Health.CORDONED})
"""In these states a part takes nothing new."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """One part. `score` stood at `at_s`. `opened`: how often it has opened since a trial worked; it is open until
    `until_s`. `held`: what the operator asked for, DRAINING or CORDONED; None otherwise. `first_s` and
    `longest_s`: that it is open at a time. `why`: the last failure."""

    score: float = 0.0
    at_s: float = 0.0
    suspect: bool = False
    opened: int = 0
    until_s: float = 0.0
    held: Health | None = None
    first_s: float = FIRST_OPEN_S
    longest_s: float = LONGEST_OPEN_S
    why: str = ""

    def weigh(self, now_s: float) -> float:
        return float(self.score * 0.5 ** (max(0.0, now_s - self.at_s) / HALF_LIFE_S))

    def judge(self, now_s: float) -> Health:
        if self.held is not None:
            return self.held
        if self.opened:
            return Health.OPEN if now_s < self.until_s else Health.HALF_OPEN
        return Health.SUSPECT if self.suspect and self.weigh(now_s) >= HEALTHY_BELOW else Health.HEALTHY

    def find_end(self, now_s: float) -> float:
        """Return until when the state is surely what it is now, if nothing happens."""
        match self.judge(now_s):
            case Health.OPEN:
                return self.until_s
            case Health.SUSPECT:
                half_lives = math.log2(self.score / HEALTHY_BELOW)
                return self.at_s + HALF_LIFE_S * half_lives - _SURELY_S
            case _:
                return math.inf

    def observe_failure(self, weight: float, why: str, now_s: float, *, proves: bool = True) -> Breaker:
        """Return the part with one failure more. What fails in a trial, or where much failed of late, opens, but for a
        failure that `proves` nothing."""
        if weight <= 0.0:
            return self
        state = self.judge(now_s)
        before = self.weigh(now_s)
        if not proves:
            score = max(before, min(before + weight, UNPROVEN_AT_MOST))
            suspect = score >= SUSPECT_FROM or (self.suspect and before >= HEALTHY_BELOW)
            return replace(self, score=score, at_s=now_s, suspect=suspect, why=why if not self.opened else self.why)
        score = before + weight
        known = replace(self, score=score, at_s=now_s, why=why)
        if state is Health.OPEN:  # it is known already; workers that die together are one failure
            return known
        if self.opened or score >= OPEN_FROM:
            opened = self.opened + 1
            open_s = min(self.longest_s, self.first_s * 2.0 ** min(opened - 1, 20))
            return replace(known, suspect=True, opened=opened, until_s=now_s + open_s)
        still = self.suspect and self.weigh(now_s) >= HEALTHY_BELOW
        return replace(known, suspect=still or score >= SUSPECT_FROM)

    def observe_success(self, now_s: float) -> Breaker:
        """Return the part after a trial that worked: suspect for a while. Nothing changes where none is under way."""
        if not self.opened or now_s < self.until_s:
            return self
        return replace(self, score=SUSPECT_FROM, at_s=now_s, suspect=True, opened=0)

    def hold(self, state: Health | None) -> Breaker:
        """Return the part as the operator wants it: DRAINING, CORDONED, or None to judge it again."""
        return replace(self, held=state)

    def wait_s(self, now_s: float) -> float:
        """Return after how long something may be started there; 0 where it may at once."""
        return max(0.0, self.until_s - now_s) if self.opened else 0.0


@dataclass(frozen=True, slots=True)
class Slowness:
    """Rounds of one worker beside the cost model: `ratio` of measured to predicted time, a moving mean. A worker is an
    outlier from SLOW_FROM on, and no more below SLOW_UNTIL."""

    ratio: float = 1.0
    outlier: bool = False

    def observe(self, expected_ms: float, round_ms: float) -> Slowness:
        """Return it with one round more; one without a prediction says nothing."""
        if expected_ms <= 0.0:
            return self
        newest = min(_RATIO_AT_MOST, round_ms / (expected_ms + _LOST_MS))
        ratio = update_mean(self.ratio, newest, _NEWEST_ROUND)
        return Slowness(ratio, ratio >= (SLOW_UNTIL if self.outlier else SLOW_FROM))
