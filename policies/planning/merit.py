"""What an objective makes of what is predicted: one figure, the merit, of which more is better.

    throughput   output tokens a second
    latency      tokens a second of one stream behind its first token (1 / TPOT). Where fewer sequences run at once than
                 requests are there, each waits for its turn, and the time of a token grows by that factor. Of several
                 replicas it is what 95 % of requests have at least
    cost         output tokens a second for each currency unit an hour
    energy       output tokens a joule

Between equal merits a second figure decides: with `latency` the shorter time to the first token, with `cost` and
`energy` the higher goodput.

Several replicas are judged as the pool that they are (policies/planning/pool.py).

The devices in use cost the sum of their prices, and the price of each of their hosts once. Their power is what they
take under load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from device_profiles.units import MILLION, MS_PER_S, S_PER_HOUR, compute_cost_per_million
from policies.planning.plan import Device, Host, Objective, Prediction
from policies.planning.pool import PoolPrediction, predict_pool

ALIKE = 1e-9
"""Relative: figures closer than this are equal. Bounded by rounding alone: devices of one profile tie exactly (ADR
0025)."""
LEAST_BURDEN = 1e-9
"""What a device counts as that costs nothing more, so that the faster one of two such is the better. Any value far
below a price or a power does (ADR 0055)."""


@dataclass(frozen=True, slots=True)
class Expense:
    """What some devices take together. `is_priced` and `is_metered`: whether price and power of all are known."""

    price_per_hour: float
    power_w: float
    is_priced: bool = True
    is_metered: bool = True

    def burden(self, objective: Objective) -> float:
        """Return what an objective weighs against tokens: a price, a power, or nothing (1)."""
        if objective is Objective.COST:
            return max(LEAST_BURDEN, self.price_per_hour)
        return max(LEAST_BURDEN, self.power_w) if objective is Objective.ENERGY else 1.0


def sum_expense(devices: Iterable[Device], hosts: Mapping[str, Host], paid: Collection[str] = ()) -> Expense:
    """Return what devices take together, each counted once. `paid`: hosts whose price is paid already."""
    own = {device.id: device for device in devices}.values()
    used = dict.fromkeys(device.host for device in own)
    return Expense(
        sum(device.price_per_hour for device in own)
        + sum(hosts[host].price_per_hour for host in used if host not in paid),
        sum(device.power_w for device in own),
        all(is_priced(device, hosts) for device in own),
        all(device.power_w > 0.0 for device in own),
    )


def is_priced(device: Device, hosts: Mapping[str, Host]) -> bool:
    return device.price_per_hour > 0.0 or hosts[device.host].price_per_hour > 0.0


def tells_burden(device: Device, hosts: Mapping[str, Host], objective: Objective) -> bool:
    """Return whether what an objective weighs against tokens is known of a device."""
    if objective is Objective.COST:
        return is_priced(device, hosts)
    return objective is not Objective.ENERGY or device.power_w > 0.0


def compute_merit(objective: Objective, goodput: Any, tpot_ms: Any, turns: Any, burden: Any) -> Any:
    """Return the merit, of floats or of arrays. `turns`: requests at once by places for them, at least 1; `burden`: a
    price with `cost`, a power with `energy`."""
    if objective is Objective.LATENCY:
        return MS_PER_S / (tpot_ms * turns)
    return goodput if objective is Objective.THROUGHPUT else goodput / burden


def compute_second_merit(objective: Objective, goodput: Any, ttft_ms: Any) -> Any:
    """Return what decides between equal merits, of floats or of arrays: more is better."""
    if objective is Objective.LATENCY:
        return -ttft_ms
    return 0.0 * goodput if objective is Objective.THROUGHPUT else goodput


def merit_of(objective: Objective, concurrency: int, expense: Expense) -> Callable[[Prediction], float]:
    """Return what gives the merit of predictions on such devices, where so many requests are there at once."""
    burden = expense.burden(objective)

    def merit(prediction: Prediction) -> float:
        turns = max(1.0, concurrency / prediction.sequences)
        return float(compute_merit(objective, prediction.goodput_tokens_per_s, prediction.tpot_ms, turns, burden))

    return merit


def fill_in_expense(prediction: Prediction, expense: Expense) -> Prediction:
    """Return a prediction with its energy and its cost, as far as they are known."""
    goodput = prediction.goodput_tokens_per_s
    cost = compute_cost_per_million(expense.price_per_hour, goodput) if expense.is_priced else 0.0
    joules = expense.power_w / goodput if expense.is_metered else 0.0
    return replace(prediction, cost_per_million_tokens=cost, joules_per_token=joules)


def is_better(first: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether a merit with its second figure is more than another."""
    if abs(first[0] - other[0]) > ALIKE * abs(other[0]):
        return first[0] > other[0]
    return first[1] - other[1] > ALIKE * abs(other[1])


