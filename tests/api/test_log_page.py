"""The log that the daemon keeps in memory: bounded, without texts of requests, and searched by its admin route."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from typing import Any

import httpx
import pytest

from orchestrator.cli.logs import describe_page
from orchestrator.daemon.api.admin.daemon import KeptLog
from orchestrator.daemon.api.admin.routes import create_admin_app
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.telemetry import LogFilter, LogRing, RingHandler, get_logger, setup_logging
from tests.api.support import ScriptedControl
from tests.support.logs import restored_logging as restored_logging


@pytest.fixture
def ring(restored_logging: None) -> LogRing:
    """The ring of this process's log."""
    return LogRing()


def events(ring: LogRing, **wanted: Any) -> list[str]:
    return [json.loads(line.text)["event"] for line in ring.search(LogFilter(**wanted), 100).lines]


async def get(log: KeptLog, query: str = "") -> httpx.Response:
    app = create_admin_app([AdminTarget(ScriptedControl())], "http://127.0.0.1:8000/v1", "1.2.3", log=log)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        return await client.get(f"/admin/logs{query}")


def test_the_oldest_lines_go_where_there_is_no_room():
    ring = LogRing(most_bytes=100)
    for number in range(10):
        ring.add(float(number), logging.INFO, json.dumps({"event": f"{number:020}"}))
    page = ring.search(LogFilter(), 100)
    assert [line.number for line in page.lines] == [8, 9, 10]
    assert (page.next_after, page.forgotten, page.left_out) == (10, 7, 0)
    assert ring.search(LogFilter(), 2).left_out == 1
    assert ring.search(LogFilter(after=9), 100).lines[0].number == 10
    assert [line.made_s for line in ring.search(LogFilter(since_s=8.0), 100).lines] == [8.0, 9.0]
    ring.add(10.0, logging.INFO, json.dumps({"event": "x" * 200}))  # the newest is kept, however long
    assert len(ring.search(LogFilter(), 100).lines) == 1


def test_a_call_that_cannot_be_rendered_is_told_and_its_caller_goes_on(capsys):
    ring = LogRing()
    handler = RingHandler(ring)
    handler.handle(logging.LogRecord("a.library", logging.WARNING, __file__, 1, "%d", ("x",), None))
    assert "Logging error" in capsys.readouterr().err
    assert not ring.search(LogFilter(), 100).lines
    handler.handle(logging.LogRecord("a.library", logging.WARNING, __file__, 1, "fine", (), None))
    assert [line.text for line in ring.search(LogFilter(), 100).lines] == ["fine"]


def test_lines_are_found_by_level_request_and_worker(ring):
    setup_logging("debug", "json", io.StringIO(), ring)
    log = get_logger("ours")
    log.debug("request cmpl-1 goes to target-1: it is free")
    log.info("request ended", request_id="mine", id="cmpl-1")
    log.warning("worker target-1 lost")
    log.warning("worker target-10 lost")
    log.error("worker output", worker="target-1", line="boom")
    assert events(ring, severity=logging.WARNING) == ["worker target-1 lost", "worker target-10 lost", "worker output"]
    assert events(ring, request="mine") == ["request ended"]
    assert len(events(ring, request="cmpl-1")) == 2
    assert events(ring, request="cmpl") == []
    assert events(ring, worker="target-1")[1:] == ["worker target-1 lost", "worker output"]
    assert events(ring, worker="target-10") == ["worker target-10 lost"]


@pytest.mark.parametrize("words", [False, True])
def test_no_text_of_a_request_is_kept_even_where_the_log_has_it(ring, words):
    out = io.StringIO()
    ring.hides_words = words
    setup_logging("info", "json", out, ring)
    get_logger("ours").info("request accepted", prompt="xyzzy", messages=["xyzzy"], id="cmpl-1")
    get_logger("ours").info("request ended", output="xyzzy")
    get_logger("ours").error("request failed", exception="ValueError: xyzzy" if words else "ValueError")
    assert "xyzzy" in out.getvalue()
    kept = "".join(line.text for line in ring.search(LogFilter(), 10).lines)
    assert "xyzzy" not in kept
    assert "cmpl-1" in kept
    assert ("logging.prompts" in kept) == words


async def test_the_route_tells_where_the_rest_is():
    ring = LogRing()
    ring.add(1.0, logging.INFO, json.dumps({"event": "one"}))
    ring.add(2.0, logging.ERROR, json.dumps({"event": "two"}))
    found = (await get(KeptLog(ring, "outrider.service"), "?most=1")).json()
    assert found == {
        "pid": os.getpid(),
        "unit": "outrider.service",
        "entries": [{"event": "two"}],
        "left_out": 1,
        "next_after": 2,
        "forgotten": 0,
    }
    assert describe_page(found) == [
        "1 older lines are not shown; --lines shows more",
        "the journal has all lines, those of earlier daemons too: journalctl -u outrider.service -o cat",
    ]
    assert (await get(KeptLog(ring), "?level=error")).json()["entries"] == [{"event": "two"}]
    refused = await get(KeptLog(ring), "?level=loud")
    assert refused.status_code == 400
    assert "level" in refused.json()["error"]["message"]


def test_the_journal_is_known_by_its_stream(tmp_path):
    """systemd says in JOURNAL_STREAM which file standard error is, so that a redirected one is not taken for it."""
    code = "from orchestrator.daemon.systemd.journal import find_journal_unit; print(find_journal_unit())"
    with (tmp_path / "journal").open("wb") as journal:
        found = os.fstat(journal.fileno())
        units = [
            subprocess.run(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                stderr=journal,
                check=True,
                env=os.environ | {"JOURNAL_STREAM": stream},
            ).stdout.decode()
            for stream in (f"{found.st_dev}:{found.st_ino}", f"{found.st_dev}:1", "")
        ]
    assert units[0].strip().endswith(".service")
    assert units[1:] == ["\n", "\n"]
