"""Which requests met their objectives, what is moved for that, and what devices cost: for metrics and people."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from device_profiles.units import MILLION, MS_PER_S, S_PER_HOUR, compute_cost_per_million
from orchestrator.clock import Clock
from orchestrator.daemon.api.metrics.request_timing import WINDOW_S, Recent
from orchestrator.daemon.api.metrics.series import Engine, Registered, Table
from orchestrator.daemon.api.metrics.tables import SLO, VERDICTS
from orchestrator.daemon.control.port import PlanView, ReplicaView
from policies.serving.slo import Objective, Objectives

_MOST_REQUESTS = 1024  # bounds memory: 34 requests a second fill the window
ALL = "all"


class ServedRequest(NamedTuple):
    """A request as its client had it. `ttft_ms` None: no token came, after `latency_ms`. `tpot_ms` None: there was one
    token at most, and no TPOT to miss. Of several sequences the slowest counts. `failed`: by an error of the server.
    `left`: the client did not wait for the end."""

    ttft_ms: float | None
    tpot_ms: float | None
    latency_ms: float
    failed: bool = False
    left: bool = False


def check_objectives(objectives: Objectives, served: ServedRequest) -> dict[str, bool]:
    """Return whether a request met each objective, and `all`; {} where its client left before that could be told."""
    if not served.failed and served.ttft_ms is None and not served.left:
        return {}  # it asked for no token
    waited_ms = served.latency_ms if served.ttft_ms is None else served.ttft_ms
    verdicts = {}
    if objectives.ttft.ms is not None:
        verdicts["ttft"] = not served.failed and waited_ms <= objectives.ttft.ms
    if objectives.tpot.ms is not None:
        verdicts["tpot"] = not served.failed and (served.tpot_ms or 0.0) <= objectives.tpot.ms
    if served.left and all(verdicts.values()):
        return {}
    return {**verdicts, ALL: all(verdicts.values())}


def _list_objectives(objectives: Objectives) -> dict[str, Objective]:
    named = (("ttft", objectives.ttft), ("tpot", objectives.tpot))
    return {name: objective for name, objective in named if objective.ms is not None}


class SloSeries:
    """No series where there are no objectives."""

    def __init__(self, make: Registered, objectives: Objectives, clock: Clock) -> None:
        self._objectives = objectives
        self._clock = clock
        self._of = _list_objectives(objectives)
        self._served: deque[tuple[float, ServedRequest]] = deque(maxlen=_MOST_REQUESTS)
        self._goods: dict[Engine, Recent] = {}
        self._counts = [0, 0]
        self._verdicts = Table(make, VERDICTS)
        self._state = Table(make, SLO)
        self._budget = make.gauge("slo_error_budget", "Share of requests that may miss it.", "objective")
        self._goodput = make.gauge("goodput_requests_per_second", f"Requests that met all, last {WINDOW_S:g} s.")
        self._wanted = make.gauge("slo_objective_seconds", "The objective.", "objective")
        self._seen = make.gauge("slo_latency_seconds", f"Its percentile, last {WINDOW_S:g} s.", "objective")

    def set_objectives(self, objectives: Objectives) -> None:
        if objectives == self._objectives:
            return
        self._objectives, self._of = objectives, _list_objectives(objectives)
        self._wanted.clear()
        self._seen.clear()

    def observe(self, of: Engine, served: ServedRequest) -> None:
        verdicts = check_objectives(self._objectives, served) if self._of else {}
        self._verdicts.add(of, verdicts)
        if not verdicts:
            return
        now_s = self._clock.monotonic_s()
        self._served.append((now_s, served))
        self._counts[verdicts[ALL]] += 1
        self._goods.setdefault(of, Recent(WINDOW_S)).add(now_s, int(verdicts[ALL]))

    def refresh(self, replicas: Sequence[tuple[Engine, ReplicaView]]) -> None:
        if not self._of:
            return
        now_s = self._clock.monotonic_s()
        self._seen.clear()
        for of, _ in replicas:
            self._verdicts.add(of, dict.fromkeys((*self._of, ALL)))  # a counter that begins above 0 has not grown
            self._goodput.labels(*of).set(self._goods.setdefault(of, Recent(WINDOW_S)).rate(now_s, 0))
        known = {of: replica.gauges.slo for of, replica in replicas if replica.gauges is not None}
        self._state.show({of: slo for of, slo in known.items() if slo is not None}, keep=True)
        for name, objective in self._of.items():
            of = replicas[0][0]
            self._budget.labels(*of, name).set(1.0 - objective.percentile / 100.0)
            self._wanted.labels(*of, name).set((objective.ms or 0.0) / MS_PER_S)
            seen_ms = self._percentile_ms(name, objective, now_s)
            if seen_ms is not None:
                self._seen.labels(*of, name).set(seen_ms / MS_PER_S)

    def view(self) -> dict[str, Any] | None:
        if not self._of:
            return None
        now_s = self._clock.monotonic_s()
        missed, good = self._counts
        return {
            "objectives": {
                name: {
                    "ms": objective.ms,
                    "percentile": objective.percentile,
                    "seen_ms": self._percentile_ms(name, objective, now_s),
                }
                for name, objective in self._of.items()
            },
            "goodput_per_s": sum(recent.rate(now_s, 0) for recent in self._goods.values()),
            "window_s": WINDOW_S,
            "met": good,
            "missed": missed,
        }

    def _percentile_ms(self, name: str, objective: Objective, now_s: float) -> float | None:
        while self._served and now_s - self._served[0][0] > WINDOW_S:
            self._served.popleft()
        figures = [getattr(served, f"{name}_ms") for _, served in self._served]
        known = [ms for ms in figures if ms is not None]
        return float(np.percentile(known, objective.percentile)) if known else None


@dataclass(frozen=True, slots=True)
class HourlyPrice:
    """What this machine costs an hour with its devices; 0 where not known. `currency`: the word for its units."""

    price_per_hour: float = 0.0
    currency: str = "USD"


NO_PRICE = HourlyPrice()


class CostSeries:
    """No series where the price of the devices in use is not known: those of the plan, else this machine."""

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
