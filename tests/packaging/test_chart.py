"""The Helm chart: Helm's library renders it, Kubernetes' schemas hold for what comes out, and our own parts fit."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config.load import parse_config

ROOT = Path(__file__).parents[2]
CHART = ROOT / "packaging" / "helm" / "outrider"
KEYS = {"keys": {"secret": "outrider-keys"}}
ALL = KEYS | {
    "autoscaling": {"enabled": True},
    "monitoring": {"podMonitor": True, "prometheusRule": True, "labels": {"release": "prometheus"}},
    "image": {"kind": "cuda"},
}


def render(values: dict[str, Any]) -> Any:
    pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: pip install helm-python-sdk")
    script = [sys.executable, str(Path(__file__).with_name("render_chart.py")), str(CHART), json.dumps(values)]
    return json.loads(subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def list_documents(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a chart makes, by kind."""
    rendered = render(values)["rendered"].values()
    return {document["kind"]: document for text in rendered for document in yaml.safe_load_all(text) if document}


@pytest.mark.parametrize("values", [KEYS, ALL], ids=["least", "all"])
def test_kubernetes_takes_what_it_makes(values):
    validate = pytest.importorskip("kubernetes_validate").validate
    assert render(values)["lint"]["errors"] == []
    documents = list_documents(values)
    kinds = {"ConfigMap", "Service", "StatefulSet"}
    further = {"HorizontalPodAutoscaler", "PodMonitor", "PrometheusRule"} if values is ALL else set()
    assert set(documents) == kinds | further
    for kind, document in documents.items():
        if not document["apiVersion"].startswith("monitoring."):  # the operator's own kinds
            assert validate(document, "1.33", strict=True), kind


def test_the_daemon_takes_its_configuration_and_answers_where_it_is_probed(tmp_path):
    documents = list_documents(ALL)
    text = documents["ConfigMap"]["data"]["cluster.yaml"]
    config, _ = parse_config(text, tmp_path / "cluster.yaml")
    (container,) = documents["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == config.api.port
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(config.api.keys_file).parent) in mounts
    assert {"/tmp", "/dev/shm", "/var/lib/outrider"} <= mounts  # noqa: S108  # of the image, which is read-only
    probes = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"/started", "/live", "/ready"}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    grace_s = documents["StatefulSet"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.limits.drain_timeout_s


def test_alerts_and_the_autoscaler_are_of_the_daemons_own_metrics():
    documents = list_documents(ALL)
    rules = yaml.safe_load((ROOT / "orchestrator/daemon/alerts/rules.yaml").read_text(encoding="utf-8"))
    assert documents["PrometheusRule"]["spec"] == rules
    (metric,) = documents["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert f"`{metric['pods']['metric']['name']}`" in (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def test_without_keys_it_is_refused_unless_that_is_meant():
    assert "keys.secret: name the Secret" in render({})["error"]
    documents = list_documents({"keys": {"allowKeyless": True}})
    assert yaml.safe_load(documents["ConfigMap"]["data"]["cluster.yaml"])["api"]["allow_keyless"] is True


def test_it_has_the_version_of_outrider():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]
