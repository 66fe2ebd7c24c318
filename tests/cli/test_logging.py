"""The log: one JSON object a line for our entries and for libraries', or text for people."""

from __future__ import annotations

import io
import json
import logging
from datetime import UTC, datetime

import pytest

from orchestrator.telemetry import get_logger, setup_logging
from tests.support.logs import restored_logging as restored_logging

pytestmark = pytest.mark.usefixtures("restored_logging")


def test_our_entries_and_a_librarys_have_the_same_fields_in_json():
    out = io.StringIO()
    setup_logging("info", "json", out)
    get_logger("ours").info("serving", port=8000)
    logging.getLogger("library").warning("slow: %d ms", 7)
    ours, theirs = (json.loads(line) for line in out.getvalue().splitlines())
    assert (ours["event"], ours["level"], ours["logger"], ours["port"]) == ("serving", "info", "ours", 8000)
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("slow: 7 ms", "warning", "library")
    for entry in (ours, theirs):
        assert datetime.fromisoformat(entry["timestamp"]).utcoffset() == UTC.utcoffset(None)


def test_an_exception_stays_in_its_one_json_line():
    out = io.StringIO()
    setup_logging("info", "json", out)
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger("ours").exception("failed")
    (line,) = out.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_less_severe_entries_and_the_chatter_of_libraries_are_left_out():
    out = io.StringIO()
    setup_logging("info", "json", out)
    get_logger("ours").debug("detail")
    logging.getLogger("httpx").info("GET /")
    assert out.getvalue() == ""


@pytest.mark.parametrize(("style", "is_json"), [("auto", True), ("json", True), ("console", False)])
def test_what_is_no_terminal_gets_json_unless_told_otherwise(style, is_json):
    out = io.StringIO()
    setup_logging("info", style, out)
    get_logger("ours").info("serving")
    assert out.getvalue().startswith("{") == is_json
    assert "serving" in out.getvalue()
