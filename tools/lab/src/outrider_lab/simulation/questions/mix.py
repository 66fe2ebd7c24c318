"""How the cost of a million tokens moves with the mix of devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.config.hosts import ClusterHost
from outrider_lab.simulation.fleet import Fleet
from outrider_lab.simulation.questions.answer import Answer
from outrider_lab.simulation.questions.asked import Asked
from outrider_lab.simulation.run import SimulationError

_WHOLE = 4
_BUSY, _SECONDS, _TTFT_MS = 0.8, 30.0, 1000.0


def answer_mix(asked: Asked) -> Answer:
    """Return tokens/s and cost, with four fifths of what they make at most to do, for mixes of the sketch's first two
    entries of hosts that may have targets. Raises SimulationError where there are no two."""
    entries = [one for one in asked.sketch.hosts if "target" in one.roles]
    if len(entries) < 2:
        raise SimulationError("a mix is of two entries of `hosts` that may have targets, and the sketch has fewer")
    left, right = entries[:2]
    rows: list[dict[str, Any]] = []
    rates = [_find_rate(asked, host) for host in (left, right)]
    for count in range(_WHOLE + 1):
        asked.told(f"{_WHOLE - count} {left.name}, {count} {right.name}")
        fleet = _mix(asked, (left, _WHOLE - count), (right, count))
        rate = _BUSY * ((_WHOLE - count) * rates[0] + count * rates[1])
        requests = asked.make(rate, max(5.0, _SECONDS * asked.share), seed=4)
        summary = asked.play(fleet, requests, {"ttft_ms": _TTFT_MS})["summary"]
        rows.append(
            {
                "left": _WHOLE - count,
                "right": count,
                "rate": rate,
                "replicas": len(fleet.replicas),
                "attainment": summary["slo_attainment"],
                "output_tok_s": summary["output_tok_s"],
                "tpot_ms": summary["tpot_ms"]["p50"] if summary["tpot_ms"] else None,
                "price_per_hour": summary["price_per_hour"],
                "cost_per_million_tokens": summary["cost_per_million_tokens"],
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
    fleet = _mix(asked, (host, 1))
    requests = asked.fill(asked.limits.max_running * len(fleet.replicas), waves=5)
    return float(asked.play(fleet, requests, {})["summary"]["requests_per_s"])


def _mix(asked: Asked, *parts: tuple[ClusterHost, int]) -> Fleet:
    """Return a fleet of so many hosts of each entry. Each entry is planned by itself: a plan of bit-exact replicas
    would take devices of one kind only."""
    fleets = []
    for host, count in parts:
        if count:
            links = asked.sketch.links.model_copy(update={"between": ()})
            several = host.model_copy(update={"count": count})
            sketch = asked.sketch.model_copy(update={"hosts": (several,), "links": links})
            replicas = count * sum(one.count for one in host.devices)
            fleets.append(asked.build_fleet(sketch, replicas))
    placed = [one for fleet in fleets for one in fleet.replicas]
    named = tuple(replace(one, name=f"target-{number}") for number, one in enumerate(placed, 1))
    zones = {name: zone for fleet in fleets for name, zone in fleet.zones.items()}
    return replace(fleets[0], replicas=named, devices=sum(one.devices for one in fleets), zones=zones)


_COLUMNS = {
    "left": "{:,}",
    "right": "{:,}",
    "rate": "{:.2f}",
    "attainment": "{:.1%}",
    "output_tok_s": "{:,.1f}",
    "tpot_ms": "{:.2f}",
    "price_per_hour": "{:.2f}",
    "cost_per_million_tokens": "{:.3f}",
}
