"""Which requests met their objectives: counted as they end, and told in metrics and in the admin status."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIStatusError

from orchestrator.cli.status import goodput_line, objectives_line
from orchestrator.daemon.api.admin.routes import create_admin_app
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.api.metrics.goodput_series import ServedRequest, check_objectives
from orchestrator.daemon.api.metrics.request_timing import WINDOW_S
from orchestrator.errors import RequestError
from orchestrator.protocol.rounds import Gauges, SloState
from policies.serving.slo import Objective, Objectives
from tests.api.support import HandClock, ScriptedControl, app_over, client_of
from tests.api.test_metrics import value

BOTH = Objectives(Objective(500.0), Objective(50.0, 90.0))
GOOD = ServedRequest(ttft_ms=400.0, tpot_ms=40.0, latency_ms=900.0)
MS = st.none() | st.floats(0.0, 2000.0)


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (GOOD, {"ttft": True, "tpot": True, "all": True}),
        (GOOD._replace(ttft_ms=501.0), {"ttft": False, "tpot": True, "all": False}),
        (GOOD._replace(tpot_ms=51.0), {"ttft": True, "tpot": False, "all": False}),
        (GOOD._replace(tpot_ms=None), {"ttft": True, "tpot": True, "all": True}),  # one token
        (GOOD._replace(failed=True), {"ttft": False, "tpot": False, "all": False}),
        (ServedRequest(None, None, 300.0), {}),  # it asked for no token
        (GOOD._replace(left=True), {}),
        (ServedRequest(None, None, 900.0, left=True), {"ttft": False, "tpot": True, "all": False}),
    ],
)
def test_what_a_request_met(served, expected):
    assert check_objectives(BOTH, served) == expected


@given(MS, MS, st.booleans(), st.booleans(), st.sampled_from([None, 10.0, 900.0]), st.sampled_from([None, 10.0]))
def test_a_request_meets_all_where_it_misses_none(ttft_ms, tpot_ms, failed, left, ttft, tpot):
    objectives = Objectives(Objective(ttft), Objective(tpot))
    found = check_objectives(objectives, ServedRequest(ttft_ms, tpot_ms, 100.0, failed, left))
    assert set(found) <= {"ttft", "tpot", "all"}
    if found:
        assert found.pop("all") == all(found.values())


def test_goodput_is_requests_that_met_all_objectives_a_second():
    clock = HandClock()
    metrics = Metrics(ScriptedControl(gauges=Gauges(0, 0, 1, 1, 0, 0, 0, 0)), clock, objectives=BOTH)
    for index in range(20):
        clock.now_s += 1.0
        metrics.observe_request(GOOD if index % 2 else GOOD._replace(tpot_ms=80.0), 0)
    text = metrics.render()
    assert value(text, "slo_requests_met_total", objective="all") == 10
    assert value(text, "slo_requests_missed_total", objective="tpot") == 10
    assert value(text, "slo_requests_met_total", objective="ttft") == 20
    assert value(text, "goodput_requests_per_second") == pytest.approx(10 / 19)
    assert value(text, "slo_latency_seconds", objective="tpot") == pytest.approx(0.08)
    assert value(text, "slo_objective_seconds", objective="ttft") == 0.5
    clock.now_s += 2 * WINDOW_S
    text = metrics.render()
    assert value(text, "goodput_requests_per_second") == 0.0
    assert value(text, "slo_latency_seconds", objective="tpot") is None
    view = metrics.slo.view()
    assert view is not None
    assert (view["met"], view["missed"]) == (10, 10)
    assert "TTFT p95 - of 500 ms, TPOT p90 - of 50 ms" in objectives_line(view)
    assert "10 of 20" in goodput_line(view)


def test_levers_are_told_for_each_replica():
    state = SloState(None, 60.0, 1.5, 0.5, 6, ["drafts_give_way", "admission_gives_way"], "because")
    metrics = Metrics(ScriptedControl(gauges=Gauges(0, 0, 1, 1, 0, 0, 0, 0, slo=state)), HandClock(), objectives=BOTH)
    text = metrics.render()
    assert value(text, "slo_lever", lever="drafts_give_way") == 1
    assert value(text, "slo_lever", lever="drafts_gain") == 0
    assert value(text, "slo_row_price") == 1.5
    assert value(text, "slo_prefill_share") == 0.5
    assert value(text, "slo_max_running") == 6


def test_without_objectives_there_are_no_series():
    metrics = Metrics(ScriptedControl(), HandClock())
    metrics.observe_request(GOOD, 0)
    assert metrics.slo.view() is None
    assert b"outrider_slo_requests_met_total{" not in metrics.render()
    assert b"outrider_goodput_requests_per_second{" not in metrics.render()


async def count_request(control: ScriptedControl, **fields: Any) -> dict[str, float | None]:
    """Send one request by the real client; returns what was counted of it."""
    app = app_over(control, objectives=Objectives(Objective(60_000.0), Objective(60_000.0)))
    async with client_of(app) as client:
        with nullcontext() if control.error is None else pytest.raises(APIStatusError):
            await client.completions.create(model="toy", prompt="four", **fields)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        text = (await http.get("/metrics")).text
    return {kind: value(text, f"slo_requests_{kind}_total", objective="all") for kind in ("met", "missed")}


async def test_a_request_counts_once_whatever_its_sequences():
    assert await count_request(ScriptedControl(), n=3) == {"met": 1.0, "missed": 0.0}


async def test_a_failed_request_misses_and_a_refused_one_is_not_judged():
    failed = RequestError("it failed", status=500, code="failed")
    refused = RequestError("full", status=429, code="queue_full", retry_after_s=3)
    assert await count_request(ScriptedControl(error=failed)) == {"met": 0.0, "missed": 1.0}
    assert await count_request(ScriptedControl(error=refused)) == {"met": 0.0, "missed": 0.0}
    away = RequestError("shutting down", status=503, code="interrupted", retry_after_s=10)
    assert await count_request(ScriptedControl(error=away)) == {"met": 0.0, "missed": 0.0}
    assert await count_request(ScriptedControl(error=away, error_at=1)) == {"met": 0.0, "missed": 1.0}


async def test_the_status_has_it():
    metrics = Metrics(ScriptedControl(), HandClock(), objectives=BOTH)
    metrics.observe_request(GOOD, 0)
    target = AdminTarget(ScriptedControl(), slo=metrics.slo.view)
    app = create_admin_app([target], "http://127.0.0.1:8000/v1", "1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        found = (await client.get("/admin/status")).json()["slo"]
    assert found["objectives"]["tpot"] == {"ms": 50.0, "percentile": 90.0, "seen_ms": 40.0}
    assert (found["goodput_per_s"], found["met"], found["missed"]) == (1.0, 1, 0)
