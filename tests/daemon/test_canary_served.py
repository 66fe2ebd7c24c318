"""A canary in a running daemon: both arms give the same tokens; figures, state and the operator's word hold."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from orchestrator.cli.main import app
from tests.daemon.test_life import collect
from tests.support.daemon import Daemon, configuration, running
from tests.support.waiting import until

ASK: dict[str, Any] = {"model": "toy", "max_tokens": 40, "temperature": 0.8, "seed": 3}
PROMPTS = ["the sea is", "a b a b a b", "one, one, one", "net net net"]

DRAFTS = """
canary:
  share: 0.5
  decide: operator
  drafts:
    - {method: suffix, max_match: 2}
    - {method: model, source: "simulated:toy", adapter: simulated}
  speculation: {method: fixed, num_speculative_tokens: 3}
"""


def texts(daemon: Daemon, times: int = 1, **more: Any) -> list[str]:
    return [
        daemon.client.completions.create(**ASK, prompt=prompt, **more).choices[0].text
        for _ in range(times)
        for prompt in PROMPTS
    ]


def count_by_arm(daemon: Daemon, name: str) -> dict[str, float]:
    """Arm -> value of a counter."""
    lines = [line for line in httpx.get(f"{daemon.url}/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    return {line.partition('arm="')[2].partition('"')[0]: float(line.split(" ")[-1]) for line in lines}


def run_command(daemon: Daemon, *words: str) -> str:
    """What a command prints; it runs in this process."""
    done = CliRunner().invoke(app, [*words, "--socket", str(daemon.admin)])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.replace("│", " ").split())


def canary(daemon: Daemon, word: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_command(daemon, "canary", word, "--json"))
    return found


def list_ended_arms(log: Path) -> list[str]:
    """The arms of the requests that have ended, in order."""
    entries = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [entry["arm"] for entry in entries if entry["event"] == "request ended"]


def count_drafted(daemon: Daemon) -> dict[str, int]:
    daemon.wait_for("gauges", running=0)
    return {one["name"]: one["drafted"] for one in daemon.status()["gauges"]["drafters"]}


def test_both_arms_give_the_same_tokens_and_the_operator_moves_everybody_to_either(tmp_path):
    config = configuration(tmp_path, extra=DRAFTS)
    with running(config) as daemon:
        expected = texts(daemon, extra_body={"speculative_config": {"method": "off"}})
        assert count_by_arm(daemon, "outrider_arm_requests_total") == {}, "who says how it is drafted for takes no part"
        for _ in range(8):  # who gets which arm is drawn, and so is whether its text repeats itself for a suffix
            assert texts(daemon, 5) == expected * 5
            if min(count_drafted(daemon).values()) > 0:
                break
        arms = list_ended_arms(config.with_suffix(".log"))[len(PROMPTS) :]
        assert set(arms) == {"control", "canary"}
        requests = {arm: float(arms.count(arm)) for arm in ("control", "canary")}
        assert count_by_arm(daemon, "outrider_arm_requests_total") == requests
        assert min(count_by_arm(daemon, "outrider_arm_draft_tokens_total").values()) > 0
        assert list(count_drafted(daemon)) == ["suffix", "canary-suffix", "canary-model"]
        assert min(count_drafted(daemon).values()) > 0
        status = canary(daemon, "status")
        assert (status["phase"], status["decision"]) == ("trial", None)
        assert status["arms"]["canary"]["tpot_ms"]["requests"] == requests["canary"]
        assert status["arms"]["canary"]["acceptance"]["low"] <= status["arms"]["canary"]["acceptance"]["mean"]

        assert canary(daemon, "promote")["effective_share"] == 1.0
        before = count_drafted(daemon)
        assert texts(daemon, 2) == expected * 2
        assert set(list_ended_arms(config.with_suffix(".log"))[-8:]) == {"canary"}
        assert count_drafted(daemon)["suffix"] == before["suffix"], "the others' drafters rest"
        shown = run_command(daemon, "canary", "status")
        assert "to keep it: cluster.yaml:" in shown
        assert "by the operator: TPOT" in shown
        assert "promoted; 100.0% of new requests" in run_command(daemon, "status")
        assert daemon.stop() == 0
    with running(config) as daemon:
        assert canary(daemon, "status")["phase"] == "promoted", "the same configuration goes on"
        assert texts(daemon) == expected
        assert canary(daemon, "abort")["phase"] == "rolled_back"
        texts(daemon)
        assert list_ended_arms(config.with_suffix(".log"))[-8:] == ["canary"] * 4 + ["control"] * 4
        assert '"event": "the canary is rolled back (by the operator)' in config.with_suffix(".log").read_text()


OWN = """
drafts: [{method: model, source: "simulated:toy?fault=nonsense", adapter: simulated}]
speculation: {method: off}
canary:
  share: 0.5
  decide: operator
  drafts: [{method: model, source: "simulated:toy", adapter: simulated, process: own, overlap: always}]
  speculation: {method: fixed, num_speculative_tokens: 3}
