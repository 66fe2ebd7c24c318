"""Whether rounds take what the plan predicted, and whether another plan is worth a move.

A round's ratio is measured / predicted time, for the rows and sequences that it had. The running mean is of its
logarithm, so that twice as slow and twice as fast weigh alike. A single stall does not count for more than a factor of
ten. A drift is a mean beyond the tolerance for PATIENCE rounds on end. It passes where something else ran for a while;
one that lasts tells that the profile does not hold any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from device_profiles.units import MS_PER_S
from policies.running_mean import update_mean

PATIENCE = 48
"""Rounds that the mean must be beyond the tolerance before it counts. ADR 0034: half a second of decoding, so that
another program's burst passes by. Not tuned."""
LEAST_GAIN = 0.1
"""The least predicted gain for which workers are replaced: that costs a load, and a prefill of every stream. ADR 0026.
The same machine was 13 % slower and more in the next minute (ADR 0033), so less is noise."""
# ADR 0026: doubled each time, so that plans do not swing. Not tuned.
FIRST_PAUSE_S = 30.0
# ADR 0026: an hour. Not tuned.
LONGEST_PAUSE_S = 3600.0
# Weight of the newest round in the running mean. ADR 0033: times of rounds vary by 17 to 21 %, so a mean of some 30 has
# an error of 4 %.
_NEWEST = 0.06
# One stalled round counts as ten times the prediction at most (ADR 0026).
_MOST = math.log(10.0)


@dataclass(frozen=True, slots=True)
class Drift:
    """`log_ratio`: running mean of log(measured / predicted). `rounds` that it is made of; `off`: the last of them, on
    end, in which it was beyond the tolerance, and `off_ms`, what these took."""

    log_ratio: float = 0.0
    rounds: int = 0
    off: int = 0
    off_ms: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured time over predicted time: 2 is twice as slow as predicted."""
        return math.exp(self.log_ratio)


def observe_drift(drift: Drift, predicted_ms: float, measured_ms: float, tolerance: float) -> Drift:
    """Take in one round. Times that are not positive say nothing."""
    if predicted_ms <= 0.0 or measured_ms <= 0.0:
        return drift
    now = max(-_MOST, min(_MOST, math.log(measured_ms / predicted_ms)))
    mean = update_mean(drift.log_ratio, now, _NEWEST, drift.rounds)
    beyond = abs(mean) > math.log1p(tolerance)
    if not beyond:
        return Drift(mean, drift.rounds + 1)
    return Drift(mean, drift.rounds + 1, drift.off + 1, drift.off_ms + measured_ms)


def has_drifted(drift: Drift) -> bool:
    return drift.off >= PATIENCE


def lasts(drift: Drift, after_s: float) -> bool:
    """Return whether they have parted for so long, in time of rounds, that the profile is to be measured again."""
    return has_drifted(drift) and drift.off_ms >= after_s * MS_PER_S


def worth_moving(current: float, proposed: float) -> bool:
    """Return whether workers should be replaced for a plan that is predicted to reach so much of what the objective
    counts (tokens a second, or such for the cost or the energy), where the running one is now known to reach `current`.
    """
    return proposed > (1.0 + LEAST_GAIN) * current


def pause_s(plans: int, first_s: float = FIRST_PAUSE_S) -> float:
    """Return how long to keep a plan before it may be made anew, after so many were made already.

    The time is `first_s`, and each time twice as long, so that two plans do not alternate. It is never longer than
    LONGEST_PAUSE_S.
    """
    return float(min(LONGEST_PAUSE_S, first_s * 2.0 ** min(plans - 1, 32))) if plans else 0.0


def count_recent(plans: int, stood_s: float, first_s: float = FIRST_PAUSE_S) -> int:
    """Return how many of so many plans still count for the next pause, where the newest has stood for `stood_s`.

    A plan that stands for twice its pause is not one of those that alternate: the newest no longer counts, and the next
    one is judged by what is left of the time.
    """
    while plans and stood_s >= 2.0 * pause_s(plans, first_s):
        stood_s -= 2.0 * pause_s(plans, first_s)
        plans -= 1
    return plans
