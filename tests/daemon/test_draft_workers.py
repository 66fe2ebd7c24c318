"""A draft model in a worker of its own, in a real daemon: killed, hung or slow, clients see the target's tokens."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from orchestrator.cli.status import draft_line
from tests.daemon.test_drafts import drafts, read_counters
from tests.daemon.test_life import collect
from tests.support import tiny_models
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.waiting import until

ASK: dict[str, Any] = {
    "model": "toy",
    "prompt": "the sea is",
    "max_tokens": 300,
    "temperature": 0.8,
    "seed": 3,
    "extra_body": {"ignore_eos": True, "speculative_config": {"num_speculative_tokens": 4}},
}
RUNTIMES = ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]


def own(script: str = "", **keys: Any) -> str:
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    return drafts(f"method: model, source: 'simulated:toy?{script}', adapter: simulated, process: own{more}")


@pytest.fixture(scope="module")
def expected(plain) -> str:
    return str(plain.client.completions.create(**ASK).choices[0].text)


def draft_of(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["drafts"][0]
    return found


def count_accepted(daemon: Daemon) -> int:
    return int(daemon.status()["totals"]["accepted"])


def until_it_drafts(daemon: Daemon, expected: str) -> None:
    """Decode until drafts make up most of an answer."""

    def is_drafting() -> bool:
        before = count_accepted(daemon)
        assert daemon.client.completions.create(**ASK).choices[0].text == expected
        return count_accepted(daemon) - before > 100

    until(is_drafting)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_killed_or_hung_in_a_stream_it_costs_no_token_and_comes_back(tmp_path: Path, expected, runtime):
    extra = own(overlap="always", answer_timeout_s=0.5)
    with running(configuration(tmp_path, script="base_ms=3", runtime=runtime, extra=extra)) as daemon:
        until(lambda: draft_of(daemon)["phase"] == "ready")
        until_it_drafts(daemon, expected)
        pids = []
        for number in (signal.SIGKILL, signal.SIGSTOP):
            pids.append(draft_of(daemon)["ready"]["pid"])
            assert text_while(daemon, pids[-1], number) == expected
            until_it_drafts(daemon, expected)
            draft = draft_of(daemon)
            # On a busy machine one that works may not answer in time, and be taken for one that hangs.
            assert draft["restarts"] >= len(pids)
            until(lambda: draft_of(daemon)["phase"] == "ready")
            draft = draft_of(daemon)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert draft["ready"]["pid"] not in pids
        assert daemon.status()["totals"]["restarts"] == 0
        assert daemon.stop() == 0
        assert not psutil.pid_exists(draft["ready"]["pid"])


def text_while(daemon: Daemon, pid: int, number: signal.Signals) -> str:
    """Return a stream's text; its draft worker gets a signal in the middle of it."""
    pieces: list[str] = []
    started = threading.Event()
    stream = daemon.client.completions.create(**ASK, stream=True)
    reader = threading.Thread(target=collect, args=(stream, pieces, started))
    reader.start()
    assert started.wait(120)
    os.kill(pid, number)
    reader.join(240)
    return "".join(pieces)


def test_status_and_metrics_say_what_it_does(tmp_path: Path, expected, outrider):
    extra = own(overlap="always")
    with running(configuration(tmp_path, script="base_ms=3", extra=extra)) as daemon:
        until(lambda: draft_of(daemon)["phase"] == "ready")
        until_it_drafts(daemon, expected)
        daemon.wait_for("gauges", running=0)
        (state,) = daemon.status()["gauges"]["drafters"]
        assert (state["name"], state["state"], state["device"]) == ("model", "ok", "SIM")
        assert state["remote"]["ahead_hits"] > 0
        assert state["remote"]["connections"] == 1
        assert state["remote"]["peak_rss_bytes"] > 10_000_000
        told = read_counters(daemon.url, "model")
        assert told["up"] == 1.0
        assert told["accepted_tokens_total"] > 100
        assert told["asks_total"] >= told["ahead_hits_total"] > 0
        assert told["outrider_draft_worker_restarts_total"] == 0.0
        shown = " ".join(outrider("status", "--socket", str(daemon.admin))[1].split())
        assert f"local pid {draft_of(daemon)['ready']['pid']}" in shown
        assert "drafts ahead:" in shown
        key = draft_of(daemon)["ready"]["door"]
        assert all(address.startswith("unix:@") for address in key)


