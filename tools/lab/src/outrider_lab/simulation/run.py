"""One simulation: a fleet, its traffic and its faults, from the first arrival to the last end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

import psutil

from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.errors import OutriderError
from outrider_lab.simulation.faults import Fault, FaultSchedule, list_faults
from outrider_lab.simulation.figures import FORMULAS
from outrider_lab.simulation.fleet import Fleet
from outrider_lab.simulation.processes import USUAL_TIMING, Timing
from outrider_lab.simulation.trace import TracedRequest
from outrider_lab.simulation.world import World
from policies.serving.slo import Objective

_START_WITHIN_S = 3600.0
_TELL_EVERY = 1000


class SimulationError(OutriderError):
    """Nothing can be simulated; the message says why, and the way out."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated. `slo`: bounds in ms, by figure. `seconds`: after which no request arrives (0: the trace's own
    end). `requests`: at most so many (0: all)."""

    fleet: Fleet
    trace: Iterable[TracedRequest]
    limits: ControlLimits
    slo: Mapping[str, float] = field(default_factory=dict)
    faults: FaultSchedule = field(default_factory=FaultSchedule)
    timing: Timing = USUAL_TIMING
    seconds: float = 0.0
    requests: int = 0


def simulate(scenario: Scenario, told: Callable[[float, int], None] = lambda now_s, requests: None) -> dict[str, Any]:
    """Return `summary`, `kinds` (what each kind of replica did), `log`, what was
    assumed and not validated, and `formulas`. `told` hears of virtual
    time and requests now and then. Raises SimulationError where nothing can serve."""
    fleet = scenario.fleet
    if not fleet.replicas:
        raise SimulationError("the fleet has no replica: the plan found no place for the target")
    world = World(fleet, _aim_at(scenario.limits, scenario.slo), scenario.timing)
    began_s = time.perf_counter()
    world.open()
    world.start(_START_WITHIN_S)
    serving_s = world.now_s
    seconds = scenario.seconds or float("inf")
    faults = list_faults(scenario.faults, fleet, seconds if scenario.seconds else _START_WITHIN_S * 24)
    world.play(_tell_progress(_bound(scenario, seconds), told), faults)
    wall_s = time.perf_counter() - began_s
    price = sum(one.kind.price_per_hour for one in fleet.replicas)
    summary = world.outcomes.summarise(dict(scenario.slo), price)
    span_s = max(1e-9, summary["duration_s"] or world.now_s - world.zero_s)
    counts = Counter(one.kind.name for one in fleet.replicas)
    kinds = {
        name: {
            "replicas": counts[name],
            "utilisation": use.busy_s / span_s / counts[name],
            "mean_sequences": use.sequences / max(1, use.rounds),
            "tokens_a_round": use.tokens / max(1.0, use.sequences),
            "drafted_a_round": use.drafted / max(1.0, use.sequences),
        }
        for name, use in world.uses.items()
    }
    return {
        "summary": {
            **summary,
            "devices": fleet.devices,
            "replicas": len(fleet.replicas),
            "groups": len(world.groups),
            "price_per_hour": price or None,
            "joules_per_token": _count_joules(world, summary["output_tokens"]),
            "start_s": serving_s,
            "wall_s": wall_s,
            "simulated_requests_per_s": summary["requests"] / wall_s,
            "peak_memory_mib": psutil.Process().memory_info().rss / 2**20,
        },
        "kinds": kinds,
        "log": {"counts": dict(world.log.counts), "lines": world.log.lines},
        "assumed": list(fleet.assumed),
        "not_validated": list_unvalidated(fleet, faults),
        "formulas": FORMULAS,
    }


def _aim_at(limits: ControlLimits, slo: Mapping[str, float]) -> ControlLimits:
    """Let the daemon know the objective of the first token, as with `slo.ttft_ms` in its configuration."""
    known = limits.ttft.ms or "ttft_ms" not in slo
    return limits if known else replace(limits, ttft=Objective(slo["ttft_ms"]))


def _count_joules(world: World, tokens: int) -> float | None:
    """Return what a token took of energy on devices that worked, None where the power of one is not known."""
    powers = {one.kind.name: one.kind.power_w for one in world.fleet.replicas}
    if not tokens or not all(powers.get(name) for name in world.uses):
        return None
    return sum(use.busy_s * powers[name] for name, use in world.uses.items()) / tokens


def _bound(scenario: Scenario, seconds: float) -> Iterator[TracedRequest]:
    some = islice(scenario.trace, scenario.requests or None)
    for one in some:
        if one.arrival_s > seconds:
            return
        yield one


def _tell_progress(requests: Iterator[TracedRequest], told: Callable[[float, int], None]) -> Iterator[TracedRequest]:
    for number, one in enumerate(requests):
        if number % _TELL_EVERY == 0:
            told(one.arrival_s, number)
        yield one


VALIDATED_FAULTS: Final = frozenset({"kill_worker", "cut_link"})
_MOST_REPLICAS, _MOST_PLACES = 2, 16


def list_unvalidated(fleet: Fleet, faults: Sequence[Fault] = ()) -> list[str]:
    """Return what in this simulation no real run was compared with (`outrider simulate --validate`), a line each."""
    kinds = {one.kind.name: one.kind for one in fleet.replicas}.values()
    found = []
    stated = [one.name for one in kinds if one.source != "measured"]
    if stated:
        found.append(f"costs from datasheets: {', '.join(stated)}")
    if len(fleet.replicas) > _MOST_REPLICAS:
        found.append(f"{len(fleet.replicas):,} replicas (validated with up to {_MOST_REPLICAS})")
    if any(one.draft is not None for one in kinds):
        found.append("draft workers")
    if any(one.places > _MOST_PLACES for one in kinds):
        found.append(f"more than {_MOST_PLACES} sequences at a time")
    if len({one.group for one in kinds}) > 1 and any(one.max_depth for one in kinds):
        found.append("drafts in groups of unlike bits")
    if any(one.standby for one in fleet.replicas):
        found.append("standbys")
    others = sorted({fault.kind for fault in faults} - VALIDATED_FAULTS)
    if others:
        found.append(f"faults: {', '.join(others)}")
    return found
