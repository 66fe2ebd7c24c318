"""Replicas of unlike bits behind one endpoint, in a real daemon: groups, what changes them, and who is told."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from openai import APIStatusError

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_replicas import TOKENS, ask, replicas, until_all_serve
from tests.support.daemon import Daemon, configuration, outrider_process, running, starting
from tests.support.waiting import until

UNLIKE = "[{}, {exactness: kernel, max_running: 4}]"
AT_ONCE = "failover: {after_s: 0}"


class Told(NamedTuple):
    """A stream as its client had it. `fingerprints`: in their order; `marks`: of `usage.system_fingerprints`."""

    text: str
    fingerprints: list[str]
    marks: list[dict[str, Any]]


def read_stream(daemon: Daemon, request: dict[str, Any]) -> Told:
    text, fingerprints, marks = "", list[str](), list[dict[str, Any]]()
    options: Any = {"stream_options": {"include_usage": True}}
    for chunk in daemon.client.completions.create(**request, **options, stream=True):
        text += "".join(choice.text for choice in chunk.choices)
        if chunk.system_fingerprint not in fingerprints[-1:]:
            fingerprints.append(chunk.system_fingerprint)
        if chunk.usage is not None:
            marks = chunk.usage.model_dump().get("system_fingerprints", [])
    return Told(text, fingerprints, marks)


@pytest.fixture(scope="module")
def expected(plain: Daemon) -> dict[int, str]:
    return {number: plain.client.completions.create(**ask(number)).choices[0].text for number in range(6)}


def read_while_one_is_killed(daemon: Daemon) -> list[Told]:
    """Return six streams, during which the second replica's worker was killed once it had made tokens for one."""
    until_all_serve(daemon)
    made = replicas(daemon)[1]["totals"]["generated"]
    with ThreadPoolExecutor(6) as pool:
        reading = [pool.submit(read_stream, daemon, ask(number)) for number in range(6)]

        def has_begun() -> bool:
            second = replicas(daemon)[1]
            going_on = second["streams"] and second["totals"]["generated"] > made + 10
            return going_on or all(stream.done() for stream in reading)

        until(has_begun)
        pid = replicas(daemon)[1]["ready"]["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: replicas(daemon)[1]["phase"] != "ready" or replicas(daemon)[1]["ready"]["pid"] != pid)
        return [stream.result() for stream in reading]


def test_streams_of_a_lost_group_go_on_in_another_and_every_change_is_marked(tmp_path: Path, expected) -> None:
    config = configuration(tmp_path, script="base_ms=15&load_ms=3000", replicas=UNLIKE, extra=AT_ONCE)
    changes = 0
    with running(config) as daemon:
        for _ in range(10):  # on a busy machine streams may have ended before
            answers = read_while_one_is_killed(daemon)
            assert [told.text for told in answers] == list(expected.values()), "no token is lost, and none comes twice"
            for told in answers:
                assert [mark["system_fingerprint"] for mark in told.marks] == told.fingerprints[1:], "told as it was"
                assert all(0 < mark["from_token"] < TOKENS for mark in told.marks)
            changes += sum(len(told.marks) for told in answers)
            if changes:
                break
        assert 0 < changes == sum(daemon.status()["changed_groups"].values())
        assert "outrider_changed_groups_total{" in httpx.get(f"{daemon.url}/metrics").text


def test_a_request_may_ask_for_one_groups_bits(tmp_path: Path, expected) -> None:
    with running(configuration(tmp_path, replicas=UNLIKE)) as daemon:
        until_all_serve(daemon)
        prints: set[str] = set()
        while len(prints) < 2:
            with ThreadPoolExecutor(6) as pool:
                prints |= {told.fingerprints[0] for told in pool.map(lambda n: read_stream(daemon, ask(n)), range(6))}
        for wanted in prints:
            body = ask(1)
            body["extra_body"] = {**body["extra_body"], "system_fingerprint": wanted}
            answer = daemon.client.completions.create(**body)
            assert (answer.system_fingerprint, answer.choices[0].text) == (wanted, expected[1])
        body["extra_body"]["system_fingerprint"] = "fp_000000000000"
        with pytest.raises(APIStatusError) as refused:
            daemon.client.completions.create(**body)
        assert (refused.value.status_code, refused.value.code) == (409, "system_fingerprint_gone")
        assert all(name in str(refused.value) for name in prints)


def test_where_all_are_to_be_alike_unlike_items_are_refused_before_anything_loads(tmp_path: Path) -> None:
    config = configuration(tmp_path, replicas="[{}, {exactness: kernel}], alike: true")
    done = outrider_process("config", "check", str(config))
    assert done.returncode != 0
    assert "cluster.yaml:1: model.replicas[1].exactness: kernel has other bits than bit" in done.stdout + done.stderr


def test_a_stream_that_was_kept_goes_on_in_its_own_group_after_the_daemons_death(tmp_path: Path, expected) -> None:
    config = configuration(tmp_path, script="base_ms=15", replicas=UNLIKE)
    key: Any = {"extra_headers": {"Idempotency-Key": "pools"}}
    with running(config) as daemon:
        until_all_serve(daemon)
        first = iter(daemon.client.completions.create(**ask(2), **key, stream=True))
        before = [next(first) for _ in range(5)]
        daemon.process.kill()
        daemon.process.wait()
    with running(config) as daemon:
        until_all_serve(daemon)
        text, prints = "", set()
        for chunk in daemon.client.completions.create(**ask(2), **key, stream=True):
            text += "".join(choice.text for choice in chunk.choices)
            prints.add(chunk.system_fingerprint)
        assert text == expected[2]
        assert prints == {before[-1].system_fingerprint}


def test_what_each_member_is_stands_in_the_status(tmp_path: Path) -> None:
    with running(configuration(tmp_path, replicas=UNLIKE)) as daemon:
        until_all_serve(daemon)
        described = [(told["ready"]["exactness"], told["ready"]["slots"]) for told in replicas(daemon)]
        assert described[1] == ("kernel", 4)
        assert described[0][0] == "bit"
        assert json.loads(json.dumps(daemon.status()))["changed_groups"] == {}


def run_outrider(daemon: Daemon, *command: str) -> str:
    """Return what a command says of a daemon, on one line."""
    done = outrider_process(*command, "--socket", str(daemon.admin))
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).replace("│", " ").split())


