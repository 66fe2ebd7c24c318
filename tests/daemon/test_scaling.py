"""Replicas that follow load in real daemons: a burst brings more, silence takes them back, and no token differs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.profiles import store_simulated_profiles
from tests.support.waiting import until

STREAMS = 9
WITHIN_S = 240.0
"""Generous: each start takes some seconds, and there may be two of them."""
LIMITS = "limits: {max_running: 3}"


def ask(number: int) -> dict[str, Any]:
    """Every second one is greedy, the others are seeded."""
    drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    common = {"model": "toy", "prompt": f"the sea is {number} " * 4, "max_tokens": 500}
    return {**common, **drawn, "extra_body": {"ignore_eos": True}}


def text_of(daemon: Daemon, number: int) -> str:
    return str(daemon.client.completions.create(**ask(number)).choices[0].text)


@pytest.fixture(scope="module")
def expected(plain: Daemon) -> list[str]:
    """What one replica says, to which nothing happens."""
    return [text_of(plain, number) for number in range(STREAMS)]


@contextmanager
def burst(daemon: Daemon, streams: int = STREAMS) -> Iterator[list[Future[str]]]:
    """Ask for so many at once."""
    with ThreadPoolExecutor(streams) as pool:
        yield [pool.submit(text_of, daemon, number) for number in range(streams)]


def count(daemon: Daemon) -> int:
    return len(daemon.status()["replicas"])


def count_planned(daemon: Daemon) -> int:
    return len(query_daemon(daemon.admin, "/admin/plan")["plan"]["replicas"])


def gauges(daemon: Daemon) -> dict[str, float]:
    lines = httpx.get(f"{daemon.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(("outrider_replicas_ready", "outrider_replicas_wanted"))]
    return {line.partition("{")[0].removeprefix("outrider_replicas_"): float(line.split(" ")[-1]) for line in found}


def find_pid(config: Path, worker: str) -> int | None:
    """The process of a worker, as the log has it from its start on."""
    found = re.findall(rf"worker {worker} started: local pid (\d+)", config.with_suffix(".log").read_text())
    return int(found[-1]) if found else None


def test_a_burst_brings_replicas_and_silence_takes_them_back_without_a_token(tmp_path, expected):
    replicas = "{min: 1, max: 3, idle_s: 3, places: [{}, {}, {}]}"
    config = configuration(tmp_path, script="base_ms=40", replicas=replicas, extra=f"{LIMITS}\ndrafts: []")
    with running(config) as daemon:
        assert count(daemon) == 1
        assert gauges(daemon) == {"wanted": 1, "ready": 1}
        with burst(daemon) as texts:
            until(lambda: count(daemon) == 3, WITHIN_S)
            until(lambda: gauges(daemon) == {"wanted": 3, "ready": 3}, WITHIN_S)
            scaling = daemon.status()["scaling"]
            assert "2 -> 3 in " in scaling["last"]
            assert "requests for" in scaling["why"]
            shown = " ".join(outrider_process("status", "--socket", str(daemon.admin)).stdout.split())
            assert "3 replicas; 3 wanted, of 1 to 3: " in shown
            assert [text.result(WITHIN_S) for text in texts] == expected
        until(lambda: count(daemon) == 1, WITHIN_S)
        status = daemon.status()
        assert status["totals"]["restarts"] == 0
        assert status["totals"]["generated"] == sum(ask(number)["max_tokens"] for number in range(STREAMS))
        assert "one less would carry them" in status["scaling"]["last"]
        assert text_of(daemon, 1) == expected[1]
    log = config.with_suffix(".log").read_text()
    assert log.count("load asks for one more replica") == 2
    assert log.count("one replica is not needed") == 2


def test_streams_of_a_replica_that_ends_go_on_elsewhere(tmp_path, expected):
    replicas = "{min: 1, max: 2, idle_s: 1, places: [{}, {}]}"
    extra = "limits: {max_running: 4}\ndrafts: []"
    config = configuration(tmp_path, script="base_ms=40", replicas=replicas, extra=extra)
    with running(config) as daemon, ThreadPoolExecutor(4) as pool:
        first = [pool.submit(text_of, daemon, number) for number in range(4)]
        until(lambda: count(daemon) == 2, WITHIN_S)
        for text in first:
            text.result(WITHIN_S)
        later = [pool.submit(text_of, daemon, number) for number in (4, 5)]
        until(lambda: count(daemon) == 1, WITHIN_S)
        assert not all(text.done() for text in later), "it went while they ran"
        assert [text.result(WITHIN_S) for text in (*first, *later)] == expected[:6]
        assert daemon.status()["totals"]["generated"] == 6 * ask(0)["max_tokens"]


@pytest.mark.slow
def test_a_replica_that_is_killed_while_it_loads_costs_nobody_a_token(tmp_path, expected):
    replicas = "{min: 1, max: 2, idle_s: 60, places: [{}, {}]}"
    config = configuration(tmp_path, script="base_ms=40&load_ms=2500", replicas=replicas, extra=f"{LIMITS}\ndrafts: []")
    with running(config) as daemon, burst(daemon, 6) as texts:
        until(lambda: find_pid(config, "target-1") is not None, WITHIN_S)
        pid = find_pid(config, "target-1")
        assert pid is not None
        assert count(daemon) == 1, "it loads, and gets nothing yet"
        os.kill(pid, signal.SIGKILL)
        until(lambda: count(daemon) == 2, WITHIN_S)
        assert find_pid(config, "target-1") != pid
        assert [text.result(WITHIN_S) for text in texts] == expected[:6]
        assert daemon.status()["losses"] == [], "nobody lost anything by it"


@pytest.mark.slow
def test_a_start_that_fails_is_told_and_tried_again_later(tmp_path, expected):
    replicas = "{min: 1, max: 2, idle_s: 60, places: [{}, {}]}"
    extra = f"{LIMITS}\ndrafts: []"
    config = configuration(tmp_path, script="base_ms=40&load_ms=2500", replicas=replicas, extra=extra)
    config.write_text(config.read_text().replace("runtime: local", "runtime: local, max_restarts: 0"))
    with running(config) as daemon, burst(daemon, 6) as texts:
        until(lambda: find_pid(config, "target-1") is not None, WITHIN_S)
        pid = find_pid(config, "target-1")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: "one more could not be had: " in daemon.status()["scaling"]["last"], WITHIN_S)
        assert "there is no replica more: worker target-1 cannot serve: " in config.with_suffix(".log").read_text()
        assert (count(daemon), gauges(daemon)) == (1, {"wanted": 2, "ready": 1})
        until(lambda: count(daemon) == 2, WITHIN_S)
        assert [text.result(WITHIN_S) for text in texts] == expected[:6]


@pytest.mark.slow
def test_a_replica_that_dies_while_another_one_loads_is_started_again_too(tmp_path, expected):
    replicas = "{min: 1, max: 2, idle_s: 60, places: [{}, {}]}"
    extra = f"{LIMITS}\ndrafts: []"
    config = configuration(tmp_path, script="base_ms=40&load_ms=1500", replicas=replicas, extra=extra)
    with running(config) as daemon, burst(daemon, 6) as texts:
        until(lambda: find_pid(config, "target-1") is not None, WITHIN_S)
        os.kill(daemon.status()["replicas"][0]["ready"]["pid"], signal.SIGKILL)
        until(lambda: gauges(daemon) == {"wanted": 2, "ready": 2}, WITHIN_S)
        assert [text.result(WITHIN_S) for text in texts] == expected[:6]
        assert daemon.status()["totals"]["restarts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("second_ms", "pays"), [(20.0, True), (900.0, False)])
def test_with_a_plan_one_more_is_started_where_that_is_predicted_to_serve_more(
    tmp_path, monkeypatch, expected, second_ms, pays
):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    other_ms = second_ms - 20.0
    script = f"base_ms=20&row_ms=5&other_ms={other_ms:g}"
    rows = {"SIM": 25.0, "SIM.1": second_ms + 5.0}
    store_simulated_profiles(tmp_path / "store" / "profiles", rows, script=script, more_row_ms=5.0)
    extra = f"placement: {{profile: never, drift_tolerance: 5}}\n{LIMITS}\ndrafts: []"
    config = configuration(tmp_path, script=script, replicas="{min: 1, max: 2, idle_s: 3}", extra=extra)
    config.write_text(config.read_text().replace("adapter: simulated", "adapter: auto, device: auto", 1))
    with running(config) as daemon, burst(daemon) as texts:
        assert [one["ready"]["device"] for one in daemon.status()["replicas"]] == ["SIM"]
        if pays:
            until(lambda: count(daemon) == 2, WITHIN_S)
            assert {one["ready"]["device"] for one in daemon.status()["replicas"]} == {"SIM", "SIM.1"}
            until(lambda: count_planned(daemon) == 2)
        else:
            until(lambda: "one more could not be had" in daemon.status()["scaling"]["last"], WITHIN_S)
            assert gauges(daemon) == {"wanted": 2, "ready": 1}
        assert [text.result(WITHIN_S) for text in texts] == expected
        until(lambda: count(daemon) == 1, WITHIN_S)
        until(lambda: count_planned(daemon) == 1)
        assert daemon.status()["totals"]["generated"] == sum(ask(number)["max_tokens"] for number in range(STREAMS))


@pytest.mark.slow
def test_without_a_plan_as_many_run_as_have_cores_of_their_own(tmp_path):
    config = configuration(
        tmp_path, script="base_ms=20", replicas="{min: 1, max: 2, idle_s: 60}", extra=f"{LIMITS}\ndrafts: []"
    )
    refused = outrider_process("serve", "--config", str(config))
    assert refused.returncode != 0
    assert "cluster.yaml:1: model.replicas.places: is missing: a second replica would compute on" in refused.stderr
    config.write_text(f"{config.read_text()}devices: {{threads: 1024}}\n")
    with running(config) as daemon, burst(daemon, 4) as texts:
        until(lambda: "there is no place for one more" in daemon.status()["scaling"]["why"], WITHIN_S)
        assert gauges(daemon) == {"wanted": 2, "ready": 1}
        time.sleep(2.0)
        assert count(daemon) == 1
        for text in texts:
            text.result(WITHIN_S)
