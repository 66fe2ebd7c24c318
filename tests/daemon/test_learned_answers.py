"""Answers that a daemon gave become a store by a command, and the running daemon drafts from it; no answer changes."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.daemon.test_document_index import FIXED, PROMPTS, answer, count_drafts
from tests.support.daemon import configuration, outrider_process, running

KEPT_WITHIN_S = 30.0


def configure(directory: Path, store: str = "disk", options: str = "") -> Path:
    drafts = f"{{method: suffix, memory: 0 B, store: {store}{options}}}, {{method: index, path: learned.drafts}}"
    return configuration(directory, extra=f"drafts: [{drafts}]\n{FIXED}")


def learn(config: Path, *options: str) -> tuple[int, str, str]:
    output = config.parent / "learned.drafts"
    found = outrider_process("drafts", "learn", "--config", str(config), "--output", str(output), "--json", *options)
    return found.returncode, found.stdout, found.stderr


def wait_for_answers(state: Path, count: int) -> None:
    """Wait until the draft store has so many answers: they are written in the background."""
    end_s = time.monotonic() + KEPT_WITHIN_S
    while time.monotonic() < end_s:
        with closing(sqlite3.connect(state / "drafts.sqlite")) as base:
            if base.execute("SELECT count(*) FROM answers").fetchone()[0] >= count:
                return
        time.sleep(0.1)
    raise AssertionError("the answers were not kept")


def test_a_running_daemon_drafts_from_what_it_answered(plain, tmp_path: Path):
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "a.txt").write_text("nothing of it", encoding="utf-8")
    config = configure(tmp_path)
    made = outrider_process(
        *("drafts", "index", str(tmp_path / "documents"), "--config", str(config)),
        *("--output", str(tmp_path / "learned.drafts")),
    )
    assert made.returncode == 0, made.stderr
    with running(config) as daemon:
        first = [answer(daemon, prompt) for prompt in PROMPTS]
        assert count_drafts(daemon, "index-learned")[1] == 0
        wait_for_answers(tmp_path / "state", len(PROMPTS))
        code, _, errors = learn(config)
        assert (code, "--all-keys" in errors) == (1, True)
        code, told, errors = learn(config, "--all-keys")
        assert code == 0, errors
        found = json.loads(told)
        assert (found["answers"], found["documents"], found["redacted"]) == (3, 3, 0)
        time.sleep(1.1)  # so often the daemon looks for a new one
        assert [answer(daemon, prompt, extra_body={"speculative_config": {}}) for prompt in PROMPTS] == first
        assert first == [answer(plain, prompt) for prompt in PROMPTS]
        assert count_drafts(daemon, "index-learned")[1] > 0

        code, told, errors = learn(config, "--all-keys", "--redact", re.escape(first[0][5:25]))
        assert code == 0, errors
        assert json.loads(told)["redacted"] >= 1
        assert json.loads(told)["documents"] <= 2


@pytest.mark.parametrize(
    ("store", "options", "says"),
    [
        ("memory", (), "no draft keeps answers on disk"),
        ("disk", ("--all-keys",), "serve some requests with `store: disk` first"),
        ("disk", ("--all-keys", "--redact", "("), "--redact '(': is no regular expression"),
    ],
)
def test_nothing_to_learn_from_is_told(tmp_path: Path, store, options, says):
    code, _, errors = learn(configure(tmp_path, store), *options)
    assert (code, says in errors) == (1, True), errors
    assert "Traceback" not in errors
