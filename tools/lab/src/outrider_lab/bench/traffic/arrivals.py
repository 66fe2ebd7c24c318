"""When requests arrive in an open loop. Pure: the same seed gives the same times."""

from __future__ import annotations

from typing import Literal

import numpy as np

Arrival = Literal["poisson", "constant"]


def arrival_times_s(count: int, rate: float, arrival: Arrival, burstiness: float, seed: int) -> list[float]:
    """Return `count` arrival times in seconds from the start; the last is at count / rate.

    `poisson` draws the gaps from a gamma distribution of shape `burstiness` and mean 1 / rate. It then scales them so
    that the asked rate is met exactly. `vllm bench serve` does both so. A `burstiness` of 1 is a Poisson process, less
    than 1 more bursty, more than 1 more even (coefficient of variation 1 / sqrt(burstiness)). `constant` has equal
    gaps.
    """
    if arrival == "constant":
        gaps = np.full(count, 1.0)
    else:
        # Gaps of an extreme shape may all be 0 in float64; the floor keeps their sum a divisor.
        gaps = np.maximum(np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, count), 1e-12)
    ends = np.cumsum(gaps)
    return [float(end) for end in ends * (count / rate / ends[-1])]
