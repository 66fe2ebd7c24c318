"""A competing process moves requests away from its core, and they come back when it ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from outrider_lab.bench.cluster.served import Served, serve, wait_until
from outrider_lab.bench.cluster.shift import FEW, Traffic, compete

from tests.support.competing import wait_or_skip

_QUIET = 0.2
_NOISY = 0.35
_READY_S = 90.0
SOURCE = "simulated:toy?base_ms=4&row_ms=1&spin=1"


def serves_twice(served: Served) -> bool:
    replicas = served.query("/admin/status")["replicas"]
    return len(replicas) == 2 and all(replica["phase"] == "ready" for replica in replicas)


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda pid: [])(0)) < 2, reason="two cores are needed")
def test_a_competing_process_moves_requests_and_they_come_back(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    replicas = [{"cores": [core]} for core in (first, second)]
    config = {
        "model": {"source": SOURCE, "adapter": "simulated", "name": "toy", "replicas": replicas},
        "drafts": [],
        "cluster": {"runtime": "local", "orphan_wait_s": 0},
        "store": {"directory": str(tmp_path / "store")},
    }
    with serve(None, tmp_path, config) as served:
        wait_until(lambda: serves_twice(served), _READY_S, "both replicas serve")
        time.sleep(5.0)
        if max(served.read_others("here", [core]) for core in (first, second)) > _QUIET:
            pytest.skip("another program takes the cores of this machine")

        def noisy() -> bool:
            return served.read_others("here", [first]) > _NOISY

        with Traffic(served.url, served.admin, "toy") as traffic:
            wait_or_skip(lambda: traffic.share_of("target-1") >= FEW, noisy, "both replicas get requests")
            with compete([second, second]):
                wait_or_skip(lambda: 0.0 <= traffic.share_of("target-1") <= FEW, noisy, "requests leave the core")
                wait_or_skip(lambda: served.read_others("here", [second]) > _QUIET, noisy, "the programs are seen")
            wait_or_skip(lambda: traffic.share_of("target-1") >= FEW, noisy, "requests come back")
