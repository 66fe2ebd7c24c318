"""Lines about a plan, the model store and speculation, as a daemon's status has them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from device_profiles.units import human_bytes

PRUNE = "outrider models prune"


def plan_line(plan: dict[str, Any]) -> str:
    line = f"best for {plan['objective']}; {plan['predicted_tokens_per_s']:.1f} tokens/s predicted"
    if plan["missing"]:
        lost = ", ".join(replica["name"] for replica in plan["missing"])
        line += f", {plan['serving_tokens_per_s']:.1f} of it by what serves ({lost} does not)"
    if cost := plan["predicted_cost_per_million_tokens"]:
        line += f", {cost:.3g} {plan['currency']} a million tokens"
    if joules := plan["predicted_joules_per_token"]:
        line += f", {joules:.3g} J a token"
    if plan["rounds"]:
        line += (
            f", {plan['measured_tokens_per_s']:.1f} measured in rounds that only decode; they take "
            f"{plan['ratio']:.2f} times what is predicted for them"
        )
    if plan["plans"]:
        line += f"; planned again {plan['plans']} times, workers replaced {plan['moves']} times; {plan['last']}"
    return "; ".join([line, *list_weak_points(plan)])


def list_weak_points(plan: dict[str, Any]) -> list[str]:
    """Return which of the plan's figures do not hold or are estimates, and what is to be measured later."""
    later = plan["to_measure"]
    measured = [f"when nobody asks, {len(later)} more are measured: {', '.join(later)}"] if later else []
    return [*plan["drifted"], *plan["doubts"], *measured]


def store_line(store: Mapping[str, Any]) -> str:
    used = f"{human_bytes(store['used_bytes'])} in use by the configuration"
    could_go = f", {human_bytes(store['unused_bytes'])} could go (`{PRUNE}`)" if store["unused"] else ""
    return f"{store_total_line(store)}: {used}{could_go}"


def store_total_line(store: Mapping[str, Any]) -> str:
    return f"{human_bytes(store['total_bytes'])} in {store['root']}, of {store['sources']} source(s)"


def speculation_rows(speculation: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("speculation", bounds_line(speculation["bounds"]))]
    if speculation["canary_bounds"]:
        rows.append(("speculation of the canary", bounds_line(speculation["canary_bounds"])))
    rows += [(f"override for replica {over['engine']}", _override_line(over)) for over in speculation["engines"]]
    return rows + [(f"override for session {over['user']}", _override_line(over)) for over in speculation["sessions"]]


def bounds_line(bounds: dict[str, Any] | None) -> str:
    if bounds is None:
        return "the model is not ready yet"
    if not bounds["enabled"]:
        return "off: there is no drafter, or cluster.yaml switches it off"
    return f"requests may ask for {bounds['least'] or 1} to {bounds['most']} draft tokens, or none"


def _override_line(recorded: dict[str, Any]) -> str:
    """Return an override in plain words; the daemon says it in those of the command."""
    since = datetime.fromtimestamp(recorded["since_s"]).astimezone().isoformat(sep=" ", timespec="seconds")
    kind, _, count = (override := recorded["override"]).rpartition(" ")
    plain = {
        "depth": f"up to {count} draft tokens in every round",
        "at most": f"up to {count} draft tokens",
        "off": "no draft tokens",
        "auto": "as many draft tokens as pay",
    }
    return f"{plain.get(kind or override, override)}; asked by {recorded['asked_by']}, {since}"


def warning_rows(replicas: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (f"LOW ACCEPTANCE of {warning['drafter']}{whose}", _warning_line(warning))
        for whose, gauges in pair_gauges(replicas)
        for warning in gauges["low_acceptance"]
    ]


def pair_gauges(replicas: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    several = len(replicas) > 1
    return [
        (f" of replica {replica['engine']}" * several, replica["gauges"]) for replica in replicas if replica["gauges"]
    ]


def _warning_line(warning: dict[str, Any]) -> str:
    from orchestrator.daemon.control.health.acceptance_alarm import ADVICE  # loads the log's library
    from policies.serving.acceptance_alarm import Cause

    of = ", ".join(filter(None, [warning["route"], f"user {warning['user']}" if warning["user"] else ""]))
    return (
        f"{warning['rate']:.2f} of {warning['drafted']} draft tokens accepted{f' ({of})' if of else ''}, below "
        f"{warning['threshold']:g}: {warning['cause']}; {ADVICE[Cause(warning['cause'])]}"
    )
