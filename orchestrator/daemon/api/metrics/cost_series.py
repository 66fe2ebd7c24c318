"""What the devices in use cost, and what came out for it, as metrics and for `outrider status`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from device_profiles.units import MILLION, S_PER_HOUR, compute_cost_per_million
from orchestrator.clock import Clock
from orchestrator.daemon.api.metrics.request_timing import Recent
from orchestrator.daemon.api.metrics.series import Engine, Registered
from orchestrator.daemon.control.port import PlanView

WINDOW_S = 30.0
"""The time that `cost_per_million_tokens` looks back."""


@dataclass(frozen=True, slots=True)
class HourlyPrice:
    """What this machine costs an hour with its devices; 0 where not known. `currency`: the word for its units."""

    price_per_hour: float = 0.0
    currency: str = "USD"


NO_PRICE = HourlyPrice()


class CostSeries:
    """No series where the price of the devices in use is not known. A plan knows which these are; without one it is
    this machine."""

    def __init__(self, make: Registered, machine: HourlyPrice, clock: Clock) -> None:
        self._machine = machine
        self._clock = clock
        self._price = machine.price_per_hour
        self._since_s = clock.monotonic_s()
        self._spent = 0.0
        self._counted = 0.0
        self._tokens = 0
        self._recent = Recent(WINDOW_S)
        self._price_gauge = make.gauge("price_per_hour", "Price of the devices in use, an hour.", "currency")
        self._spent_counter = make.counter("spent", "What the devices in use have cost.", "currency")
        self._cost = make.gauge(
            "cost_per_million_tokens", f"Cost of a million generated tokens, last {WINDOW_S:g} s.", "currency"
        )

    def observe(self, tokens: int, plan: PlanView | None) -> None:
        """So many tokens were generated."""
        self._settle(plan)
        self._tokens += tokens
        self._recent.add(self._clock.monotonic_s(), tokens)

    def refresh(self, of: Engine, plan: PlanView | None) -> None:
        self._settle(plan)
        self._cost.clear()
        self._price_gauge.clear()
        currency = self._machine.currency
        if self._spent > self._counted:
            self._spent_counter.labels(*of, currency).inc(self._spent - self._counted)
            self._counted = self._spent
        if not self._price:
            return
        self._price_gauge.labels(*of, currency).set(self._price)
        cost = self._recent_cost()
        if cost is not None:
            self._cost.labels(*of, currency).set(cost)

    def view(self, plan: PlanView | None) -> dict[str, Any] | None:
        """Return it for people; None where no price is known."""
        self._settle(plan)
        if not self._price:
            return None
        return {
            "currency": self._machine.currency,
            "price_per_hour": self._price,
            "window_s": WINDOW_S,
            "cost_per_million_tokens": self._recent_cost(),
            "spent": self._spent,
            "cost_per_million_tokens_since_start": self._spent / self._tokens * MILLION if self._tokens else None,
        }

    def _settle(self, plan: PlanView | None) -> None:
        """Count what was spent up to now, at the price so far."""
        now_s = self._clock.monotonic_s()
        self._spent += self._price / S_PER_HOUR * (now_s - self._since_s)
        self._since_s = now_s
        self._price = self._machine.price_per_hour if plan is None else plan.price_per_hour

    def _recent_cost(self) -> float | None:
        rate = self._recent.rate(self._clock.monotonic_s(), 0)
        return compute_cost_per_million(self._price, rate) if rate else None
