"""Writes docs/grafana/outrider.json, a dashboard of Grafana, from the metrics that Outrider has."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard, DataSourceRef
from prometheus_client import Metric

from orchestrator.clock import SystemClock
from orchestrator.daemon.alerts.table import RECORDS
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.control.port import Control, StateView
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta
from policies.serving.overrides import EffectiveBound

FILE = Path(__file__).parents[1] / "docs" / "grafana" / "outrider.json"
_ROWS = (
    (
        "Speculation",
        ("spec_decode_", "acceptance_", "draft", "verifier_", "speculation_", "low_acceptance", "tolerance_"),
    ),
    ("Requests", ("request_", "time_to_", "inter_token", "e2e_")),
    ("Objectives", ("slo_", "goodput_")),
    ("Health", ("part_", "standby", "worker_", "quarantined", "class_", "effective_", "not_finite", "out_of_memory")),
    ("Plan, replicas and cost", ("plan_", "replicas_", "model_", "price", "spent", "cost_")),
    ("Canary", ("arm_", "canary_")),
    ("Devices and memory", ("device_", "planned_memory", "peak_memory", "kv_move")),
    ("Intake", ("api_", "batch", "journal_")),
    ("Load", ("",)),
)
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


class _NothingRuns(Control):
    """A control whose metrics have no series: only their names are wanted."""

    def view(self) -> StateView:
        return StateView("starting", "", "", "local", None, None)

    def check_room(self, coming: int = 0, wanted: int = 1) -> None: ...

    def find_speculation(self, submit: Submit) -> EffectiveBound | None:
        return None

    async def generate(self, submit: Submit) -> AsyncIterator[Delta]:
        nothing: tuple[Delta, ...] = ()
        for delta in nothing:
            yield delta


def list_metrics() -> list[Metric]:
    return list(Metrics(_NothingRuns(), SystemClock()).registry.collect())


def write_query(family: Metric) -> tuple[str, str]:
    only = '{model_name=~"$model"}'
    if family.type == "histogram":
        buckets = f"rate({family.name}_bucket{only}[$__rate_interval])"
        return f"histogram_quantile(0.95, sum by (le, model_name) ({buckets}))", "p95 {{model_name}}"
    if family.type == "counter":
        return f"rate({family.name}_total{only}[$__rate_interval])", "__auto"
    return f"{family.name}{only}", "__auto"


def make_dashboard() -> str:
    made = (
        dashboard.Dashboard("Outrider")
        .uid("outrider")
        .tags(["outrider", "generated"])
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("model")
            .datasource(_SOURCE)
            .query("label_values(outrider_num_requests_running, model_name)")
            .include_all(True)
            .multi(True)
        )
        .with_row(dashboard.Row("Alerts"))
        .with_panel(
            stat.Panel()
            .title("Alerts that fire")
            .datasource(_SOURCE)
            .with_target(_ask('count by (alertname) (ALERTS{alertname=~"Outrider.*", alertstate="firing"})', "__auto"))
            .span(24)
            .height(4)
        )
    )
    for name, by, figure in RECORDS:
        legend = " ".join(f"{{{{{label}}}}}" for label in by)
        made = made.with_panel(_draw(name, figure.tell(by, 1.0), legend, ""))
    for title, families in _group():
        made = made.with_row(dashboard.Row(title))
        for family in families:
            query, legend = write_query(family)
            made = made.with_panel(_draw(family.name.removeprefix("outrider_"), query, legend, family.documentation))
    text = json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True)
    Dashboard.from_json(json.loads(text))
    return text + "\n"


def _group() -> Iterator[tuple[str, list[Metric]]]:
    left = {family.name: family for family in list_metrics()}
    for title, prefixes in _ROWS:
        own = [name for name in left if name.removeprefix("outrider_").startswith(prefixes)]
        yield title, [left.pop(name) for name in own]


def _draw(title: str, query: str, legend: str, text: str) -> timeseries.Panel:
    return (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(_SOURCE)
        .with_target(_ask(query, legend))
        .span(8)
        .height(7)
    )


def _ask(query: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(_SOURCE).expr(query).legend_format(legend).ref_id("A")


def list_queries(panel: Any) -> Iterator[str]:
    """Yield the queries of a dashboard's JSON, or of a part of it."""
    if isinstance(panel, dict):
        if isinstance(panel.get("expr"), str):
            yield panel["expr"]
        panel = list(panel.values())
    if isinstance(panel, list):
        for part in panel:
            yield from list_queries(part)


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(make_dashboard(), encoding="utf-8")
