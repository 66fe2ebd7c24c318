"""Several models whose replicas follow load: a burst on one brings replicas of it alone, on cores that are free."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adapters.hardware import cores
from tests.daemon.test_several_models import statuses, text_of
from tests.support.daemon import Daemon, configuration, running
from tests.support.waiting import until

WITHIN_S = 240.0
STREAMS = 6


def write_scaling(directory: Path, first: str, second: str, extra: str = "", threads: int = 0) -> Path:
    """A file with two models, of which each has its own bounds."""
    further = (
        "models:\n  - source: 'simulated:toy?shift=3&base_ms=15'\n    adapter: simulated\n    name: other\n"
        f"    max_running: 2\n    drafts: []\n    replicas: {second}\n    threads: {threads}\n"
    )
    limits = "limits: {max_running: 2}\ndrafts: []\n"
    return configuration(directory, script="base_ms=15", replicas=first, extra=f"{limits}{further}{extra}")


def count(daemon: Daemon) -> dict[str, int]:
    return {name: len(one["replicas"]) for name, one in statuses(daemon).items()}


def test_a_burst_on_one_brings_replicas_of_that_one_alone(tmp_path):
    bounds = "{min: 1, max: 2, idle_s: 1, places: [{}, {}]}"
    with running(write_scaling(tmp_path, bounds, bounds)) as daemon, ThreadPoolExecutor(STREAMS) as pool:
        expected = {name: text_of(daemon, name) for name in ("toy", "other")}
        assert expected["toy"] != expected["other"]
        told: list[str] = []

        def ask_until_more() -> bool:
            told.extend(pool.map(lambda _: text_of(daemon, "other"), range(STREAMS)))
            return count(daemon) == {"toy": 1, "other": 2}

        until(ask_until_more, WITHIN_S)
        assert set(told) == {expected["other"]}
        until(lambda: count(daemon) == {"toy": 1, "other": 1}, WITHIN_S)
        assert {name: text_of(daemon, name) for name in expected} == expected
        assert all(one["totals"]["restarts"] == 0 for one in statuses(daemon).values())


def test_replicas_leave_other_models_their_cores(tmp_path):
    all_but_one = max(1, cores() - 1)
    config = write_scaling(tmp_path, "{min: 1, max: 2}", "1", "devices: {threads: 1}\n", threads=all_but_one)
    with running(config) as daemon, ThreadPoolExecutor(STREAMS) as pool:
        found = [pool.submit(text_of, daemon, "toy") for _ in range(STREAMS)]
        until(lambda: "that the other models leave" in statuses(daemon)["toy"]["scaling"]["why"], WITHIN_S)
        assert len({one.result(WITHIN_S) for one in found}) == 1
        assert count(daemon) == {"toy": 1, "other": 1}