def sum_merits(objective: Objective, replicas: Sequence[Prediction]) -> tuple[float, float]:
    """Return the merit of replicas with their shares of the load, and its second figure; 0 where there is none, or they
    do not tell what they take."""
    pool = predict_pool(replicas)
    if not pool.goodput_tokens_per_s:
        return 0.0, 0.0
    burden = 1.0
    if objective in (Objective.COST, Objective.ENERGY):
        known = [
            replica.cost_per_million_tokens * S_PER_HOUR / MILLION
            if objective is Objective.COST
            else replica.joules_per_token
            for replica in replicas
        ]
        if not all(known):
            return 0.0, float(compute_second_merit(objective, pool.goodput_tokens_per_s, pool.ttft_p95_ms))
        burden = sum(taken * replica.goodput_tokens_per_s for taken, replica in zip(known, replicas, strict=True))
    return weigh_pool(objective, pool, burden)


def weigh_pool(objective: Objective, pool: PoolPrediction, burden: float = 1.0) -> tuple[float, float]:
    """Return the merit of a pool on devices of this burden, and its second figure."""
    goodput = pool.goodput_tokens_per_s
    return (
        float(compute_merit(objective, goodput, pool.tpot_p95_ms, 1.0, burden)),
        float(compute_second_merit(objective, goodput, pool.ttft_p95_ms)),
    )


def slow_down(prediction: Prediction, factor: float) -> Prediction:
    """Return what a prediction comes to where everything takes so many times as long."""
    return replace(
        prediction,
        goodput_tokens_per_s=prediction.goodput_tokens_per_s / factor,
        stream_tokens_per_s=prediction.stream_tokens_per_s / factor,
        tpot_ms=factor * prediction.tpot_ms,
        ttft_ms=factor * prediction.ttft_ms,
        wait_ms=factor * prediction.wait_ms,
        cost_per_million_tokens=factor * prediction.cost_per_million_tokens,
        joules_per_token=factor * prediction.joules_per_token,
    )


def describe_merit(objective: Objective, merit: float, currency: str) -> str:
    """Return a merit as people count it: "93.1 tokens/s", "12.30 ms a token", "0.42 USD a million tokens"."""
    if objective is Objective.THROUGHPUT:
        return f"{merit:.1f} tokens/s"
    if not merit:
        return "nothing"
    if objective is Objective.LATENCY:
        return f"{MS_PER_S / merit:.2f} ms a token"
    if objective is Objective.COST:
        return f"{compute_cost_per_million(1.0, merit):.3g} {currency} a million tokens"
    return f"{1.0 / merit:.3g} J a token"


def describe_loss(objective: Objective, merit: float, best: float) -> str:
    """Return by how much a merit is worse than the best one: "12.0% less", "3.1% more" (time, money or energy)."""
    if objective is Objective.THROUGHPUT:
        return f"{1.0 - merit / best:.1%} less"
    return f"{best / merit - 1.0:.1%} more"
