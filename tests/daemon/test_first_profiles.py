"""The first start of a daemon that plans: bounded, told beforehand, and requests are answered as soon as one can be."""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from openai import InternalServerError, OpenAI

from device_profiles.store import ProfileStore
from orchestrator.cli.daemon_socket import query_daemon
from tests.support.competing import compete
from tests.support.daemon import READY_WITHIN_S, configuration, read_url, running
from tests.support.waiting import until

ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 40, "temperature": 0}


def write_planned_config(directory: Path, extra: str) -> Path:
    path = configuration(directory, extra=extra)
    path.write_text(path.read_text().replace("adapter: simulated", "adapter: auto, device: auto", 1))
    return path


def profiles_of(directory: Path) -> ProfileStore:
    return ProfileStore(directory / "store" / "profiles")


def ask_until_answered(admin: Path) -> str:
    """Ask from the first moment on, as a client does whose requests are refused for now."""
    end_s = time.monotonic() + READY_WITHIN_S
    while not (url := read_url(admin)):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    refused: set[str | None] = set()
    while refused <= {"model_not_ready", "model_starting"} and time.monotonic() < end_s:
        try:
            return str(client.completions.create(**ASK).choices[0].text)
        except InternalServerError as error:
            refused.add(error.code)
            time.sleep(0.2)
    raise AssertionError(f"never answered, refused with {refused}")


@pytest.fixture
def expected(plain) -> str:
    return str(plain.client.completions.create(**ASK).choices[0].text)


def test_a_start_without_a_budget_serves_by_an_estimate_that_says_so(tmp_path, expected, monkeypatch, outrider):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    config = write_planned_config(tmp_path, "placement: {profile_budget_s: 0}")
    with running(config) as daemon:
        assert profiles_of(tmp_path).models() == []
        assert daemon.client.completions.create(**ASK).choices[0].text == expected
        found = query_daemon(daemon.admin, "/admin/plan")
        assert [one["source"] for one in found["basis"]] == ["estimate"]
        assert found["plan"]["replicas"][0]["prediction"]["error"] >= 1.0
        plan = daemon.status()["plan"]
        assert "has no profile, and is planned by an estimate" in plan["doubts"][0]
        until(lambda: len(daemon.status()["plan"]["to_measure"]) == 2)
        shown = " ".join(outrider("status", "--socket", str(daemon.admin)).stdout.replace("│", " ").split())
        assert "is planned by an estimate" in shown
        assert "when nobody asks, 2 more are measured" in shown
        assert plan["drifted"] == []
        proposed = " ".join(outrider("plan", "--config", str(config)).stdout.replace("│", " ").split())
        assert "`outrider serve` measures it at its start, within `placement.profile_budget_s` (0 s)" in proposed
        weak = "; ".join((*plan["doubts"], "when nobody asks, 2 more are measured: "))
        assert f"the plan that runs: {weak}" in proposed
        assert "nothing would change" in outrider("plan", "diff", "--config", str(config)).stdout
    assert "the plan that runs: " not in outrider("plan", "--config", str(config)).stdout
    log = config.with_suffix(".log").read_text()
    assert "placement.profile_budget_s (0 s) is spent: left for when nobody asks: simulated SIM, target;" in log


def test_a_request_is_answered_by_the_first_device_that_is_measured(tmp_path, expected, monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "3")
    config = write_planned_config(tmp_path, "placement: {profile_budget_s: 3600}")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_until_answered, tmp_path / "admin.sock")
        with running(config) as daemon:
            assert asking.result(READY_WITHIN_S) == expected
            assert [one.device for one in profiles_of(tmp_path).models()] == ["SIM"]
            assert daemon.status()["ready"]["device"] == "SIM"
            until(lambda: len(daemon.status()["plan"]["to_measure"]) >= 2)
    log = config.with_suffix(".log").read_text()
    assert re.search(
        r"a request waits: left for when nobody asks: .*simulated SIM.1, target; simulated SIM.2, target", log
    )
    told = re.findall(r"measuring what has no profile takes about (\d+) s: simulated SIM, target", log)
    assert len(told) == 1
    assert log.index("takes about") < log.index("profile simulated SIM, target (1 of 3): start")


def test_targets_share_one_budget(tmp_path, expected, monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "1")
    second = "models: [{source: 'simulated:toy?shift=1', name: other, adapter: auto, device: auto, drafts: []}]"
    config = write_planned_config(tmp_path, f"placement: {{profile_budget_s: 12}}\n{second}")
    with running(config) as daemon:
        assert daemon.client.completions.create(**ASK).choices[0].text == expected
        assert daemon.client.completions.create(**{**ASK, "model": "other"}).choices[0].text
    lines = [line for line in config.with_suffix(".log").read_text().splitlines() if "takes about" in line]
    told = [int(found[1]) for line in lines if (found := re.search(r"takes about (\d+) s \(placement", line))]
    first_s, second_s = (datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp() for line in lines)
    assert told[0] == 6, "a half each"
    assert told[1] <= 12 - (second_s - first_s) + 1, "what the first has left"


@pytest.mark.slow
def test_what_the_budget_left_is_measured_while_nobody_asks(tmp_path, expected, monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "1")
    config = write_planned_config(tmp_path, "placement: {profile_budget_s: 0}")
    with running(config) as daemon:
        if any((one["others"] or 0.0) > 0.1 for one in daemon.status()["devices"]):
            pytest.skip("another program takes the cores of this machine")
        try:
            until(lambda: bool(profiles_of(tmp_path).models()), 180.0)
        except AssertionError:
            pytest.skip("this machine was never quiet for long enough")
        until(lambda: query_daemon(daemon.admin, "/admin/plan")["basis"][0]["source"] == "measured")
        assert not any("estimate" in one for one in daemon.status()["plan"]["doubts"])
        assert daemon.client.completions.create(**ASK).choices[0].text == expected
        assert daemon.status()["totals"]["restarts"] == 0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a program cannot be kept on cores here")
def test_a_profile_beside_a_busy_program_is_marked_and_measured_again(tmp_path, outrider):
    config = write_planned_config(tmp_path, "")
    profile = ("profile", "--config", str(config), "--seconds", "0.5")
    with compete([core for core in sorted(os.sched_getaffinity(0)) for _ in range(2)]):
        shown = " ".join(outrider(*profile).stdout.replace("│", " ").split())
    (model,) = profiles_of(tmp_path).models()
    assert model.others is not None
    assert model.others > 0.15
    assert "of it while it was measured" in shown
    planned = " ".join(outrider("plan", "--explain", "--config", str(config)).stdout.replace("│", " ").split())
    assert "of it while it was measured: to be measured again" in planned
    before = model.measured_at
    said = outrider(*profile).stderr
    assert "while it was measured: measured again" in said
    (model,) = profiles_of(tmp_path).models()
    assert model.measured_at >= before