def test_a_draft_that_cannot_be_had_never_keeps_the_target_from_serving(tmp_path: Path, expected, outrider):
    config = configuration(tmp_path, extra=own("fault=nonsense"))
    with running(config) as daemon:
        assert daemon.client.completions.create(**ASK).choices[0].text == expected
        until(lambda: draft_of(daemon)["phase"] == "failed")
        assert "no fault is called 'nonsense'" in draft_of(daemon)["detail"]
        assert "FAILED" in outrider("status", "--socket", str(daemon.admin))[1]


def test_a_draft_slower_than_the_target_does_not_hold_it_up(tmp_path: Path, expected):
    def seconds(daemon: Daemon) -> float:
        started_s = time.monotonic()
        assert daemon.client.completions.create(**ASK).choices[0].text == expected
        return time.monotonic() - started_s

    with running(configuration(tmp_path, script="base_ms=5", extra=own("base_ms=60"))) as daemon:
        until(lambda: draft_of(daemon)["phase"] == "ready")
        seconds(daemon)
        assert seconds(daemon) < ASK["max_tokens"] * 0.06 / 2  # it would be all of that if each draft were waited for
        daemon.wait_for("gauges", running=0)
        remote = daemon.status()["gauges"]["drafters"][0]["remote"]
        assert remote["late"] > remote["in_time"]


@pytest.mark.parametrize(
    ("keys", "runtime", "said"),
    [
        ("max_wait_ms: 5", "local", "drafts[0].max_wait_ms: goes with process: own"),
        ("process: own, host: 10.0.0.2", "local", "drafts[0].host: goes with Ray, which cluster.address"),
        ("workers: {min: 1}", "local", "drafts[0].workers: goes with process: own"),
    ],
)
def test_a_key_that_would_change_nothing_is_refused(tmp_path: Path, keys, runtime, said):
    extra = drafts(f"method: model, source: 'simulated:toy', adapter: simulated, {keys}")
    found = outrider_process("serve", "--config", str(configuration(tmp_path, runtime=runtime, extra=extra)))
    assert found.returncode == 1
    assert said in found.stderr


