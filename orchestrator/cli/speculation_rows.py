"""Overrides of speculation, and warnings of it, as rows for people."""

from __future__ import annotations

from datetime import datetime
from typing import Any


def speculation_rows(speculation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the operator's bounds, and the overrides of engines and sessions that stand."""
    rows = [("speculation", bounds_line(speculation["bounds"]))]
    if speculation["canary_bounds"]:
        rows.append(("speculation of the canary", bounds_line(speculation["canary_bounds"])))
    rows += [(f"override for replica {one['engine']}", _line(one)) for one in speculation["engines"]]
    return rows + [(f"override for session {one['user']}", _line(one)) for one in speculation["sessions"]]


def bounds_line(bounds: dict[str, Any] | None) -> str:
    """Return the bounds that no override passes."""
    if bounds is None:
        return "the model is not ready yet"
    if not bounds["enabled"]:
        return "off: there is no drafter, or cluster.yaml switches it off"
    return f"requests may ask for {bounds['least'] or 1} to {bounds['most']} draft tokens, or none"


def _line(recorded: dict[str, Any]) -> str:
    since = datetime.fromtimestamp(recorded["since_s"]).astimezone().isoformat(sep=" ", timespec="seconds")
    return f"{_describe(recorded['override'])}; asked by {recorded['asked_by']}, {since}"


def _describe(override: str) -> str:
    """Return an override in plain words; the daemon says it in those of the command."""
    kind, _, count = override.rpartition(" ")
    plain = {"depth": f"up to {count} draft tokens in every round", "at most": f"up to {count} draft tokens"}
    return plain.get(kind) or {"off": "no draft tokens", "auto": "as many draft tokens as pay"}.get(override, override)


def warning_rows(replicas: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the warnings of low acceptance that stand, and what can be done about each."""
    rows = ((whose, one) for whose, gauges in pair_gauges(replicas) for one in gauges["low_acceptance"])
    return [(f"LOW ACCEPTANCE of {one['drafter']}{whose}", _warning(one)) for whose, one in rows]


def pair_gauges(replicas: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the gauges of every replica that told some, and whose they are where there are several."""
    several = len(replicas) > 1
    return [(f" of replica {one['engine']}" * several, one["gauges"]) for one in replicas if one["gauges"]]


def _warning(one: dict[str, Any]) -> str:
    from orchestrator.daemon.control.health.acceptance_alarm import ADVICE  # loads the log's library
    from policies.serving.acceptance_alarm import Cause

    of = ", ".join(filter(None, [one["route"], f"user {one['user']}" if one["user"] else ""]))
    return (
        f"{one['rate']:.2f} of {one['drafted']} draft tokens accepted{f' ({of})' if of else ''}, below "
        f"{one['threshold']:g}: {one['cause']}; {ADVICE[Cause(one['cause'])]}"
    )
