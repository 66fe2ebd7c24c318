"""The running mean that every figure is kept in which is learnt from one observation after another.

It is the exponentially weighted moving average (EWMA; Roberts, "Control Chart Tests Based on Geometric Moving
Averages", Technometrics 1, 1959): older observations count ever less. While there are few it may be their arithmetic
mean, as a step of 1 / n makes it (Sutton and Barto, "Reinforcement Learning", 2nd edition, sections 2.4 and 2.5).
"""

from __future__ import annotations


def update_mean(mean: float, newest: float, weight: float, seen: int | None = None) -> float:
    """Return a running mean after one more observation.

    `weight` (0 to 1) is the newest one's. Where `seen` (>= 0) counts those before, it is at least 1 / (seen + 1): the
    mean is of all while they are few, and the first counts in full.
    """
    if seen is not None:
        weight = max(weight, 1.0 / (seen + 1))
    return mean + weight * (newest - mean)