"""
HEADER = "X-Outrider-Speculation"


def test_a_drafter_of_the_canarys_in_a_process_of_its_own_drafts_and_its_end_ends_the_trial(tmp_path):
    config = configuration(tmp_path, script="base_ms=3", extra=OWN)
    with running(config) as daemon:
        until(lambda: daemon.status()["drafts"][0]["phase"] == "ready")
        (worker,) = daemon.status()["drafts"]
        assert (worker["name"], worker["target"]) == ("canary-model", "target")
        ask = ASK | {"prompt": "the sea is", "max_tokens": 60}
        raw = [daemon.client.completions.with_raw_response.create(**ask) for _ in range(16)]
        arms = list_ended_arms(config.with_suffix(".log"))
        assert set(arms) == {"control", "canary"}
        assert len({one.parse().choices[0].text for one in raw}) == 1
        told = {"control": "off; by=operator", "canary": "num_speculative_tokens=3; by=default"}
        assert [one.headers[HEADER] for one in raw] == [told[arm] for arm in arms], "each has the bound of its arm"
        daemon.wait_for("gauges", running=0)
        (drafter,) = daemon.status()["gauges"]["drafters"]
        assert (drafter["name"], drafter["state"], drafter["remote"]["connections"]) == ("canary-model", "ok", 1)
        assert drafter["accepted"] > 0
        counts = count_by_arm(daemon, "outrider_arm_draft_tokens_total")
        assert counts["control"] == 0 < counts["canary"]
        status = canary(daemon, "status")
        assert status["arms"]["canary"]["acceptance"]["requests"] == arms.count("canary")
        assert status["arms"]["control"]["acceptance"]["requests"] == 0
        os.kill(worker["ready"]["pid"], signal.SIGKILL)
        assert daemon.client.completions.create(**ask).choices[0].text == raw[0].parse().choices[0].text
        until(lambda: daemon.status()["drafts"][0]["restarts"] == 1)
        assert canary(daemon, "status")["phase"] == "trial"


def test_a_killed_worker_costs_no_token_in_either_arm_and_the_rule_rolls_back_what_is_slower(tmp_path):
    extra = (
        "speculation: {method: fixed, num_speculative_tokens: 4}\n"
        "canary: {share: 0.5, least_requests: 3, tolerance: 1, speculation: {method: off}}"
    )
    long = ASK | {"prompt": "the sea is", "max_tokens": 300}
    slow = tmp_path / "slow"  # while it is there, so that streams last until their worker is killed
    slow.touch()
    script = f"base_ms=4&drift_ms=40&drift_while={slow}"
    with running(configuration(tmp_path, script=script, extra=extra)) as daemon:
        pieces: list[list[str]] = [[] for _ in range(5)]
        started = [threading.Event() for _ in pieces]
        readers = []
        for into, begun in zip(pieces, started, strict=True):
            stream = daemon.client.completions.create(**long, stream=True)
            readers.append(threading.Thread(target=collect, args=(stream, into, begun)))
            readers[-1].start()
        assert all(begun.wait(120) for begun in started)
        os.kill(daemon.status()["ready"]["pid"], signal.SIGKILL)
        slow.unlink()
        for reader in readers:
            reader.join(240)
        off = daemon.client.completions.create(**long, extra_body={"speculative_config": {"method": "off"}})
        assert ["".join(one) for one in pieces] == [off.choices[0].text] * len(pieces)
        status = canary(daemon, "status")
        assert sum(arm["ttft_ms"]["requests"] for arm in status["arms"].values()) < 5, "some waited for a worker"
        for _ in range(60):  # other programs' time is noise in the figures
            texts(daemon)
            if (status := canary(daemon, "status"))["phase"] != "trial":
                break
        assert status["phase"] == "rolled_back"
        assert (status["decision"]["by"], status["decision"]["figure"]) == ("rule", "tpot_ms")
        assert status["decision"]["low"] > 0
        assert "suffix; up to 4 tokens in every round" in run_command(daemon, "status")
        assert count_by_arm(daemon, "outrider_arm_draft_tokens_total")["canary"] == 0


LOSSY = """
drafts:
  - {method: suffix}
  - {method: model, source: "simulated:toy?agree=0.5", adapter: simulated}
speculation: {tolerance_delta: 8.0, method: fixed, num_speculative_tokens: 4}
canary: {share: 0.5, least_requests: 4, most_requests: 4, speculation: {acceptance: tolerance}}
"""


def test_a_canary_that_tolerates_is_dropped_for_what_it_says_and_the_others_lose_nothing(tmp_path, plain):
    config = configuration(tmp_path, extra=LOSSY)
    expected = texts(plain)
    with running(config) as daemon:
        for _ in range(30):
            found = [daemon.client.completions.with_raw_response.create(**ASK, prompt=prompt) for prompt in PROMPTS]
            if canary(daemon, "status")["phase"] != "trial":
                break
            arms = list_ended_arms(config.with_suffix(".log"))[-len(PROMPTS) :]
            for arm, one, exact in zip(arms, found, expected, strict=True):
                assert one.headers["X-Outrider-Acceptance"] == ("tolerance" if arm == "canary" else "coupled")
                assert arm == "canary" or one.parse().choices[0].text == exact
        status = canary(daemon, "status")
        assert (status["phase"], status["decision"]["figure"]) == ("rolled_back", "agreement")
        assert status["arms"]["control"]["agreement"]["mean"] == 1.0
        agreement = status["arms"]["canary"]["agreement"]  # after most_requests it must be surely high enough
        assert agreement["low"] < 0.95
        assert agreement["mean"] < 1.0
        assert "the target's own tokens" in run_command(daemon, "canary", "status")
        tolerated = count_by_arm(daemon, "outrider_arm_tolerated_tokens_total")
        assert tolerated["control"] == 0 < tolerated["canary"]
        assert texts(daemon) == expected, "nobody has it any more"
        last = daemon.client.completions.create(**ASK, prompt=PROMPTS[0])
        told = run_command(daemon, "explain", last.id)
        assert "variant: control; the canary's trial: rolled back by the rule" in told
