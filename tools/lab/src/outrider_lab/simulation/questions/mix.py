"""How the cost of a million tokens moves with the mix of devices."""

from __future__ import annotations

from typing import Any

from orchestrator.config.hosts import ClusterHost
from outrider_lab.simulation.questions.asked import Answer, Asked
from outrider_lab.simulation.run import SimulationError

_WHOLE = 4
_BUSY, _SECONDS, _TTFT_MS = 0.8, 30.0, 1000.0


def answer_mix(asked: Asked) -> Answer:
    """Return tokens/s and cost, with four fifths of what they make at most to do, for mixes of the sketch's first two
    entries of hosts that may have targets; and the same where all that serve must be alike. Raises SimulationError
    where there are no two."""
    entries = [one for one in asked.sketch.hosts if "target" in one.roles]
    if len(entries) < 2:
        raise SimulationError("a mix is of two entries of `hosts` that may have targets, and the sketch has fewer")
    left, right = entries[:2]
    rows: list[dict[str, Any]] = []
    rates = [_find_rate(asked, host) for host in (left, right)]
    for count in range(_WHOLE + 1):
        asked.told(f"{_WHOLE - count} {left.name}, {count} {right.name}")
        parts = (left, _WHOLE - count), (right, count)
        fleet, alike = asked.build_fleet(*parts), asked.build_fleet(*parts, alike=True)
        rate = _BUSY * ((_WHOLE - count) * rates[0] + count * rates[1])
        requests = asked.make(rate, max(5.0, _SECONDS * asked.share), seed=4)
        summary = asked.play(fleet, requests, {"ttft_ms": _TTFT_MS})["summary"]
        one_group = asked.play(alike, requests, {"ttft_ms": _TTFT_MS})["summary"]
        rows.append(
            {
                "left": _WHOLE - count,
                "right": count,
                "rate": rate,
                "groups": summary["groups"],
                "attainment": summary["slo_attainment"],
                "output_tok_s": summary["output_tok_s"],
                "tpot_ms": summary["tpot_ms"]["p50"] if summary["tpot_ms"] else None,
                "price_per_hour": summary["price_per_hour"],
                "cost_per_million_tokens": summary["cost_per_million_tokens"],
                "alike_replicas": len(alike.replicas),
                "alike_attainment": one_group["slo_attainment"],
                "alike_cost": _bill(one_group, summary["price_per_hour"]),
            }
        )
    named = {
        left.name if key == "left" else right.name if key == "right" else key: form for key, form in _COLUMNS.items()
    }
    told = [{left.name: row["left"], right.name: row["right"], **row} for row in rows]
    return Answer("mix", "How does the cost move with the mix of devices?", named, told, asked.assume())


def _find_rate(asked: Asked, host: ClusterHost) -> float:
    """Return how many requests a second one host of an entry completes at most."""
    asked.told(f"what {host.name} makes at most")
    fleet = asked.build_fleet((host, 1))
    requests = asked.fill(asked.limits.max_running * len(fleet.replicas), waves=5)
    return float(asked.play(fleet, requests, {})["summary"]["requests_per_s"])


def _bill(summary: dict[str, Any], price_per_hour: float | None) -> float | None:
    """Return the cost of a million tokens where hosts without work are paid for, too."""
    cost, worked = summary["cost_per_million_tokens"], summary["price_per_hour"]
    return cost * price_per_hour / worked if cost and price_per_hour else None


_COLUMNS = {
    "left": "{:,}",
    "right": "{:,}",
    "rate": "{:.2f}",
    "attainment": "{:.1%}",
    "tpot_ms": "{:.2f}",
    "price_per_hour": "{:.2f}",
    "cost_per_million_tokens": "{:.3f}",
    "alike_replicas": "{:,}",
    "alike_attainment": "{:.1%}",
    "alike_cost": "{:.3f}",
}