def read_alert_reasons(daemon: Daemon) -> set[str]:
    alerts = query_daemon(daemon.admin, "/admin/alerts")["alerts"]
    return {alert["labels"]["reason"] for alert in alerts if alert["alert"] == "OutriderReplicaFailed"}


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")


@pytest.mark.usefixtures("two_devices")
def test_a_slow_member_that_is_ready_first_keeps_no_fast_one_out_and_everybody_tells_who_serves(
    tmp_path: Path, expected: dict[int, str]
) -> None:
    script = f"base_ms=2&other_ms=20&load_ms=1500&room_kib=1&room_while={tmp_path}/full"
    unlike = "[{device: SIM}, {device: SIM.1, exactness: kernel}]"
    config = configuration(tmp_path, script=script, replicas=unlike, extra="alerts: {every_s: 0.1}")
    config.write_text(config.read_text().replace("runtime: local", "runtime: local, max_restarts: 1"))
    with starting(config) as daemon:
        until(lambda: len(read_workers(daemon)) == 2)
        killed = read_workers(daemon)["target-0"]
        os.kill(killed, signal.SIGKILL)
        until(lambda: read_workers(daemon).get("target-0", killed) != killed)
        loading = read_workers(daemon)["target-0"]
        os.kill(loading, signal.SIGSTOP)
        until(lambda: httpx.get(f"{daemon.url}/ready").status_code == httpx.codes.OK)
        first = httpx.get(f"{daemon.url}/ready").json()
        assert first["status"] == "degraded"
        assert first["replicas"]["missing"][0].startswith("target-0 is starting")
        assert read_stream(daemon, ask(1)).text == expected[1]
        os.kill(loading, signal.SIGCONT)
        until_all_serve(daemon)
        assert httpx.get(f"{daemon.url}/ready").json()["status"] == "ready"
        assert run_outrider(daemon, "health") == "all parts are healthy"
        assert read_alert_reasons(daemon) == set()
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda number: read_stream(daemon, ask(number)), range(6)))
        assert [stream.text for stream in answers] == list(expected.values())
        assert replicas(daemon)[0]["totals"]["generated"] > 0, "the fast one takes requests, too"
        (pool_view,) = query_daemon(daemon.admin, "/admin/explain")["models"]
        assert [group["members"] for group in pool_view["groups"]] == [["target-0"], ["target-1"]]
        assert [group["then"] for group in pool_view["groups"]] == [["target-1"], ["target-0"]]
        losses = {loss["part"]: loss for loss in pool_view["losses"]}
        assert losses["worker target-0"]["share"] > 0.5 > losses["device here/SIM.1"]["share"] > 0.0
        assert losses["worker target-0"]["streams"] == "change_bits"
        assert "go on at target-1, with other bits from there on" in run_outrider(daemon, "explain")
        (tmp_path / "full").touch()
        os.kill(replicas(daemon)[1]["ready"]["pid"], signal.SIGKILL)
        until(lambda: read_alert_reasons(daemon) == {"restarts"})
        (why,) = daemon.status()["serving"]["missing"]
        assert why.startswith("target-1 is out of restarts: ")
        answer = httpx.get(f"{daemon.url}/ready")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        assert answer.json()["replicas"]["missing"][0].startswith("target-1 is out of restarts: ")
        assert "the model 'toy' is degraded: target-1 is out of restarts: " in run_outrider(daemon, "health")
        refused = outrider_process("plan", "diff", "--config", str(config))
        assert "target-1 is out of restarts: " in " ".join((refused.stdout + refused.stderr).split())
        (pool_view,) = query_daemon(daemon.admin, "/admin/explain")["models"]
        assert [loss["streams"] for loss in pool_view["losses"]] == ["wait", "wait"]
        assert read_stream(daemon, ask(2)).text == expected[2]


def read_workers(daemon: Daemon) -> dict[str, int]:
    """Return the processes of the replicas by their names, whether they load or serve."""
    pairs = [(seen["name"], re.search(r"pid (\d+)", seen["worker"])) for seen in replicas(daemon)]
    return {name: int(match[1]) for name, match in pairs if match is not None}
