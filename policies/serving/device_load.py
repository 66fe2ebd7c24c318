"""By how much longer work takes on a device that other programs use too, or that is hot.

A share of a device's time that others take stretches what is left: half of it makes rounds twice as long. While our
workers rest, others may take all of it, and a fair scheduler would still give us a part: one of n + 1 beside n threads
that want a core. Where these are not counted, one is assumed, and nothing below half is believed before our own work
was seen to get no more.

What is small, or was so a moment ago, counts for nothing: a load counts from COUNTS_FROM on, until it is below
GONE_BELOW. So two replicas that are equal stay equal, and requests do not swing between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from device_profiles.device_load import COUNTS_FROM, CoreLoad, DeviceLoad
from policies.running_mean import update_mean

# ADR 0057: half of what counts, so that a load at the border does not swing. Not tuned.
GONE_BELOW: Final = 0.08
# ADR 0057: beside one other thread that wants the core. A fair scheduler bounds it.
FAIR_SHARE: Final = 0.5
LEAST_SHARE: Final = 0.1  # not tuned: it keeps a stretch below 10
HOT_STRETCH: Final = 1.25
"""A device at its limit of temperature or power is taken to be so many times as slow. ADR 0057. Not measured."""
# Of what others leave: then it is all that our work can get. ADR 0057.
_TAKES_ALL: Final = 0.8
# Degrees below the limit until a device counts as cool, so that it does not swing. Not tuned.
_COOL_C: Final = 5.0
# Shares of the limit. Not tuned: two values apart keep it from swinging (ADR 0057).
_AT_POWER_LIMIT, _BELOW_POWER_LIMIT = 0.98, 0.9
# Free memory, as a share, below which the score falls. Not tuned: it decides between equals.
_SCARCE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Stretch:
    """How many times as long work takes, and why ("": as long as alone)."""

    factor: float = 1.0
    why: str = ""


ALONE: Final = Stretch()


def counts(others: float, *, counted: bool) -> bool:
    """Return whether a load by other programs counts, which it did so far or not."""
    return others >= (GONE_BELOW if counted else COUNTS_FROM)


def find_usable_share(share: CoreLoad) -> float:
    left = 1.0 - min(max(share.others, 0.0), 1.0)
    seen = share.ours >= max(_TAKES_ALL * left, LEAST_SHARE)
    fair = FAIR_SHARE if share.rivals is None else min(FAIR_SHARE, 1.0 / (1.0 + max(share.rivals, 0.0)))
    return max(left, LEAST_SHARE, 0.0 if seen else fair)


def predict_stretch(share: CoreLoad | None, hot: str = "") -> Stretch:
    """Return what a load that counts makes of work, and what heat does. `share` None: no load counts."""
    usable = find_usable_share(share) if share is not None else 1.0
    why = [f"other programs take {share.others:.0%}"] if share is not None else []
    factor = (HOT_STRETCH if hot else 1.0) / usable
    return Stretch(factor, ", ".join([*why, *([hot] if hot else [])])) if factor > 1.0 else ALONE


def describe_heat(load: DeviceLoad, *, hot: bool) -> str:
    """Return why a device makes itself slower, "" where it does not. `hot`: it did so far."""
    heat, limit_c = load.temperature_c, load.temperature_limit_c
    if heat is not None and limit_c and heat >= limit_c - (_COOL_C if hot else 0.0):
        return f"{heat:.0f} of {limit_c:.0f} °C"
    power, limit_w = load.power_w, load.power_limit_w
    if power is not None and limit_w and power >= (_BELOW_POWER_LIMIT if hot else _AT_POWER_LIMIT) * limit_w:
        return f"{power:.0f} of {limit_w:.0f} W"
    return f"its clocks are lowered: {load.slowed_by}" if load.slowed_by else ""


def weigh_shortage(free_share: float) -> float:
    """Return how near a device is to having no memory left: 0 (enough) to 1 (none)."""
    return min(1.0, max(0.0, (_SCARCE - free_share) / _SCARCE))


def smooth_load(before: DeviceLoad | None, now: DeviceLoad, smoothing: float) -> DeviceLoad:
    """Return the moving mean of what swings: shares of time, queue and power. `smoothing` is the newest sample's weight
    where it comes a second after the last one; one that comes later weighs more."""
    if before is None:
        return now
    weight = 1.0 - (1.0 - smoothing) ** max(0.0, now.sampled_s - before.sampled_s)
    cores = {
        core: CoreLoad(
            update_mean(was.ours, load.ours, weight),
            update_mean(was.others, load.others, weight),
            _mix_known(was.rivals, load.rivals, weight),
        )
        for core, load in now.cores.items()
        if (was := before.cores.get(core, load)) is not None
    }
    return replace(
        now,
        utilisation=_mix_known(before.utilisation, now.utilisation, weight),
        others=_mix_known(before.others, now.others, weight),
        rivals=_mix_known(before.rivals, now.rivals, weight),
        cores=cores,
        power_w=_mix_known(before.power_w, now.power_w, weight),
        queue_depth=update_mean(before.queue_depth, now.queue_depth, weight),
    )


def _mix_known(before: float | None, now: float | None, weight: float) -> float | None:
    return now if before is None or now is None else update_mean(before, now, weight)
