"""A competing process moves requests away from its core, and they come back when it ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from outrider_lab.bench.cluster.shift import FEW, Traffic, compete
from outrider_lab.measure.shift import read_others, serve

from orchestrator.cli.daemon_socket import query_daemon
from tests.support.competing import wait_or_skip

_QUIET = 0.2
_NOISY = 0.35


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
