"""The least fleet that meets objectives for a trace: how many hosts of which entry of a sketch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from device_profiles.store import ProfileStore
from orchestrator.config.hosts import ClusterHost
from orchestrator.config.sketch import Sketch
from orchestrator.control.admission import ControlLimits
from orchestrator.planning.proposal import PlanError, PlanRequest
from orchestrator.simulation.questions.answer import Answer
from orchestrator.simulation.run import Scenario, SimulationError, simulate
from orchestrator.simulation.sketched import AcceptanceBook, SimulatedLimits, build_fleet
from orchestrator.simulation.trace import TracedRequest


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is searched: a fleet of the sketch's hosts under which `attainment` of the requests meet the `slo` (bounds
    in ms, by figure). No entry has more hosts than the sketch's `count`."""

    sketch: Sketch
    request: PlanRequest
    acceptance: AcceptanceBook
    limits: SimulatedLimits
    store: ProfileStore | None
    trace: Sequence[TracedRequest]
    control: ControlLimits
    slo: Mapping[str, float]
    attainment: float
    speculates: bool = True


def find_least_fleet(wanted: Wanted, told: Callable[[str], None] = lambda text: None) -> Answer:
    """Search each entry of hosts by itself, by bisection over its count, the cheapest entry first. Of those that meet
    the objectives the cheapest fleet is chosen, of equals the one with fewer hosts. Attainment is taken to rise with
    the number of hosts. Raises SimulationError where no entry does."""
    entries = sorted((one for one in wanted.sketch.hosts if "target" in one.roles), key=_price)
    rows: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for host in entries:
        tried: dict[int, dict[str, Any]] = {}

        def meets(count: int, host: ClusterHost = host, tried: dict[int, dict[str, Any]] = tried) -> bool:
            if count not in tried:
                told(f"{count} of {host.name}")
                tried[count] = _try(wanted, host, count)
            return bool(tried[count]["met"])

        if meets(host.count):
            few, enough = 0, host.count
            while enough - few > 1:
                middle = (few + enough) // 2
                few, enough = (few, middle) if meets(middle) else (middle, enough)
            found.append(tried[enough])
            if enough > 1:
                meets(enough - 1)
        rows += [tried[count] for count in sorted(tried)]
    if not found:
        best = max(rows, key=lambda row: row["attainment"] or 0.0, default=None)
        told_best = f"; {best['count']} of {best['hosts']}: {best['attainment'] or 0.0:.1%}" if best else ""
        raise SimulationError(f"no fleet of these hosts meets the objectives{told_best}: add hosts, or relax --slo")
    chosen = min(found, key=lambda row: (row["price_per_hour"] or 0.0, row["count"]))
    shown = [{**row, "chosen": "chosen" if row is chosen else ""} for row in rows]
    bounds = ", ".join(f"{name.removesuffix('_ms')} {bound:g} ms" for name, bound in wanted.slo.items())
    return Answer(
        "search", f"The least fleet for {bounds}, for {wanted.attainment:.1%} of the requests:", _COLUMNS, shown
    )


def _price(host: ClusterHost) -> float:
    return host.price_per_hour + sum(one.count * one.price_per_hour for one in host.devices)


def _try(wanted: Wanted, host: ClusterHost, count: int) -> dict[str, Any]:
    """Return what so many hosts of an entry make of the trace."""
    devices = count * sum(one.count for one in host.devices)
    links = wanted.sketch.links.model_copy(update={"between": ()})
    sketch = wanted.sketch.model_copy(update={"hosts": (host.model_copy(update={"count": count}),), "links": links})
    busy = wanted.request.placement.model_copy(update={"concurrency": wanted.limits.max_running * devices})
    request = replace(wanted.request, replicas=devices, least_replicas=1, placement=busy)
    told: dict[str, Any] = {"hosts": host.name, "count": count, "price_per_hour": count * _price(host) or None}
    try:
        fleet = build_fleet(
            sketch, request, wanted.acceptance, wanted.limits, wanted.store, speculates=wanted.speculates
        )
    except PlanError as error:
        return {**told, "met": False, "attainment": 0.0, "why": str(error)}
    if not fleet.replicas:
        return {**told, "met": False, "attainment": 0.0, "why": "no place for the target"}
    summary = simulate(Scenario(fleet, wanted.trace, wanted.control, wanted.slo))["summary"]
    met = (summary["slo_attainment"] or 0.0) >= wanted.attainment
    ttft, tpot = summary["ttft_ms"] or {}, summary["tpot_ms"] or {}
    return {
        **told,
        "replicas": len(fleet.replicas),
        "ttft_ms": ttft.get("p95"),
        "tpot_ms": tpot.get("p50"),
        "attainment": summary["slo_attainment"],
        "met": met,
        "refused": summary["failed"],
    }


_COLUMNS = {
    "hosts": "{}",
    "count": "{:,}",
    "replicas": "{:,}",
    "price_per_hour": "{:.2f}",
    "ttft_ms": "{:,.0f}",
    "tpot_ms": "{:.2f}",
    "refused": "{:,}",
    "attainment": "{:.1%}",
    "chosen": "{}",
}
