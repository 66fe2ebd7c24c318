"""A daemon that starts again reads the beginning that its prompts have in common."""

from __future__ import annotations

from pathlib import Path

from tests.support.daemon import Daemon, configuration, running
from tests.support.waiting import until

SYSTEM = "You are a lighthouse keeper who answers every ship in one short sentence. " * 4


def ask(daemon: Daemon, question: str) -> str:
    answer = daemon.client.completions.create(model="toy", prompt=SYSTEM + question, max_tokens=24, temperature=0)
    return answer.choices[0].text


def read_loaded(daemon: Daemon) -> int:
    return int(daemon.status()["gauges"]["prefix_loaded"])


def test_a_daemon_that_starts_again_reads_what_prompts_begin_with(tmp_path: Path) -> None:
    config = configuration(tmp_path, extra="limits: {kv_disk: 16 MiB}")
    with running(config) as daemon:
        texts = [ask(daemon, question) for question in ("Who is there?", "Is it late?", "Which way?")]
        until(lambda: list((tmp_path / "store" / "kv").glob("*/*.kv")), 30.0)
        assert read_loaded(daemon) == 0
    with running(config) as daemon:
        assert ask(daemon, "Which way?") == texts[-1]
        until(lambda: read_loaded(daemon) > 200, 30.0)
        assert ask(daemon, "Who is there?") == texts[0]
