"""Speculation depth of one request by a PID controller on its acceptance rate.

    error = rate - set point          (too many accepted: go deeper)
    depth = I + Kp * error - Kd * slope of the rate, within limits;  I grows by Ki * error * dt

It is the textbook positional form with its usual cures (Astrom and Hagglund, "PID Controllers", 1995, chapter 3). The
derivative is of the measurement, not of the error, so that a new set point does not kick, and it is filtered. The
integral stays within the limits of the output, so that it leaves a limit as soon as the error turns (anti-windup). A
change of limits changes nothing but an output that lies outside the new ones (bumpless). The integer depth moves when
the output is clearly nearer to another one, so that it does not flutter between two.

There is no clock: `dt` is given, in usual rounds of evidence (policies/speculation passes judged tokens / 4).
"""

from __future__ import annotations

from typing import NamedTuple


class PidSettings(NamedTuple):
    """`set_point`: the wanted acceptance rate, as a share of the rate that drafts promise. The gains are in tokens of
    depth: per unit of error, per unit of error and dt, per unit of slope. The depth stays from `min_depth` to
    `max_depth` (0: as deep as a request may draft). `filter_dt` is the time constant of the slope's filter, `settle_dt`
    that of a falling rate's: one draft that fails early is no fall. `hold`: how much further than half way the output
    must be before the integer depth follows."""

    # ADR 0043: half of the promise. Kept to 0.85 of it, sure and honest drafts were a tenth slower (ADR 0028).
    set_point: float = 0.5
    # ADR 0043: the controller is worth 0.4 %, 1.3 % at most; gains are keys of `speculation.pid`.
    proportional: float = 1.5
    # ADR 0043: with 2 the depth swings by 1 at most and gains 0.2 %, but recovery takes over ten rounds.
    integral: float = 6.0
    # ADR 0043: 0.0 %, 0.2 % at most. It stays, as a PID controller was asked for.
    derivative: float = 0.25
    # Not tuned apart (ADR 0028).
    filter_dt: float = 2.0
    # Not tuned: it keeps the integer depth from fluttering between two.
    hold: float = 0.25
    # ADR 0039: one draft that fails early is no fall. Not tuned apart.
    settle_dt: float = 1.0
    min_depth: int = 1
    max_depth: int = 0

    def limits(self, most: int) -> DepthLimits:
        """Return the depths allowed to a request that may have `most` drafts."""
        deepest = min(most, self.max_depth or most)
        return DepthLimits(min(self.min_depth, deepest), deepest)


class DepthLimits(NamedTuple):
    """The depths allowed, both ends included. 0 <= least <= most."""

    least: int
    most: int


class PidState(NamedTuple):
    """The controller's state: its integral, the last rate (negative: none yet), the filtered slope, the depth."""

    integral: float
    rate: float = -1.0
    slope: float = 0.0
    depth: int = 0


DEFAULTS = PidSettings()


def start_pid(depth: float, limits: DepthLimits) -> PidState:
    start = min(max(depth, limits.least), limits.most)
    return PidState(start, depth=round(start))


def step_pid(
    state: PidState,
    rate: float,
    dt: float,
    limits: DepthLimits,
    settings: PidSettings = DEFAULTS,
    promised: float = 1.0,
) -> tuple[PidState, int]:
    """Take in an acceptance rate (0 to 1) that was observed over `dt` (> 0), and return the depth from now on.

    `promised`: the rate that the drafts led to expect.
    """
    integral, before, slope, depth = state
    wanted, proportional, growth, derivative, filter_dt, hold, settle_dt, _, _ = settings
    least, most = limits
    if 0.0 <= rate < before:
        rate = before + (rate - before) * dt / (dt + settle_dt)
    error = rate - wanted * promised
    if before >= 0.0:
        slope += ((rate - before) / dt - slope) * dt / (dt + filter_dt)
    integral += growth * error * dt
    integral = least if integral < least else most if integral > most else integral
    output = integral + proportional * error - derivative * slope
    output = least if output < least else most if output > most else output
    depth = least if depth < least else most if depth > most else depth
    if abs(output - depth) > 0.5 + hold or output in limits:
        depth = round(output)
    return PidState(integral, rate, slope, depth), depth
