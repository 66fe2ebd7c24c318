"""What tokens cost: by the price of the devices in use, in metrics and in the line of `outrider status`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from orchestrator.cli.status import cost_line
from orchestrator.cli.status_lines import plan_line
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.api.metrics.goodput_series import HourlyPrice
from orchestrator.daemon.api.metrics.request_timing import WINDOW_S
from orchestrator.daemon.control.port import PlanView, StateView
from orchestrator.protocol.rounds import Delta, RoundReport
from tests.api.support import HandClock, ScriptedControl
from tests.api.test_metrics import value

PRICE = HourlyPrice(3.6, "EUR")  # 0.001 a second
PLAN = PlanView(
    100.0, 0.0, 1.0, 0, 0, 0, "", currency="EUR", predicted_cost_per_million_tokens=10.0, price_per_hour=7.2
)


@dataclass
class PlannedControl(ScriptedControl):
    """Control that runs a plan."""

    plan: PlanView | None = None

    def view(self) -> StateView:
        return replace(super().view(), plan=self.plan)


def rounds(metrics: Metrics, clock: HandClock, count: int, tokens: int) -> None:
    """Rounds of so many tokens, one a second."""
    for _ in range(count):
        clock.now_s += 1.0
        metrics.observe_round(RoundReport([Delta("r", [1] * tokens, "", None)], 1, 1, 0, 0, 0, [], 1.0, 1.0, 0.0))


def test_a_million_tokens_cost_what_the_devices_cost_while_they_came():
    clock = HandClock()
    metrics = Metrics(ScriptedControl(), clock, price=PRICE)
    rounds(metrics, clock, int(WINDOW_S), 10)
    text = metrics.render()
    seen = value(text, "cost_per_million_tokens", currency="EUR")
    assert seen == pytest.approx(0.001 / 10 * 1e6, rel=0.1)
    assert value(text, "price_per_hour", currency="EUR") == 3.6
    assert value(text, "spent_total", currency="EUR") == pytest.approx(0.001 * WINDOW_S)
    costs = metrics.view_costs()
    assert costs is not None
    assert costs["cost_per_million_tokens"] == pytest.approx(seen)
    assert "3.6 EUR an hour" in cost_line(costs)
    clock.now_s += 10 * WINDOW_S
    text = metrics.render()
    assert value(text, "cost_per_million_tokens", currency="EUR") is None, "nothing came out"
    idle = metrics.view_costs()
    assert idle is not None
    assert idle["cost_per_million_tokens"] is None
    assert idle["cost_per_million_tokens_since_start"] == pytest.approx(11 * WINDOW_S * 0.001 / (WINDOW_S * 10) * 1e6)
    assert value(text, "spent_total", currency="EUR") == pytest.approx(11 * WINDOW_S * 0.001)
    assert "no tokens in the last 30 s" in cost_line(idle)


def test_without_a_price_nothing_is_told():
    clock = HandClock()
    metrics = Metrics(ScriptedControl(), clock)
    rounds(metrics, clock, 3, 10)
    text = metrics.render().decode()
    assert metrics.view_costs() is None
    told = [line for line in text.splitlines() if not line.startswith("#")]
    assert not [line for line in told if "cost" in line or "price" in line.replace("row_price", "") or "spent" in line]


def test_a_plan_knows_which_devices_are_in_use_and_another_plan_has_another_price():
    clock = HandClock()
    control = PlannedControl(plan=PLAN)
    metrics = Metrics(control, clock, price=PRICE)
    rounds(metrics, clock, 1, 10)
    before = metrics.view_costs()
    rounds(metrics, clock, 10, 10)
    text = metrics.render()
    after = metrics.view_costs()
    assert before is not None
    assert after is not None
    assert after["price_per_hour"] == 7.2
    assert after["spent"] - before["spent"] == pytest.approx(10 * 0.002)
    assert value(text, "plan_predicted_cost_per_million_tokens", currency="EUR") == 10.0
    assert value(text, "plan_predicted_joules_per_token") is None
    assert "best for throughput; 100.0 tokens/s predicted, 10 EUR a million tokens" in plan_line(
        {**{name: getattr(PLAN, name) for name in PLAN.__slots__}}
    )
    control.plan = replace(PLAN, price_per_hour=0.0, predicted_cost_per_million_tokens=0.0)
    rounds(metrics, clock, 1, 10)
    text = metrics.render()
    assert value(text, "price_per_hour", currency="EUR") is None
    assert value(text, "cost_per_million_tokens", currency="EUR") is None
    assert value(text, "plan_predicted_cost_per_million_tokens", currency="EUR") is None
    assert metrics.view_costs() is None
