"""Each alert over recorded series: by Prometheus with the shipped rules, and by the daemon's own evaluator."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.clock import SystemClock
from orchestrator.daemon.alerts.evaluator import Evaluator, Sample
from orchestrator.daemon.alerts.rules import SHIPPED, write_rules
from orchestrator.daemon.alerts.table import ALERTS, METRICS
from orchestrator.daemon.api.metrics.collector import Metrics
from tests.alerts.series import RECORDED, STEP_S, Recorded, Values
from tests.api.test_metrics_docs import Idle
from tools.write_runbook import write_runbook

ROOT = Path(__file__).parents[2]
NAMES = [alert.name for alert in ALERTS]
PROMTOOL = shutil.which("promtool")


def write_values(values: Values) -> str:
    return " ".join("_" if value is None else f"{value:.6f}" for value in values)


def expect(recorded: Recorded, name: str, at_s: int, *, fires: bool) -> dict[str, Any]:
    (alert,) = [one for one in ALERTS if one.name == name]
    told = {"exp_labels": {"severity": alert.severity, **recorded.labels}, "exp_annotations": alert.annotate()}
    return {"eval_time": f"{at_s}s", "alertname": name, "exp_alerts": [told] if fires else []}


def write_tests(name: str) -> list[dict[str, Any]]:
    recorded = RECORDED[name]
    tests = [
        {
            "interval": f"{STEP_S}s",
            "input_series": [{"series": one, "values": write_values(held)} for one, held in recorded.series.items()],
            "alert_rule_test": [
                expect(recorded, name, at_s, fires=at_s == recorded.fires_s)
                for at_s in (recorded.before_s, recorded.fires_s, recorded.clears_s)
            ],
        }
    ]
    if recorded.below is not None:
        below = [{"series": one, "values": write_values(held)} for one, held in recorded.below.items()]
        silent = [expect(recorded, name, at_s, fires=False) for at_s in range(0, recorded.clears_s, 60)]
        tests.append({"interval": f"{STEP_S}s", "input_series": below, "alert_rule_test": silent})
    return tests


def evaluate(series: dict[str, Values], name: str) -> dict[int, list[dict[str, str]]]:
    """The labels that an alert fires for, by the second, as the daemon sees it."""
    parsed = []
    for text, values in series.items():
        metric, labels = text.rstrip("}").split("{")
        parsed.append((metric, dict(re.findall(r'(\w+)="([^"]*)"', labels)), values))
    evaluator, found = Evaluator(), {}
    for step in range(max(len(values) for values in series.values())):
        samples = [
            Sample(metric, labels, value)
            for metric, labels, values in parsed
            if step < len(values) and (value := values[step]) is not None
        ]
        active = evaluator.evaluate(float(step * STEP_S), samples)
        found[step * STEP_S] = [dict(one.labels) for one in active if one.alert.name == name and one.firing]
    return found


def test_each_alert_has_recorded_series():
    assert sorted(RECORDED) == sorted(NAMES)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt install prometheus")
def test_prometheus_fires_and_clears_each_alert_and_is_silent_below_its_floor(tmp_path: Path):
    written = {
        "rule_files": [str(SHIPPED)],
        "evaluation_interval": f"{STEP_S}s",
        "tests": [test for name in NAMES for test in write_tests(name)],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
    assert PROMTOOL is not None
    checked = subprocess.run([PROMTOOL, "check", "rules", str(SHIPPED)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    done = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_daemon_evaluates_the_same_series_as_prometheus_does(name: str):
    recorded = RECORDED[name]
    found = evaluate(recorded.series, name)
    assert found[recorded.before_s] == []
    assert found[recorded.fires_s] == [recorded.labels]
    assert found[recorded.clears_s] == []
    if recorded.below is not None:
        assert not any(evaluate(recorded.below, name).values())


def test_the_shipped_rules_and_the_runbook_are_those_of_the_table():
    assert SHIPPED.read_text(encoding="utf-8") == write_rules()
    assert (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8") == write_runbook()


def test_alerts_read_metrics_that_there_are():
    families = Metrics(Idle(), SystemClock()).registry.collect()
    there = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert there >= METRICS
