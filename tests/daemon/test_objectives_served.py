"""Objectives from cluster.yaml to the admin command: judged at the API, followed in the worker, told with reasons."""

from __future__ import annotations

import time

import httpx
from typer.testing import CliRunner

from orchestrator.cli.main import app
from tests.support.daemon import configuration, running


def test_objectives_are_judged_followed_and_told(tmp_path):
    objectives = "slo: {ttft_ms: 60000, tpot_ms: 1, tpot_percentile: 90}"
    with running(configuration(tmp_path, script="base_ms=8", extra=objectives)) as daemon:
        for _ in range(3):
            daemon.client.completions.create(
                model="toy", prompt="the sea", max_tokens=20, extra_body={"ignore_eos": True}
            )
        found = daemon.status()["slo"]
        assert (found["met"], found["missed"]) == (0, 3)
        assert found["objectives"]["tpot"]["seen_ms"] > 1.0 > found["goodput_per_s"]
        text = httpx.get(f"{daemon.url}/metrics").text
        assert 'outrider_slo_requests_met_total{engine="0",model_name="toy",objective="ttft"} 3.0' in text
        assert 'outrider_slo_requests_missed_total{engine="0",model_name="toy",objective="all"} 3.0' in text
        deadline = time.monotonic() + 10.0
        while "prefill_gives_way" not in daemon.status()["replicas"][0]["gauges"]["slo"]["levers"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        shown = CliRunner().invoke(app, ["status", "--socket", str(daemon.admin)]).output
        assert "TTFT p95" in shown
        assert "0 of 3 did since the start" in " ".join(shown.split())
        assert "prefill gives way" in shown
        assert "objectives of target: TTFT p95" in daemon.log.read_text()
