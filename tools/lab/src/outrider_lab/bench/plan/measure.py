"""The figures of planning: seconds for large clusters, distance from the proven best for small ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outrider_lab.bench.plan.exact import best_in_shards
from outrider_lab.bench.plan.fleets import build_goal, fleet, small
from policies.planning.placement import plan_placement

_SIZES = {"plan_1k_seconds": 1_000, "plan_10k_seconds": 10_000}
_ZONES, _SHARDS = 20, 8


def measure_planning(
    *, instances: int = 12, clusters: int = 3, tell: Callable[[str], object] = lambda text: None
) -> dict[str, Any]:
    """Return `summary` (the figures by name), `speed` and `gaps` (every single one). `tell` is called with a line for
    each."""
    speed = [
        _speed(name, devices, seed, busy=busy, tell=tell)
        for name, devices in _SIZES.items()
        for seed in range(clusters)
        for busy in (False, True)
    ]
    gaps = [_gap(seed, measured_links=seed % 2 == 1, tell=tell) for seed in range(instances)]
    summary: dict[str, float] = {
        name: max((one["seconds"] for one in speed if one["name"] == name), default=0.0) for name in _SIZES
    }
    known = [one["gap"] for one in gaps if one["exact_tokens_per_s"]]
    summary |= {"gap_to_exact": max(known, default=0.0), "instances": len(known)}
    return {"summary": summary, "speed": speed, "gaps": gaps}


def _speed(name: str, devices: int, seed: int, *, busy: bool, tell: Callable[[str], object]) -> dict[str, Any]:
    cluster, wish = fleet(devices, _ZONES, seed, busy=busy), build_goal(shards=_SHARDS)
    started = time.perf_counter()
    found = plan_placement(cluster, wish)
    seconds = time.perf_counter() - started
    alike = "no two alike" if busy else "alike by kind"
    rate = found.goodput_tokens_per_s
    tell(f"{devices} devices, {alike}, seed {seed}: {seconds:.2f} s, {rate:.1f} tokens/s predicted")
    return {"name": name, "devices": devices, "seed": seed, "busy": busy, "seconds": seconds, "tokens_per_s": rate}


def _gap(seed: int, *, measured_links: bool, tell: Callable[[str], object]) -> dict[str, Any]:
    cluster, wish = small(seed, measured_links=measured_links)
    started = time.perf_counter()
    exact = best_in_shards(cluster, wish)
    seconds = time.perf_counter() - started
    rate = plan_placement(cluster, wish).goodput_tokens_per_s if exact else 0.0
    gap = max(0.0, 1.0 - rate / exact) if exact else 0.0
    links = "measured links" if measured_links else "default links"
    tell(f"small cluster {seed}, {links}: {rate:.2f} of {exact:.2f} tokens/s ({gap:.2%} below the best)")
    return {
        "seed": seed,
        "measured_links": measured_links,
        "exact_seconds": seconds,
        "exact_tokens_per_s": exact,
        "tokens_per_s": rate,
        "gap": gap,
    }
