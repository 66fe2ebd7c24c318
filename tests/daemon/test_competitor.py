"""A real program takes the processor that a draft runs on: the plan moves the draft, and it returns when that ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.support.asking import asking
from tests.support.competing import compete, wait_or_skip
from tests.support.daemon import Daemon, configuration, running
from tests.support.profiles import store_simulated_profiles

ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
GREEDY, SEEDED = ASK | {"temperature": 0}, ASK | {"temperature": 0.8, "seed": 5}
PROGRAMS = 8
"""On each core. The draft's worker has to share it with them."""
_QUIET = 0.3
"""Of the processor's time: what other programs may take for the draft to be best there all the same."""
_WITHIN_S = 240.0
_SETTLE_S = 8.0
"""Behind the programs' end, for the mean of the load."""
TARGET = "base_ms=20"
DRAFT = "base_ms=1.5&other_ms=2&spin=2"


def write_config(directory: Path) -> Path:
    """A target on a device of its own, and a draft that may be on the processor or, slower, on another device."""
    store = directory / "store" / "profiles"
    store_simulated_profiles(store, {"SIM": 20.0}, script=TARGET)
    for device, row_ms in (("CPU", 1.5), ("SIM.1", 3.5)):
        store_simulated_profiles(store, {device: row_ms}, "simulated-toy", "draft", script=DRAFT)
    draft = f"{{method: model, source: 'simulated:toy?{DRAFT}', adapter: auto, device: auto}}"
    often = "load_lasts_s: 8, replan_pause_s: 2"
    placement = f"{{profile: never, draft_acceptance: 0.8, {often}, drift_tolerance: 9, standby: false}}"
    path = configuration(directory, script=TARGET, extra=f"drafts: [{draft}]\nplacement: {placement}")
    path.write_text(path.read_text().replace("adapter: simulated", "adapter: auto, device: auto", 1))
    return path


def find_draft(daemon: Daemon) -> str:
    """Where the running plan has its draft; "" where it has none."""
    plan = query_daemon(daemon.admin, "/admin/plan")["plan"]
    draft = plan["replicas"][0]["draft"]
    return str(draft["shard"]["device"]) if draft is not None and draft["shard"] is not None else ""


def read_others(daemon: Daemon) -> float:
    """Return the share of the processor that other programs take."""
    seen = [one["others"] for one in daemon.status()["devices"] if one["name"] == "here/CPU"]
    return float(seen[0] or 0.0) if seen else 0.0


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda pid: [])(0)) < 2, reason="two cores are needed")
def test_a_draft_leaves_a_processor_that_is_taken_and_returns(tmp_path, plain, monkeypatch):
    monkeypatch.setenv("OUTRIDER_SIMULATED_DEVICES", "2")
    asked = (GREEDY, SEEDED)
    expected = [plain.client.completions.create(**body).choices[0].text for body in asked]
    config = write_config(tmp_path)
    with running(config) as daemon:
        time.sleep(_SETTLE_S)
        if read_others(daemon) > _QUIET:
            pytest.skip("another program takes the cores of this machine")

        def noisy() -> bool:
            return read_others(daemon) > _QUIET

        with asking(daemon, asked, expected) as wrong:
            wait_or_skip(lambda: find_draft(daemon) == "here/CPU", noisy, "the draft is on the processor", _WITHIN_S)
            with compete([core for core in sorted(os.sched_getaffinity(0)) for _ in range(PROGRAMS)]):
                until_moved(lambda: find_draft(daemon) != "here/CPU", config)
                moved = find_draft(daemon)
                assert daemon.status()["plan"]["moves"] >= 1
            time.sleep(_SETTLE_S)
            wait_or_skip(lambda: find_draft(daemon) == "here/CPU", noisy, "the draft returns", _WITHIN_S)
        assert wrong == []
        assert moved in ("", "here/SIM.1")
        status = daemon.status()
        assert status["totals"]["restarts"] == 0
        assert status["totals"]["accepted"] > 0
    log = config.with_suffix(".log").read_text()
    assert "of here/CPU instead of" in log


def until_moved(met: Callable[[], bool], config: Path) -> None:
    end_s = time.monotonic() + _WITHIN_S
    while not met():
        assert time.monotonic() < end_s, config.with_suffix(".log").read_text()
        time.sleep(0.2)
