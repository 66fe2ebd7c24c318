"""Wishes on speculation as rows for people."""

from __future__ import annotations

from datetime import datetime
from typing import Any


def speculation_rows(speculation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the operator's bounds, and the wishes of engines and sessions that stand."""
    rows = [("speculation", bounds_line(speculation["bounds"]))]
    rows += [(f"wish of engine {one['engine']}", _line(one)) for one in speculation["engines"]]
    return rows + [(f"wish of session {one['user']}", _line(one)) for one in speculation["sessions"]]


def bounds_line(bounds: dict[str, Any]) -> str:
    """Return what nobody's wish goes beyond."""
    if not bounds["enabled"]:
        return "off for everybody: there is no drafter, or cluster.yaml switches it off"
    return f"wishes are bounded to {bounds['least'] or 1} to {bounds['most']} tokens, or off"


def _line(wished: dict[str, Any]) -> str:
    since = datetime.fromtimestamp(wished["since_s"]).astimezone().isoformat(sep=" ", timespec="seconds")
    return f"{wished['wish']}; asked by {wished['asked_by']}, {since}"
