"""What replicas that are unlike do together: how they share the requests, and what comes of it.

**Shares.** A request that has ended is followed by the next one (a closed loop), and routing sends that to the replica
which is predicted to end it first (policies/serving/routing.py). On one that has n requests then, of which s run at
once at most, and whose output is O tokens long:

    end(n) = TTFT(n) + (O - 1) TPOT(n)           n <= s
    end(n) = end(s) n / s                        n > s: (n - s) / s turns are waited for

So one request after the other takes the lowest end that is left, as water fills a vessel from its lowest place. No
request would end sooner elsewhere then: an equilibrium of a congestion game on single resources (Rosenthal 1973,
"A class of games possessing pure-strategy Nash equilibria"). Replicas are told apart by their curves alone, and of
equal ends the one with fewer requests is taken, as routing does.

**Figures.** Each replica is predicted with its own share (policies/planning/throughput.py). The pool's tokens a second
are the sum. TPOT and TTFT are 95th percentiles over requests, and a replica serves as many of these a second as it
makes tokens. Requests that wait count: their time of a token is n / s times as long, and (by Little's law) they wait
(n - s) O / goodput for their first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

from device_profiles.units import MS_PER_S

if TYPE_CHECKING:
    from policies.planning.plan.result import Prediction

TAIL = 0.95
"""The share of requests that a percentile of a pool holds for: what operators of services set objectives by."""
# Of very many requests so many at a time choose together that there are this many choices, or four for each replica.
# Bounds time: a share is exact to 1.6 % then. Not tuned.
_CHOICES = 64


@dataclass(frozen=True, slots=True)
class PoolPrediction:
    """What is predicted of all replicas together: output tokens a second, and what 95 % of requests keep within."""

    goodput_tokens_per_s: float
    tpot_p95_ms: float
    ttft_p95_ms: float

    def tail_ms(self, output_tokens: int) -> float:
        """Return how long a request takes whose first token and whose others both come as late as 95 % of them do."""
        return self.ttft_p95_ms + (output_tokens - 1) * self.tpot_p95_ms


def share_requests(ends: Sequence[Callable[[int], float]], requests: int) -> list[int]:
    """Return how many of so many requests each replica has. `ends`: when one of n requests on it ends (ms)."""
    lot = max(1, requests // max(_CHOICES, 4 * len(ends)))
    shares = [0] * len(ends)
    lowest = [(end(lot), 0, number) for number, end in enumerate(ends)]
    heapify(lowest)
    while requests > 0:
        number = lowest[0][2]
        shares[number] += min(lot, requests)
        requests -= lot
        heapreplace(lowest, (ends[number](shares[number] + lot), shares[number], number))
    return shares


def predict_end_ms(prediction: Prediction, requests: int, output_tokens: int) -> float:
    """Return when a request ends on a replica that has so many with it; `prediction`: as many run as can."""
    alone_ms = prediction.ttft_ms + (output_tokens - 1) * prediction.tpot_ms
    return alone_ms * max(1.0, requests / prediction.sequences)


def take_share(prediction: Prediction, requests: int, output_tokens: int) -> Prediction:
    waiting = max(0, requests - prediction.sequences)
    wait_ms = waiting * output_tokens / prediction.goodput_tokens_per_s * MS_PER_S
    return replace(prediction, requests=requests, wait_ms=wait_ms)


def predict_pool(replicas: Sequence[Prediction]) -> PoolPrediction:
    """Return what is predicted of replicas with their shares; zeros where none has a request."""
    serving = [replica for replica in replicas if replica.requests != 0]
    rates = [replica.goodput_tokens_per_s for replica in serving]
    tpots_ms = [replica.tpot_ms * count_turns(replica) for replica in serving]
    ttfts_ms = [replica.ttft_ms + replica.wait_ms for replica in serving]
    return PoolPrediction(sum(rates), _find_percentile(tpots_ms, rates), _find_percentile(ttfts_ms, rates))


def count_turns(prediction: Prediction) -> float:
    """Return how many requests there are for each that runs; 1 where none waits, or the share is not told."""
    return max(1.0, (prediction.requests or 0) / prediction.sequences)


def _find_percentile(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the lowest value that a share of TAIL of the weight is not above."""
    needed, below = TAIL * sum(weights), 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if below >= needed:
            return value
    return max(values, default=0.0)
