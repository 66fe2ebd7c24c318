"""The whole daemon's log: one JSON object a line whatever happens, with worker restarts, and never a request's text."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from tests.support.daemon import Daemon, configuration, running
from tests.support.waiting import until

WORD = "xyzzy"
ASK: dict[str, Any] = {"model": "toy", "prompt": f"the word is {WORD}", "max_tokens": 12, "temperature": 0}
TOOL = {"type": "function", "function": {"name": WORD, "description": WORD}}


def use(daemon: Daemon) -> None:
    """Requests that are served, refused, broken off and misread."""
    client, url = daemon.client, daemon.url
    client.completions.create(**ASK)
    for _ in client.completions.create(**ASK, stream=True, stop=WORD):
        pass
    client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": WORD}], max_tokens=4, extra_body={"tools": [TOOL]}
    )
    for wrong in ({"prompt": [WORD, 1]}, {WORD: 1}, {"model": WORD}, {"max_tokens": 99_999}, {"stop": [WORD, 1]}):
        with pytest.raises(openai.APIStatusError):
            client.post("/completions", body=ASK | wrong, cast_to=httpx.Response)
    httpx.post(f"{url}/v1/completions", content=f'{{"prompt": "{WORD}'.encode())
    httpx.post(f"{url}/tokenize", json={"prompt": WORD})
    httpx.get(f"{url}/v1/{WORD}")
    with httpx.stream("POST", f"{url}/v1/completions", json=ASK | {"max_tokens": 3000, "stream": True}) as response:
        next(response.iter_raw())


def abort_worker(daemon: Daemon) -> int:
    """Abort the worker until its last words are in the log, and return how often. Ray brings them later, and of some
    workers it never does."""
    for count, words_s in enumerate((6.0, 6.0, 6.0, 240.0), start=1):
        os.kill(daemon.status()["ready"]["pid"], signal.SIGABRT)  # Python's faulthandler prints where it was
        daemon.client.completions.create(**ASK, timeout=180)
        with suppress(AssertionError):
            until(lambda: "Aborted" in daemon.log.read_text(encoding="utf-8"), words_s)
            return count
    raise AssertionError("its last words never came")


def check_entries(text: str, aborted: int) -> None:
    """Check what the log says of `use` and of a worker that was aborted so often."""
    entries = [json.loads(line) for line in text.splitlines()]
    assert all({"event", "level", "logger", "timestamp"} <= set(entry) for entry in entries)
    events = [entry["event"] for entry in entries]
    assert events.count("request accepted") == events.count("request ended") == 4 + aborted
    assert events.count("request refused") == 7
    assert any("worker target lost" in event for event in events)
    assert any("ready again" in event for event in events)
    assert any("Aborted" in entry.get("line", "") for entry in entries)
    assert WORD not in text


def test_every_line_is_json_and_none_has_a_text(tmp_path):
    with running(configuration(tmp_path, script="base_ms=2")) as daemon:
        use(daemon)
        aborted = abort_worker(daemon)
        assert daemon.stop() == 0
    text = daemon.log.read_text(encoding="utf-8")
    check_entries(text, aborted)
    assert json.loads(text.splitlines()[-1])["event"] == "stopped"


def test_the_texts_are_there_where_the_operator_wants_them(tmp_path):
    config = configuration(tmp_path)
    config.write_text(config.read_text().replace("format: json", "format: json, prompts: true"))
    with running(config) as daemon:
        answer = daemon.client.completions.create(**ASK).choices[0].text
        assert daemon.stop() == 0
    entries = {entry["event"]: entry for entry in map(json.loads, daemon.log.read_text().splitlines())}
    assert entries["request accepted"]["prompt"] == ASK["prompt"]
    assert entries["request ended"]["output"] == answer
