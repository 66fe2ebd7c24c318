"""A small soak of the daemon over the simulated model: what `python -m outrider_lab.soak` does at full size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from outrider_lab.soak.__main__ import bars
from outrider_lab.soak.requests import Case, Seen

from tests.support.daemon import configuration

ROOT = Path(__file__).parents[4]


def test_the_daemon_gives_everything_back_and_answers_right_in_bad_company(tmp_path):
    config = configuration(
        tmp_path, script="base_ms=1", extra="limits: {max_running: 4, max_body: 256 KiB, kv_cache: 4 MiB}"
    )
    out = tmp_path / "out.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "outrider_lab.soak", "--config", str(config), "--json", str(out)),
            *("--requests", "40", "--warmup", "30", "--concurrency", "8", "--max-tokens", "24"),
            *("--rest", "0.02", "--cancel-within", "0.1", "--idle", "0.5", "--seed", "1"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["summary"]["compared"] >= 15
    assert sum(result["runs"][1]["ends"].values()) == 40
    kinds = {name.partition(":")[0] for name in result["runs"][1]["ends"]}
    assert kinds == {"stream", "whole", "cancelled", "malformed", "slow"}


START = {"running": 0, "free_blocks": 1000, "worker_rss_bytes": 100 << 20}


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, []),
        ({"running": 1}, ["running"]),
        ({"free_blocks": 951}, []),
        ({"free_blocks": 949}, ["free_blocks"]),
        ({"worker_rss_bytes": 104 << 20}, []),
        ({"worker_rss_bytes": 106 << 20}, ["worker_rss_bytes"]),
        ({"worker_rss_bytes": 50 << 20}, []),
    ],
)
def test_the_bars_are_five_percent(change, failed):
    assert [what for what, *_, good in bars(START, START | change, Seen()) if not good] == failed


def test_a_5xx_a_surprise_and_a_wrong_text_each_fail_a_bar():
    seen = Seen()
    case = Case("chat", {"model": "m"})
    seen.note_status("whole", 200, 200, "")
    seen.note_text("whole", case, ("a", 1), ("a", 1))
    assert all(good for *_, good in bars(START, START, seen))
    seen.note_status("whole", 503, 200, "gone")
    seen.note_status("malformed", 200, 400, "taken")
    seen.note_text("slow", case, ("a", 2), ("a", 1))
    failed = [what for what, *_, good in bars(START, START, seen) if not good]
    assert failed == ["5xx", "other surprises", "wrong outputs, of 2 compared"]
