"""What an objective makes of what is predicted: one figure, the merit, of which more is better.

    throughput   output tokens a second
    latency      tokens a second of one stream behind its first token (1 / TPOT). Where fewer sequences run at once than
                 requests are there, each waits for its turn, and the time of a token grows by that factor
    cost         output tokens a second for each currency unit an hour
    energy       output tokens a joule

Between equal merits a second figure decides: with `latency` the shorter time to the first token, with `cost` and
`energy` the higher goodput.

The devices in use cost the sum of their prices, and the price of each of their hosts once. Their power is what they
take under load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from device_profiles.units import MILLION, MS_PER_S, S_PER_HOUR, compute_cost_per_million
from policies.planning.plan import Device, Host, Objective, Prediction

ALIKE = 1e-9
"""Relative: figures closer than this are equal."""
LEAST_BURDEN = 1e-9
"""What a device counts as that costs nothing more, so that the faster one of two such is the better."""


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
        sum(one.price_per_hour for one in own) + sum(hosts[one].price_per_hour for one in used if one not in paid),
        sum(one.power_w for one in own),
        all(is_priced(one, hosts) for one in own),
        all(one.power_w > 0.0 for one in own),
    )


def is_priced(device: Device, hosts: Mapping[str, Host]) -> bool:
    """Return whether it is known what a device costs: by a price of its own, or that of its host."""
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

    def merit(one: Prediction) -> float:
        turns = max(1.0, concurrency / one.sequences)
        return float(compute_merit(objective, one.goodput_tokens_per_s, one.tpot_ms, turns, burden))

    return merit


def fill_in_expense(one: Prediction, expense: Expense) -> Prediction:
    """Return a prediction with its energy and its cost, as far as they are known."""
    goodput = one.goodput_tokens_per_s
    cost = compute_cost_per_million(expense.price_per_hour, goodput) if expense.is_priced else 0.0
    joules = expense.power_w / goodput if expense.is_metered else 0.0
    return replace(one, cost_per_million_tokens=cost, joules_per_token=joules)


def is_better(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether a merit with its second figure is more than another."""
    if abs(one[0] - other[0]) > ALIKE * abs(other[0]):
        return one[0] > other[0]
    return one[1] - other[1] > ALIKE * abs(other[1])


def sum_merits(objective: Objective, replicas: Sequence[Prediction], concurrency: int) -> tuple[float, float]:
    """Return the merit of replicas that share the load, and its second figure; 0 where there is none, or they do not
    tell what they take. A request may be on any of them, so that with `latency` the slowest one counts."""
    goodput = sum(one.goodput_tokens_per_s for one in replicas)
    if not goodput:
        return 0.0, 0.0
    turns = max(1.0, concurrency / sum(one.sequences for one in replicas))
    tpot_ms, ttft_ms = max(one.tpot_ms for one in replicas), max(one.ttft_ms for one in replicas)
    second = float(compute_second_merit(objective, goodput, ttft_ms))
    burden = 1.0
    if objective in (Objective.COST, Objective.ENERGY):
        known = [
            one.cost_per_million_tokens * S_PER_HOUR / MILLION if objective is Objective.COST else one.joules_per_token
            for one in replicas
        ]
        if not all(known):
            return 0.0, second
        burden = sum(taken * one.goodput_tokens_per_s for taken, one in zip(known, replicas, strict=True))
    return float(compute_merit(objective, goodput, tpot_ms, turns, burden)), second


def slow_down(one: Prediction, factor: float) -> Prediction:
    """Return what a prediction comes to where everything takes so many times as long."""
    return replace(
        one,
        goodput_tokens_per_s=one.goodput_tokens_per_s / factor,
        stream_tokens_per_s=one.stream_tokens_per_s / factor,
        tpot_ms=factor * one.tpot_ms,
        ttft_ms=factor * one.ttft_ms,
        cost_per_million_tokens=factor * one.cost_per_million_tokens,
        joules_per_token=factor * one.joules_per_token,
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
