"""The least fleet that meets objectives for a trace: how many hosts of which entry of a sketch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import ceil
from typing import Any

from orchestrator.config.hosts import ClusterHost
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.planning.wanted import PlanError, PlanRequest
from outrider_lab.simulation.questions.asked import Answer, Asked
from outrider_lab.simulation.run import Scenario, SimulationError, simulate
from outrider_lab.simulation.trace import TracedRequest

_MIXES = 8
"""So many numbers of one entry are tried beside another."""


@dataclass(frozen=True, kw_only=True)
class Wanted(Asked):
    """What is searched: a fleet of the sketch's hosts under which `attainment` of the requests meet the `slo` (bounds
    in ms, by figure). No entry has more hosts than the sketch's `count`."""

    trace: Sequence[TracedRequest]
    control: ControlLimits
    slo: Mapping[str, float]
    attainment: float
    speculates: bool = True


def find_least_fleet(wanted: Wanted) -> Answer:
    """Search each entry of hosts by itself, by bisection over its count, the cheapest entry first; then mixes of two
    entries that are cheaper than the best so far. Of those that meet the objectives the cheapest fleet is chosen, of
    equals the one with fewer hosts. Attainment is taken to rise with the number of hosts. Raises SimulationError where
    no fleet does."""
    search = _Search(wanted)
    entries = sorted((one for one in wanted.sketch.hosts if "target" in one.roles), key=_price)
    for host in entries:
        search.find_alone(host)
    for first, second in combinations(entries, 2):
        search.find_mix(first, second)
    rows = list(search.tried.values())
    chosen = search.best
    if chosen is None:
        best = max(rows, key=lambda row: row["attainment"] or 0.0, default=None)
        told_best = f"; {best['hosts']}: {best['attainment'] or 0.0:.1%}" if best else ""
        raise SimulationError(f"no fleet of these hosts meets the objectives{told_best}: add hosts, or relax --slo")
    shown = [{**row, "chosen": "chosen" if row is chosen else ""} for row in rows]
    bounds = ", ".join(f"{name.removesuffix('_ms')} {bound:g} ms" for name, bound in wanted.slo.items())
    return Answer(
        "search", f"The least fleet for {bounds}, for {wanted.attainment:.1%} of the requests:", _COLUMNS, shown
    )


class _Search:
    """What was tried, by the numbers of hosts, and the `best` that meets the objectives."""

    def __init__(self, wanted: Wanted) -> None:
        self.tried: dict[tuple[tuple[str, int], ...], dict[str, Any]] = {}
        self.best: dict[str, Any] | None = None
        self._wanted = wanted

    def meets(self, *parts: tuple[ClusterHost, int]) -> bool:
        """Whether so many hosts of these entries do."""
        key = tuple((host.name, count) for host, count in parts if count)
        if key not in self.tried:
            self._wanted.told(_name(parts))
            row = self.tried[key] = _try(self._wanted, parts)
            if row["met"] and (self.best is None or _rank(row) < _rank(self.best)):
                self.best = row
        return bool(self.tried[key]["met"])

    def find_alone(self, host: ClusterHost) -> None:
        """Find the least number of hosts of an entry, and look at one fewer."""
        if not self.meets((host, host.count)):
            return
        enough = _bisect(1, host.count, lambda count: self.meets((host, count)))
        if enough > 1:
            self.meets((host, enough - 1))

    def find_mix(self, first: ClusterHost, second: ClusterHost) -> None:
        """Find the cheapest mix of two entries: for numbers of the first the least of the second, as far as that is
        cheaper than the best so far. Of many numbers of the first some are tried, evenly spread."""
        for some in _spread(first.count):
            most = self._bound_mix(first, some, second)
            if most >= 1 and self.meets((first, some), (second, most)):
                _bisect(1, most, partial(self._meets_beside, second, (first, some)))

    def _meets_beside(self, host: ClusterHost, other: tuple[ClusterHost, int], count: int) -> bool:
        return self.meets(other, (host, count))

    def _bound_mix(self, first: ClusterHost, some: int, second: ClusterHost) -> int:
        """Return how many hosts of the second entry there may be so that a mix is cheaper than the best so far. Where
        nothing has a price, it is to have fewer hosts."""
        if self.best is None:
            return second.count
        if self.best["price_per_hour"] is None:
            return min(second.count, int(self.best["count"]) - some - 1)
        left, price = self.best["price_per_hour"] - some * _price(first), _price(second)
        if left <= 0.0:
            return 0
        return min(second.count, ceil(left / price) - 1) if price else second.count


def _bisect(least: int, most: int, meets: Callable[[int], bool]) -> int:
    """Return the least number that does, where `most` does."""
    few, enough = least - 1, most
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if meets(middle) else (middle, enough)
    return enough


def _spread(most: int) -> list[int]:
    """Return numbers from 1 to `most`, evenly spread, the largest first."""
    tried = min(most, _MIXES)
    return sorted({round(most * number / tried) for number in range(1, tried + 1)}, reverse=True)


def _rank(row: dict[str, Any]) -> tuple[float, int]:
    return row["price_per_hour"] or 0.0, row["count"]


def _price(host: ClusterHost) -> float:
    return host.price_per_hour + sum(one.count * one.price_per_hour for one in host.devices)


def _name(parts: Sequence[tuple[ClusterHost, int]]) -> str:
    return " + ".join(f"{count} {host.name}" for host, count in parts)


def _try(wanted: Wanted, parts: Sequence[tuple[ClusterHost, int]]) -> dict[str, Any]:
    """Return what so many hosts of some entries make of the trace: by the planner's placement, and where that does not
    meet the objectives with a target on every device that holds it. The planner leaves slow devices idle, and gives
    some to draft models."""
    row = _try_placement(wanted, parts, wanted.request, every_device=False)
    if row["met"]:
        return row
    every = _try_placement(wanted, parts, replace(wanted.request, drafts=()), every_device=True)
    return max(row, every, key=lambda one: one["attainment"] or 0.0)


def _try_placement(
    wanted: Wanted, parts: Sequence[tuple[ClusterHost, int]], asked: PlanRequest, *, every_device: bool
) -> dict[str, Any]:
    devices = sum(count * sum(one.count for one in host.devices) for host, count in parts)
    busy = asked.placement.model_copy(update={"concurrency": wanted.limits.max_running * devices})
    request = replace(asked, replicas=devices, least_replicas=1, placement=busy)
    told: dict[str, Any] = {
        "hosts": _name(parts),
        "count": sum(count for _, count in parts),
        "price_per_hour": sum(count * _price(host) for host, count in parts) or None,
    }
    try:
        fleet = wanted.place(parts, request, speculates=wanted.speculates, every_device=every_device)
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
        "groups": summary["groups"],
        "draft_models": ", ".join(sorted({one.kind.draft.name for one in fleet.replicas if one.kind.draft})) or "none",
        "ttft_ms": ttft.get("p95"),
        "tpot_ms": tpot.get("p50"),
        "attainment": summary["slo_attainment"],
        "met": met,
        "refused": summary["failed"],
    }


_COLUMNS = {
    "hosts": "{}",
    "replicas": "{:,}",
    "groups": "{:,}",
    "draft_models": "{}",
    "price_per_hour": "{:.2f}",
    "ttft_ms": "{:,.0f}",
    "tpot_ms": "{:.2f}",
    "refused": "{:,}",
    "attainment": "{:.1%}",
    "chosen": "{}",
}
