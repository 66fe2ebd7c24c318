"""The live state of devices in a real daemon: its status has them, and every request is explained."""

from __future__ import annotations

import time

import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.support.daemon import Daemon, outrider_process


def test_the_status_has_this_hosts_processor_and_a_request_is_explained(plain: Daemon) -> None:
    deadline = time.monotonic() + 120.0
    while not any(one["ours"] is not None for one in plain.status()["devices"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    (processor,) = [one for one in plain.status()["devices"] if one["name"] == "here/CPU"]
    assert processor["ours"] + processor["others"] == pytest.approx(processor["utilisation"])
    assert processor["memory_ours_bytes"] > 0
    answer = plain.client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )
    socket = ["--socket", str(plain.admin)]
    told = outrider_process("explain", answer.id, *socket)
    assert told.returncode == 0, told.stderr
    assert f"{answer.id}, attempt 1" in told.stdout
    assert "chosen: target with " in told.stdout
    assert "prefix_affinity" in told.stdout
    assert "device here/CPU" in outrider_process("status", *socket).stdout
    unknown = outrider_process("explain", "chatcmpl-unknown", *socket)
    assert unknown.returncode == 1
    assert "nothing is known of a request chatcmpl-unknown" in unknown.stderr
    several = plain.client.completions.create(model="toy", prompt="hello", max_tokens=2, n=2)
    routes = query_daemon(plain.admin, f"/admin/explain/{several.id}")["routes"]
    assert sorted(one["request_id"] for one in routes) == [several.id, f"{several.id[:-1]}1"]
