"""The live state of devices in a real daemon: a competing process moves requests, and every request is explained."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider_lab.bench.cluster.shift import FEW, Traffic, compete
from orchestrator.cli.daemon_socket import query_daemon
from tests.support.daemon import Daemon, outrider_process
from outrider_lab.measure.shift import read_others, serve

_QUIET = 0.2
_NOISY = 0.35
_MOST_S = 240.0
"""Generous: on a machine of its own each of these takes a few seconds (tools/measure_shift.py)."""


def wait_or_skip(met: Callable[[], bool], noisy: Callable[[], bool], what: str, within_s: float = _MOST_S) -> None:
    """Wait until it is so. Where somebody else takes the cores meanwhile, nothing is learnt: the test is skipped."""
    end_s, noisy_s = time.monotonic() + within_s, 0.0
    while not met():
        noisy_s = noisy_s + 0.2 if noisy() else 0.0
        if noisy_s > 2.0:
            pytest.skip(f"another program takes the cores of this machine: {what} cannot be seen")
        assert time.monotonic() < end_s, f"never: {what}"
        time.sleep(0.2)


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda pid: [])(0)) < 2, reason="two cores are needed")
def test_a_competing_process_moves_requests_and_they_come_back(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with serve(tmp_path, (first, second)) as (url, admin):
        for _ in range(40):
            if "utilisation" in str(query_daemon(admin)["devices"]):
                break
            time.sleep(0.2)
        time.sleep(5.0)
        if max(read_others(admin, core) for core in (first, second)) > _QUIET:
            pytest.skip("another program takes the cores of this machine")

        def noisy() -> bool:
            return read_others(admin, first) > _NOISY

        with Traffic(url, admin, "toy") as traffic:
            wait_or_skip(lambda: traffic.share_of("target-1") >= FEW, noisy, "both replicas get requests")
            with compete([second, second]):
                wait_or_skip(lambda: 0.0 <= traffic.share_of("target-1") <= FEW, noisy, "requests leave the core")
                wait_or_skip(lambda: read_others(admin, second) > _QUIET, noisy, "the programs are seen")
            wait_or_skip(lambda: traffic.share_of("target-1") >= FEW, noisy, "requests come back")


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
