"""Daemons that run a plan: chosen from stored profiles, made again when rounds differ, measured where none is."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from device_profiles.store import ProfileStore
from orchestrator.cli.daemon_socket import query_daemon
from policies.speculation.state import COLD_DEPTH
from tests.support.daemon import READY_WITHIN_S, Daemon, configuration, outrider_process, read_url, running
from tests.support.profiles import store_simulated_profiles
from tests.support.waiting import until

LONG = 2000
ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 700, "temperature": 0.7, "seed": 4}


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")


def write_planned_config(directory: Path, script: str, extra: str = "") -> Path:
    path = configuration(directory, script=script, extra=extra)
    path.write_text(path.read_text().replace("adapter: simulated", "adapter: auto, device: auto", 1))
    return path


def text_of(daemon: Daemon, one: dict[str, Any]) -> str:
    return str(daemon.client.completions.create(**one).choices[0].text)


def metrics(url: str) -> dict[str, float]:
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("outrider_plan_")]
    return {line.partition("{")[0].removeprefix("outrider_plan_"): float(line.split(" ")[-1]) for line in lines}


def test_the_daemon_runs_the_plan_and_moves_when_rounds_part_from_it_without_losing_a_token(tmp_path, plain, outrider):
    expected = plain.client.completions.create(**ASK).choices[0].text
    assert query_daemon(plain.admin, "/admin/plan") == {"plan": None, "missing": [], "unmet": []}
    assert plain.status()["plan"] is None
    script = "base_ms=2&other_ms=3&drift_at=60&drift_ms=20"
    store_simulated_profiles(tmp_path / "store" / "profiles", {"SIM": 2.0, "SIM.1": 5.0}, script=script)
    config = write_planned_config(tmp_path, script, "placement: {profile: never, drift_after_s: 0.5}")
    with running(config) as daemon:
        status = daemon.status()
        assert status["ready"]["device"] == "SIM", "predicted to be the faster one"
        running_plan = query_daemon(daemon.admin, "/admin/plan")
        assert running_plan["plan"]["replicas"][0]["shards"][0]["device"] == "here/SIM"
        assert running_plan["basis"][0]["source"] == "measured"
        assert "nothing would change" in outrider("plan", "diff", "--config", str(config))[1]
        text = daemon.client.completions.create(**ASK).choices[0].text
        assert text == expected
        daemon.wait_for("ready", device="SIM.1")
        status = daemon.status()
        assert status["plan"]["plans"] >= 1
        assert status["plan"]["moves"] == 1
        assert "here/SIM.1" in status["plan"]["last"]
        assert status["totals"]["restarts"] == 0
        drifted = "the profile of toy on simulated device SIM SIM, simulated, has drifted: rounds took"
        assert any(drifted in one for one in status["plan"]["drifted"])
        shown = " ".join(outrider("status", "--socket", str(daemon.admin)).stdout.replace("│", " ").split())
        assert "tokens/s predicted" in shown
        assert "has drifted" in shown
        found = metrics(daemon.url)
        assert found["moves_total"] == 1
        assert found["predicted_tokens_per_second"] == pytest.approx(status["plan"]["predicted_tokens_per_s"])
        changed = json.loads(outrider("plan", "diff", "--config", str(config), "--json")[1])
        assert any("here/SIM.1" in change["before"] for change in changed["changes"]), "stored profiles are as before"
    shown = " ".join(outrider("plan", "--config", str(config)).stdout.split())
    assert "here/SIM: the profile of toy in simulated: drifted (rounds took" in shown
    assert "run `outrider profile` to measure it again" in shown
    log = config.with_suffix(".log").read_text()
    assert "times what was predicted" in log
    assert "takes the place of target: 1 streams move" in log, "the stream was moved while it ran"


def test_a_planned_replica_without_a_worker_is_told_by_everybody_who_is_asked(tmp_path, outrider):
    script = f"base_ms=2&room_kib=1&room_while={tmp_path}/full"
    store_simulated_profiles(tmp_path / "store" / "profiles", {"SIM": 2.0, "SIM.1": 2.0}, script=script)
    extra = "placement: {profile: never, concurrency: 8}\ndrafts: []\nalerts: {every_s: 0.2}"
    config = write_planned_config(tmp_path, script, extra)
    text = config.read_text().replace("replicas: 1", "replicas: 2")
    config.write_text(text.replace("runtime: local", "runtime: local, max_restarts: 0"))
    diff = ("plan", "diff", "--config", str(config))
    with running(config) as daemon:
        until(lambda: [one["phase"] for one in daemon.status()["replicas"]] == ["ready", "ready"])
        whole = httpx.get(f"{daemon.url}/ready").json()
        assert (whole["status"], whole["replicas"]) == ("ready", {"planned": 2, "serving": 2, "missing": []})
        assert json.loads(outrider(*diff, "--json")[1])["missing"] == []
        assert query_daemon(daemon.admin, "/admin/health")["parts"] == []
        (tmp_path / "full").touch()
        os.kill(daemon.status()["replicas"][1]["ready"]["pid"], signal.SIGKILL)
        until(lambda: query_daemon(daemon.admin, "/admin/health")["parts"])
        (part,) = query_daemon(daemon.admin, "/admin/health")["parts"]
        assert (part["kind"], part["name"], part["state"]) == ("worker", "target-1", "open")
        assert "SIGKILL" in part["why"]
        answer = httpx.get(f"{daemon.url}/ready")
        degraded = answer.json()
        assert (answer.status_code, degraded["status"]) == (200, "degraded")
        assert (degraded["replicas"]["planned"], degraded["replicas"]["serving"]) == (2, 1)
        assert part["why"] in degraded["replicas"]["missing"][0]
        assert httpx.get(f"{daemon.url}/health").json()["status"] == "degraded"
        found = json.loads(outrider(*diff, "--json")[1])
        assert [one["part"] for one in found["changes"]] == ["replica 1 target", "replica 1 depth"]
        assert {one["kind"] for one in found["changes"]} == {"added"}
        assert 0.0 < found["before_tokens_per_s"] < found["after_tokens_per_s"]
        assert (found["missing"][0]["replica"], found["missing"][0]["name"]) == (1, "target-1")
        assert f"replica 1 is planned and does not run: {found['missing'][0]['why']}" in outrider(*diff)[1]
        plan = daemon.status()["plan"]
        assert plan["serving_tokens_per_s"] == pytest.approx(found["before_tokens_per_s"])
        assert plan["predicted_tokens_per_s"] == pytest.approx(found["after_tokens_per_s"])
        shown = " ".join(outrider("status", "--socket", str(daemon.admin)).stdout.replace("│", " ").split())
        assert "ready, DEGRADED (1 of 2 replicas serve; replica 1 is " in shown
        assert "of it by what serves (target-1 does not)" in shown
        until(lambda: "OutriderReplicaFailed" in outrider("alerts", "--socket", str(daemon.admin)).stdout)
        assert text_of(daemon, ASK | {"max_tokens": 5})


@pytest.mark.slow
def test_a_plan_goes_from_one_replica_to_two_and_back_while_streams_run(tmp_path, plain):
    asks = [ASK | {"seed": seed, "max_tokens": LONG} for seed in range(4)]  # long enough for a busy machine to look
    expected = [text_of(plain, one) for one in asks]
    slow = tmp_path / "slow"
    script = f"base_ms=3&other_ms=27&drift_ms=27&drift_while={slow}"
    store_simulated_profiles(tmp_path / "store" / "profiles", {"SIM": 3.0, "SIM.1": 30.0}, script=script)
    # Of 64 requests at once so few rows are free that a second device helps, but not one that is ten times slower.
    placement = "{profile: never, concurrency: 64, output_tokens: 512, drift_tolerance: 1.0, replan_pause_s: 0.2}"
    config = write_planned_config(tmp_path, script, f"placement: {placement}\ndrafts: []")
    config.write_text(config.read_text().replace("replicas: 1", "replicas: 2"))
    with running(config) as daemon, ThreadPoolExecutor(len(asks)) as pool:
        assert [one["ready"]["device"] for one in daemon.status()["replicas"]] == ["SIM"]
        slow.touch()
        texts = [pool.submit(text_of, daemon, one) for one in asks[:2]]
        until(lambda: len(daemon.status()["replicas"]) == 2)
        texts += [pool.submit(text_of, daemon, one) for one in asks[2:]]
        until(lambda: all(one["totals"]["generated"] for one in daemon.status()["replicas"]))
        assert [one["ready"]["device"] for one in daemon.status()["replicas"]] == ["SIM", "SIM.1"]
        slow.unlink()
        until(lambda: daemon.status()["plan"]["moves"] == 2)
        moved = daemon.status()["kv_moves"]
        (left,) = daemon.status()["replicas"]
        assert left["ready"]["device"] == "SIM"
        assert left["streams"] >= 2, "those of the one that left go on here"
        assert [text.result(60.0) for text in texts] == expected
        assert daemon.status()["totals"]["restarts"] == 0
        assert daemon.status()["totals"]["generated"] == len(asks) * LONG
        assert "is not needed any more: " in config.with_suffix(".log").read_text()
        ran = sum(one["pages"] + one["recomputed"] for one in moved)
        metrics = httpx.get(f"{daemon.url}/metrics").text
        assert ran == sum(
            float(line.split(" ")[-1]) for line in metrics.splitlines() if line.startswith("outrider_kv_moves_total")
        )
        assert ran >= 1, "some had tokens there"


def test_a_canary_of_a_planned_daemon_has_its_drafts_where_the_plan_leaves_the_others_without(
    tmp_path, plain, outrider
):
    ask_less = ASK | {"max_tokens": 40}
    expected = plain.client.completions.create(**ask_less).choices[0].text
    store_simulated_profiles(tmp_path / "store" / "profiles", {"SIM": 2.0, "SIM.1": 5.0})
    canary = "canary: {share: 0.5, decide: operator, speculation: {method: fixed, num_speculative_tokens: 3}}"
    draft = "drafts: [{method: model, source: 'simulated:toy', adapter: simulated, device: SIM.1}]"
    config = write_planned_config(tmp_path, "", f"placement: {{profile: never}}\n{draft}\n{canary}")
    assert "the canary is not planned" in " ".join(outrider("plan", "--config", str(config)).stdout.split())
    with running(config) as daemon:
        assert query_daemon(daemon.admin, "/admin/plan")["plan"]["replicas"][0]["depth"] == 0
        answers = [daemon.client.completions.with_raw_response.create(**ask_less) for _ in range(16)]
        assert {answer.parse().choices[0].text for answer in answers} == {expected}
        told = {answer.headers["X-Outrider-Speculation"] for answer in answers}
        assert told == {"off; by=operator", "num_speculative_tokens=3; by=default"}
        status = json.loads(outrider("canary", "status", "--json", "--socket", str(daemon.admin)).stdout)
        seen = {arm: figures["acceptance"]["requests"] for arm, figures in status["arms"].items()}
        assert seen["control"] == 0 < seen["canary"]
        daemon.wait_for("gauges", running=0)
        (drafter,) = daemon.status()["gauges"]["drafters"]
        assert (drafter["name"], drafter["device"], drafter["state"]) == ("canary-model", "SIM.1", "ok")
        lines = httpx.get(f"{daemon.url}/metrics").text.splitlines()
        arms = {
            line.partition('arm="')[2].partition('"')[0] for line in lines if "outrider_arm_requests_total{" in line
        }
        assert arms == {"control", "canary"}


def test_a_plan_without_profiles_is_told_in_one_line(tmp_path, outrider):
    config = write_planned_config(tmp_path, "", "placement: {profile: never}")
    done = outrider_process("serve", "--config", str(config))
    assert done.returncode == 1
    assert "no profile of toy" in done.stderr
    assert "outrider profile" in done.stderr
    code, _, err = outrider("plan", "--config", str(config))
    assert code == 1
    assert "no profile of toy" in err


def test_a_plan_for_the_cost_needs_a_price_and_then_tells_what_tokens_cost(tmp_path, outrider):
    store_simulated_profiles(tmp_path / "store" / "profiles", {"SIM": 2.0, "SIM.1": 5.0}, script="base_ms=2")
    placement = "placement: {profile: never, objective: cost, currency: EUR, replan_pause_s: 3600}"
    config = write_planned_config(tmp_path, "base_ms=2", placement)
    done = outrider_process("serve", "--config", str(config))
    assert done.returncode == 1
    assert "the price of 'here/SIM', 'here/SIM.1' is not known" in done.stderr
    assert "devices.price_per_hour" in done.stderr
    config.write_text(config.read_text() + "devices: {price_per_hour: 3.6}\n")
    with running(config) as daemon:
        text_of(daemon, ASK | {"max_tokens": 40})
        status = daemon.status()
        plan, costs = status["plan"], status["costs"]
        assert (plan["objective"], plan["currency"]) == ("cost", "EUR")
        assert plan["price_per_hour"] == pytest.approx(3.6)
        assert plan["predicted_cost_per_million_tokens"] == pytest.approx(
            3.6 / 3600 / plan["predicted_tokens_per_s"] * 1e6
        )
        assert costs["price_per_hour"] == pytest.approx(3.6)
        assert costs["cost_per_million_tokens_since_start"] == pytest.approx(costs["spent"] / 40 * 1e6)
        shown = " ".join(outrider("status", "--socket", str(daemon.admin)).stdout.split())
        assert "best for cost" in shown
        assert "EUR a million tokens" in shown
        found = metrics(daemon.url)
        assert found["predicted_cost_per_million_tokens"] == pytest.approx(plan["predicted_cost_per_million_tokens"])


def probe_until_ready(admin: Path) -> list[tuple[dict[str, Any], httpx.Response]]:
    """What /health and /ready say from the first moment on."""
    seen: list[tuple[dict[str, Any], httpx.Response]] = []
    deadline = time.monotonic() + READY_WITHIN_S
    while not (url := read_url(admin)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while not seen or seen[-1][1].status_code != httpx.codes.OK:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        seen.append((httpx.get(f"{url}/health").json(), httpx.get(f"{url}/ready")))
    return seen


@pytest.mark.slow
def test_what_has_no_profile_is_measured_once_and_again_when_it_has_drifted(tmp_path, monkeypatch, outrider):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "1")
    config = write_planned_config(tmp_path, "")
    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(probe_until_ready, tmp_path / "admin.sock")
        with running(config) as daemon:
            assert daemon.status()["ready"]["device"] == "SIM"
            assert "profile simulated SIM, target (1 of 1)" in config.with_suffix(".log").read_text()
            probes = probing.result(60.0)
        measuring = [one for one in probes if "profile simulated SIM, target (1 of 1): " in one[0]["detail"]]
    assert len({health["detail"] for health, _ in measuring}) > 1, "it says how far it is"
    assert {health["phase"] for health, _ in measuring} == {"starting"}
    assert {ready.status_code for _, ready in measuring} == {httpx.codes.SERVICE_UNAVAILABLE}
    assert "the model is starting: profile simulated SIM" in measuring[0][1].json()["error"]["message"]
    store = ProfileStore(tmp_path / "store" / "profiles")
    (before,) = store.models()
    assert store.mark_drifted(before, "rounds took 2.00 times what it predicts")
    profile = ("profile", "--config", str(config), "--seconds", "0.2")
    said = outrider(*profile).stderr
    assert "simulated SIM, target: drifted (rounds took 2.00 times what it predicts)" in said
    assert "measured again" in said
    assert [one.drifted for one in store.models()] == [""]
    with running(config) as daemon:
        assert "profile simulated" not in config.with_suffix(".log").read_text()
        status = daemon.status()
        assert status["plan"]["predicted_tokens_per_s"] > 0
        assert status["ready"]["costs_from"].startswith("stored profile of 20")
        planned_depth = query_daemon(daemon.admin, "/admin/plan")["plan"]["replicas"][0]["depth"]
        assert status["ready"]["starting_depth"] == (planned_depth or COLD_DEPTH)


@pytest.mark.slow
def test_a_draft_device_that_helps_nobody_becomes_a_replica_while_streams_run(tmp_path, plain, outrider):
    """The plan takes six tokens of ten for right, and none is."""
    target, draft = "base_ms=20&row_ms=1", "base_ms=1&shift=7"
    store = tmp_path / "store" / "profiles"
    store_simulated_profiles(store, {"SIM": 21.0, "SIM.1": 21.0}, script=target, more_row_ms=1.0)
    store_simulated_profiles(store, {"SIM.1": 1.0}, "simulated-toy", "draft", script=draft)
    entry = f"{{method: model, source: 'simulated:toy?{draft}', adapter: auto, device: auto}}"
    extra = f"drafts: [{entry}]\nplacement: {{profile: never, concurrency: 4, drift_tolerance: 9}}"
    config = write_planned_config(tmp_path, target, extra)
    config.write_text(config.read_text().replace("replicas: 1", "replicas: 2"))
    asks = [ASK | {"seed": seed, "max_tokens": 400} for seed in range(4)]
    expected = [text_of(plain, one) for one in asks]
    with running(config) as daemon, ThreadPoolExecutor(len(asks)) as pool:
        until(lambda: [view["phase"] for view in daemon.status()["drafts"]] == ["ready"])

        def count_replicas() -> int:
            return sum(view["phase"] == "ready" for view in daemon.status()["replicas"])

        def decode_until_more(ask: dict[str, Any], answer: str) -> None:
            while count_replicas() == 1:
                assert text_of(daemon, ask) == answer
            assert text_of(daemon, ask) == answer

        assert count_replicas() == 1
        list(pool.map(decode_until_more, asks, expected))
        status = daemon.status()
        assert {view["ready"]["device"] for view in status["replicas"]} == {"SIM", "SIM.1"}
        assert status["drafts"] == []
        assert status["plan"]["moves"] == 1
        line = "simulated-toy drafts nothing: it helped no replica for 30 s: "
        assert line in outrider("plan", "--explain", "--config", str(config)).stdout
