"""A standby of the target in a real daemon: it takes over to the bit, says so, and gives back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import DEFAULT_MAX_RETRIES, InternalServerError

from orchestrator.cli.daemon_socket import query_daemon
from tests.daemon.test_replicas import Readers, ask
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.waiting import until

STANDBY = "failover: {back_after_s: 0.5, standby: [{readiness: %s}]}"


@pytest.fixture(scope="module")
def expected(plain: Daemon) -> dict[int, str]:
    return {number: plain.client.completions.create(**ask(number)).choices[0].text for number in range(4)}


def ask_for_headers(daemon: Daemon) -> tuple[str, str]:
    """Who answers, and what is said, to a client that asks again as clients do by default."""
    answer = daemon.client.with_options(max_retries=DEFAULT_MAX_RETRIES).completions.with_raw_response.create(**ask(0))
    return answer.headers.get("x-outrider-standby", ""), answer.parse().choices[0].text


def until_standby(daemon: Daemon, **expected: Any) -> None:
    """Wait until the only standby waits, loaded."""
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        found = daemon.status()["standbys"]
        if found and all(found[0][key] == value for key, value in expected.items()):
            return
        time.sleep(0.02)
    raise AssertionError(daemon.log.read_text())


def test_a_hot_standby_goes_on_with_the_streams_of_a_killed_target_and_gives_back(tmp_path: Path, expected) -> None:
    # A start takes longer than the streams that go on without it, on a busy machine, too.
    with running(configuration(tmp_path, script="base_ms=30&load_ms=8000", extra=STANDBY % "hot")) as daemon:
        until_standby(daemon, phase="ready", unlike="")
        readers = Readers(daemon, range(4))
        readers.until_all_have_begun()
        os.kill(daemon.status()["ready"]["pid"], signal.SIGKILL)
        until(lambda: "standby" in [one["name"] for one in daemon.status()["replicas"]])
        readers.until_all_go_on(2)
        status = daemon.status()
        assert [one["name"] for one in status["replicas"] if one["streams"]] == ["standby"], "before the target is back"
        assert readers.texts() == expected
        until_standby(daemon, phase="ready")
        assert ask_for_headers(daemon) == ("", expected[0])
        status = daemon.status()
        assert status["taken_over"] == {"same": 1}
        assert status["totals"]["generated"] == 5 * 120


def test_where_all_is_kept_from_work_requests_probes_and_status_give_one_reason(tmp_path: Path) -> None:
    with running(configuration(tmp_path)) as daemon:
        client = daemon.client.with_options(max_retries=0)
        query_daemon(daemon.admin, "/admin/hold", {"kind": "device", "name": "here/cpu:0", "state": "cordoned"})
        with pytest.raises(InternalServerError) as refused:
            client.completions.create(**ask(0))
        why = daemon.status()["detail"]
        assert why.startswith("no target takes requests: device here/CPU is cordoned")
        assert why in str(refused.value)
        ready = httpx.get(f"{daemon.url}/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "model_cordoned")
        assert why in ready.text
        assert why in httpx.get(f"{daemon.url}/health").text
        query_daemon(daemon.admin, "/admin/hold", {"kind": "device", "name": "here/CPU", "state": ""})
        assert client.completions.create(**ask(0)).choices[0].text
        assert httpx.get(f"{daemon.url}/ready").status_code == 200


def test_while_the_target_is_cordoned_a_standby_is_loaded_and_answers_and_says_so(tmp_path: Path, expected) -> None:
    with running(configuration(tmp_path, script="base_ms=10", extra=STANDBY % "warm")) as daemon:
        socket = ("--socket", str(daemon.admin))
        readers = Readers(daemon, range(4))
        readers.until_all_have_begun()
        found = outrider_process("cordon", "worker", "target", *socket)
        assert "cordoned" in found.stdout, found.stderr
        assert ask_for_headers(daemon) == ("standby; bits=same", expected[0])
        assert readers.texts() == expected, "what the target had begun it finished"
        assert 'outrider_standby_takeovers_total{bits="same"' in metrics(daemon)
        assert (
            'outrider_part_health{engine="0",kind="worker",model_name="toy",name="target",state="cordoned"}'
            in metrics(daemon)
        )
        assert "all parts are healthy" in outrider_process("uncordon", "target-0", *socket).stdout, (
            "its name of several"
        )
        assert ask_for_headers(daemon) == ("", expected[0])
        unknown = outrider_process("cordon", "device", "here/none", *socket)
        assert unknown.returncode == 1
        assert unknown.stderr.startswith("outrider: there is no device here/none; there is: device here/")


def metrics(daemon: Daemon) -> str:
    return httpx.get(daemon.url + "/metrics").text


def test_a_device_that_drains_hands_its_streams_to_a_standby(tmp_path: Path, expected) -> None:
    with running(configuration(tmp_path, script="base_ms=40", extra=STANDBY % "hot")) as daemon:
        until_standby(daemon, phase="ready")
        readers = Readers(daemon, range(4))
        readers.until_all_have_begun()
        outrider_process("cordon", "worker", "target", "--drain", "--socket", str(daemon.admin))
        readers.until_all_go_on(2)
        streams = {one["name"]: one["streams"] for one in daemon.status()["replicas"]}
        assert not streams["target"]
        assert readers.texts() == expected
        daemon.wait_for(
            "", health=[{"kind": "worker", "name": "target", "state": "cordoned", "why": "", "wait_s": 0.0}]
        )


def test_an_operator_fails_the_target_over_to_its_standby_and_back(tmp_path: Path, expected) -> None:
    with running(configuration(tmp_path, script="base_ms=10", extra=STANDBY % "warm")) as daemon:
        steer = ("failover", "target-0", "--yes", "--socket", str(daemon.admin))
        readers = Readers(daemon, range(4))
        readers.until_all_have_begun()
        found = outrider_process(*steer, "--to", "standby")
        assert found.returncode == 0, found.stderr
        until_answered_by(daemon, "standby; bits=same", expected[0])
        assert readers.texts() == expected
        assert outrider_process(*steer, "--back").returncode == 0
        until_answered_by(daemon, "", expected[0])


def until_answered_by(daemon: Daemon, who: str, text: str) -> None:
    """Wait until requests are answered there: a warm standby is loaded first."""
    deadline = time.monotonic() + 240.0
    while (found := ask_for_headers(daemon)) != (who, text):
        assert time.monotonic() < deadline, (found, daemon.log.read_text())
        assert found[1] == text