def test_replicas_that_share_a_draft_worker_say_what_plain_ones_say_and_who_shares_it(tmp_path: Path, plain, outrider):
    asks = [ASK | {"prompt": f"the sea is {number} " * 6, "seed": number} for number in range(6)]
    expected = [plain.client.completions.create(**ask).choices[0].text for ask in asks]
    extra = own(overlap="always", workers="{min: 1}")  # a busy machine would bring a second one
    with running(configuration(tmp_path, script="base_ms=5", extra=extra, replicas="2")) as daemon:
        names = ["target-0", "target-1"]
        until(lambda: sorted(draft_of(daemon)["connected"]) == names)

        def both_draft() -> bool:
            with ThreadPoolExecutor(len(asks)) as pool:
                found = list(pool.map(lambda ask: daemon.client.completions.create(**ask).choices[0].text, asks))
            assert found == expected
            return min(one["totals"]["accepted"] for one in daemon.status()["replicas"]) > 100

        until(both_draft)
        until(lambda: (draft_of(daemon)["load"] or {}).get("targets") == 2)  # it tells now and then
        (draft,) = daemon.status()["drafts"]
        assert (sorted(draft["targets"]), draft["number"]) == (names, 0)
        told = read_counters(daemon.url, "model")
        assert told["outrider_draft_worker_targets"] == 2.0
        assert 0.0 <= told["outrider_draft_worker_busy"] <= 1.0
        assert told["outrider_draft_worker_restarts_total"] == 0.0
        up = [line for line in httpx.get(f"{daemon.url}/metrics").text.splitlines() if "drafter_up{" in line]
        assert len([line for line in up if line.endswith(" 1.0")]) == 2, "one for each replica"
        shown = " ".join(outrider("status", "--socket", str(daemon.admin))[1].replace("│", " ").split())
        assert "for replica 0, replica 1" in shown
        pid = draft["ready"]["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: draft_of(daemon)["restarts"] == 1 and sorted(draft_of(daemon)["connected"]) == names)
        assert both_draft()
        assert daemon.stop() == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_it_drafts_ahead_where_its_cores_are_not_the_targets(tmp_path: Path):
    tiny_models.write_model(tmp_path / "tiny", "llama", kind="BF16")
    mine, other = sorted(os.sched_getaffinity(0))[:2]
    draft = "method: model, source: tiny, process: own, cores"
    config = configuration(
        tmp_path, extra=drafts(f"{draft}: [{other}]", f"{draft}: [{mine}]", draft.rpartition(",")[0])
    )
    text = config.read_text(encoding="utf-8").partition("\n")[2]
    config.write_text(f"model: {{source: tiny, name: toy, replicas: [{{cores: [{mine}]}}]}}\n{text}", encoding="utf-8")
    with running(config) as daemon:
        until(lambda: [one["phase"] for one in daemon.status()["drafts"]] == ["ready"] * 3)

        def all_known() -> bool:
            daemon.client.completions.create(**ASK | {"max_tokens": 8})
            states = (daemon.status()["gauges"] or {}).get("drafters", [])
            return [one["state"] for one in states] == ["ok"] * 3

        until(all_known)
        states = daemon.status()["gauges"]["drafters"]
        assert [one["remote"]["runs_ahead"] for one in states] == [True, False, False]


def test_replicas_of_a_draft_are_listed_by_number_whichever_came_up_first():
    draft = {"phase": "ready", "detail": "", "worker": "draft-0", "restarts": 0, "load": None, "ready": None}
    draft |= {"targets": ["target-10", "target-2", "target-0"], "connected": ["target-10", "target-0"]}
    answer = {"replicas": [{"name": f"target-{number}", "engine": str(number)} for number in range(11)]}
    assert draft_line(draft, answer).endswith("for replica 0, replica 2 (not connected), replica 10")


def test_a_connected_draft_is_said_to_work_before_the_first_request(tmp_path: Path, outrider):
    with running(configuration(tmp_path, extra=own(overlap="always"))) as daemon:
        until(lambda: draft_of(daemon)["phase"] == "ready")
        until(lambda: [one["state"] for one in daemon.status()["gauges"]["drafters"]] == ["ok"])
        assert daemon.status()["totals"]["rounds"] == 0
        shown = outrider("status", "--socket", str(daemon.admin))[1]
        assert "STARTING" not in shown


def test_counts_of_drafters_outlive_their_worker_and_add_up(tmp_path: Path, outrider):
    with running(configuration(tmp_path, script="base_ms=2", extra="drafts: [{method: suffix}]")) as daemon:
        ask = ASK | {"temperature": 0, "max_tokens": 200}
        daemon.client.completions.create(**ask)
        before = daemon.status()["totals"]
        assert before["by_drafter"]["suffix"]["drafted"] == before["drafted"] > 0
        os.kill(daemon.status()["ready"]["pid"], signal.SIGKILL)
        daemon.wait_for("totals", seconds=120, restarts=1)
        daemon.wait_for("", seconds=120, phase="ready")
        daemon.client.completions.create(**ask)
        daemon.wait_for("gauges", running=0)
        after = daemon.status()
        counts = after["totals"]["by_drafter"]["suffix"]
        assert counts["drafted"] == after["totals"]["drafted"] > before["drafted"]
        assert counts["accepted"] == after["totals"]["accepted"]
        shown = " ".join(outrider("status", "--socket", str(daemon.admin))[1].split())
        assert f"{counts['accepted']} of {counts['drafted']} draft tokens accepted" in shown
