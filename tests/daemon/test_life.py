"""The life of the daemon: it drains, survives its worker, and says in one line why it cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.support.daemon import Daemon, configuration, outrider_process, running

LONG: dict[str, Any] = {
    "model": "toy",
    "prompt": "the sea is",
    "max_tokens": 150,
    "temperature": 0.8,
    "seed": 3,
    "extra_body": {"ignore_eos": True},
}


def collect(stream: Any, into: list[str], started: threading.Event) -> None:
    for chunk in stream:
        if chunk.choices:
            into.append(chunk.choices[0].text)
            started.set()


def kill_worker_in_a_stream(daemon: Daemon) -> int:
    """See that the stream loses no token, and return the process of the next worker."""
    expected = daemon.client.completions.create(**LONG).choices[0].text
    before = daemon.status()
    pieces: list[str] = []
    started = threading.Event()
    stream = daemon.client.completions.create(**LONG, stream=True)
    reader = threading.Thread(target=collect, args=(stream, pieces, started))
    reader.start()
    assert started.wait(120)
    os.kill(before["ready"]["pid"], signal.SIGKILL)
    reader.join(240)
    assert "".join(pieces) == expected
    after = daemon.status()
    assert after["ready"]["pid"] != before["ready"]["pid"]
    assert after["totals"]["restarts"] == before["totals"]["restarts"] + 1
    return int(after["ready"]["pid"])


def test_a_killed_worker_costs_a_pause_and_no_token(tmp_path):
    with running(configuration(tmp_path, script="base_ms=10")) as daemon:
        pid = kill_worker_in_a_stream(daemon)
        assert daemon.stop() == 0
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("fault", ["segfault", "device_lost", "capacity"])
def test_a_worker_that_dies_of_itself_is_replaced(tmp_path, fault):
    script = f"base_ms=5&fault={fault}&arm=64&at=8&once={tmp_path}/struck"
    with running(configuration(tmp_path, script=script)) as daemon:
        ask = LONG | {"prompt": "@ the sea"}
        struck = daemon.client.completions.create(**ask).choices[0].text
        assert Path(tmp_path, "struck").exists()
        assert daemon.status()["totals"]["restarts"] == 1
        assert daemon.client.completions.create(**ask).choices[0].text == struck


def test_sigterm_finishes_running_streams_refuses_new_ones_and_exits_0(tmp_path):
    with running(configuration(tmp_path, script="base_ms=15")) as daemon:
        expected = daemon.client.completions.create(**LONG).choices[0].text
        pieces: list[str] = []
        started = threading.Event()
        stream = daemon.client.completions.create(**LONG, stream=True)
        reader = threading.Thread(target=collect, args=(stream, pieces, started))
        reader.start()
        assert started.wait(120)
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_for("", phase="draining")
        with pytest.raises(openai.InternalServerError) as refused:
            daemon.client.completions.create(**LONG)
        assert refused.value.status_code == 503
        assert "Retry-After" in refused.value.response.headers
        reader.join(240)
        assert "".join(pieces) == expected
        assert daemon.process.wait(120) == 0
        assert not daemon.admin.exists()


def test_the_drain_is_bounded(tmp_path):
    config = configuration(tmp_path, script="base_ms=20", extra="limits: {drain_timeout_s: 0.5}")
    body = LONG | {"max_tokens": 3000, "stream": True}
    with running(config) as daemon, daemon.client.completions.create(**body) as stream:
        next(iter(stream))
        started_s = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - started_s < 10


def test_a_request_that_kills_workers_is_ended_and_the_daemon_serves_on(tmp_path, outrider):
    with running(configuration(tmp_path, script="base_ms=2&fault=abort&arm=64&at=1")) as daemon:
        deadly = LONG | {"prompt": "@"}
        for _ in range(2):
            with pytest.raises(openai.UnprocessableEntityError) as ended:  # at once: the client does not retry it
                daemon.client.completions.create(**deadly, timeout=180)
            assert ended.value.code == "request_quarantined"
        daemon.wait_for("", phase="ready", seconds=120)
        assert daemon.client.completions.create(**LONG).choices[0].text
        assert daemon.status()["totals"]["restarts"] == 2
        socket = ("--socket", str(daemon.admin))
        code, listed, _ = outrider("quarantine", "list", "--json", *socket)
        assert code == 0
        (refused,) = json.loads(listed)["quarantined"]
        assert refused["deaths"] == 2
        assert refused["digest"] in outrider("quarantine", "list", *socket)[1]
        assert outrider("quarantine", "release", "unknown", *socket)[0] == 1
        assert outrider("quarantine", "release", *socket)[0] == 2
        assert refused["digest"] in outrider("quarantine", "release", refused["digest"], *socket)[1]
        assert "no request is refused" in outrider("quarantine", "list", *socket)[1]


def test_a_model_that_cannot_load_ends_the_daemon_with_one_line(tmp_path):
    config = configuration(tmp_path, script="fault=nonsense")
    done = outrider_process("serve", "--config", str(config))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("outrider: simulated: no fault is called 'nonsense'")
    assert "Traceback" not in done.stderr


def test_a_device_that_keeps_no_bits_does_not_serve_under_bit(tmp_path):
    done = outrider_process("serve", "--config", str(configuration(tmp_path, script="unsteady=1")))
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("outrider: ")
    assert "no numerical class is fit for exactness bit" in said
    assert "Traceback" not in done.stderr


def test_a_device_whose_kernels_change_is_served_in_a_class_that_holds_and_status_says_so(tmp_path):
    with running(configuration(tmp_path, script="kernel_rows=6")) as daemon:
        ready = daemon.status()["ready"]
        assert ready["row_invariant"] is True
        assert ready["numerical_class"].endswith("forwards of 16 rows")
        assert any("rows at a time" in one for one in ready["classes_rejected"])
        options = LONG | {"max_tokens": 40}
        spoken = daemon.client.completions.create(**options).choices[0].text
        off = options["extra_body"] | {"speculative_config": {"method": "off"}}
        plain = daemon.client.completions.create(**(options | {"extra_body": off})).choices[0].text
        assert plain == spoken
        shown = outrider_process("status", "--socket", str(daemon.admin)).stdout
    assert "class not taken" in shown
    assert ready["class_fingerprint"] in shown


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = outrider_process("serve", "--config", str(configuration(tmp_path)), "--port", port)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_before_it_is_ready_it_lives_and_says_so(tmp_path, outrider):
    config = configuration(tmp_path, script="load_ms=60000")  # it is ended first
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli.main", "serve", "--config", str(config)], stderr=log
    )
    try:
        deadline = time.monotonic() + 120
        answer: dict[str, Any] = {}
        while time.monotonic() < deadline and not answer.get("worker"):
            code, out, _ = outrider("status", "--json", "--socket", str(tmp_path / "admin.sock"))
            answer = json.loads(out) if code == 0 else {}
            time.sleep(0.02)
        url = answer["api"].removesuffix("/v1")
        assert answer["phase"] == "starting"
        assert httpx.get(f"{url}/health").status_code == 200
        not_ready = httpx.get(f"{url}/ready")
        assert not_ready.status_code == 503
        assert "Retry-After" in not_ready.headers
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        log.close()


def test_two_daemons_share_neither_their_state_nor_an_admin_socket(tmp_path):
    config = configuration(tmp_path)
    with running(config) as daemon:
        done = outrider_process("serve", "--config", str(config))
        assert done.returncode == 1
        said = done.stderr.splitlines()[-1]
        assert said.startswith(
            f"outrider: another daemon (pid {daemon.process.pid}) serves with the state in {tmp_path}"
        )
        other = tmp_path / "other.yaml"
        other.write_text(config.read_text().replace(f"{tmp_path}/state", f"{tmp_path}/other"))
        done = outrider_process("serve", "--config", str(other))
        assert done.returncode == 1
        assert "admin socket" in done.stderr
        assert daemon.client.completions.create(**LONG).choices[0].text


def late_tokens_are_followed(daemon: Daemon) -> None:
    """Requests that meet their TTFT and miss their TPOT: judged at the API, followed in the worker, and logged."""
    for _ in range(3):
        daemon.client.completions.create(model="toy", prompt="the sea", max_tokens=20, extra_body={"ignore_eos": True})
    found = daemon.status()["slo"]
    assert (found["met"], found["missed"]) == (0, 3)
    text = httpx.get(f"{daemon.url}/metrics").text
    assert 'outrider_slo_requests_met_total{engine="0",model_name="toy",objective="ttft"} 3.0' in text
    assert 'outrider_slo_requests_missed_total{engine="0",model_name="toy",objective="all"} 3.0' in text
    deadline = time.monotonic() + 60.0
    while "prefill_gives_way" not in daemon.status()["replicas"][0]["gauges"]["slo"]["levers"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "objectives of target: TTFT p95" in daemon.log.read_text()


def test_status_for_people_and_without_a_daemon(tmp_path, outrider):
    objectives = "slo: {ttft_ms: 60000, tpot_ms: 1, tpot_percentile: 90}"
    with running(configuration(tmp_path, script="base_ms=8", extra=objectives)) as daemon:
        late_tokens_are_followed(daemon)
        shown = outrider("status", "--socket", str(daemon.admin)).stdout
        for _ in range(5):  # what was late is forgotten after some seconds, which a busy machine may take to ask
            if "prefill gives way" in shown:
                break
            daemon.client.completions.create(model="toy", prompt="the sea", max_tokens=20)
            shown = outrider("status", "--socket", str(daemon.admin)).stdout
        for word in (
            "ready",
            "simulated",
            "does not depend on the",
            "suffix",
            "adapts, up to 12",
            "TPOT p90",
            "prefill gives way",
        ):
            assert word in shown
        refused = outrider("canary", "promote", "--socket", str(daemon.admin))
        assert refused.returncode == 1
        assert refused.stderr.startswith("outrider: there is no canary: set canary.share")
    gone = outrider("status", "--socket", str(tmp_path / "admin.sock"))
    assert gone.returncode == 1
    assert gone.stderr.startswith("outrider: no daemon answers")
