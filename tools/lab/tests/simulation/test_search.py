"""The least fleet: what the search finds is what trying every fleet finds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from outrider_lab.simulation.questions.least_fleet import Wanted, _try, find_least_fleet
from outrider_lab.simulation.run import SimulationError
from outrider_lab.simulation.sketched import AcceptanceBook, SimulatedLimits
from outrider_lab.simulation.trace import open_trace

from orchestrator.config.sketch import Sketch, parse_sketch
from orchestrator.daemon.control.streams.admission import ControlLimits
from orchestrator.planning.wanted import PlanRequest, build_request_from_sketch

SKETCH = """
hosts:
  - {{name: slow, count: 2, cores: 8, memory: 64 GiB, devices: [{{device: nvidia-l4, price_per_hour: {slow}}}]}}
  - {{name: fast, count: 2, cores: 8, memory: 64 GiB, devices: [{{device: nvidia-l40s, price_per_hour: {fast}}}]}}
target:
  name: llama-3.1-8b
  shape: {{layers: 32, hidden: 4096, heads: 32, kv_heads: 8, head_dim: 128, mlp: 14336, vocabulary: 128256}}
  weights: [bf16]
"""
LOADS = ((1.0, 0.95), (2.5, 0.95), (4.5, 0.4), (12.0, 0.95))  # requests a second, and the share that is to be met


def read(slow: float, fast: float) -> tuple[Sketch, PlanRequest]:
    sketch = parse_sketch(SKETCH.format(slow=slow, fast=fast), Path("sketch.yaml"))
    return sketch, build_request_from_sketch(sketch, None, Path())


def want(rate: float, slow: float, fast: float, attainment: float) -> Wanted:
    sketch, request = read(slow, fast)
    trace = list(open_trace(f"poisson:rate={rate},seconds=20"))
    limits = ControlLimits(16, 256, 5)
    slo = {"ttft_ms": 2000.0, "tpot_ms": 120.0}
    known = (sketch, request, AcceptanceBook({}), SimulatedLimits(8))
    return Wanted(*known, trace=trace, control=limits, slo=slo, attainment=attainment, speculates=False)


@pytest.mark.parametrize(("rate", "attainment"), LOADS)
@pytest.mark.parametrize(("slow", "fast"), [(0.7, 1.6), (1.5, 1.6)])
def test_the_cheapest_fleet_is_found(rate: float, attainment: float, slow: float, fast: float) -> None:
    wanted = want(rate, slow, fast, attainment)
    entries = wanted.sketch.hosts
    every: list[dict[str, Any]] = []
    for counts in product(*(range(one.count + 1) for one in entries)):
        if any(counts):
            every.append(_try(wanted, [(one, count) for one, count in zip(entries, counts, strict=True) if count]))
    good = [row for row in every if row["met"]]
    if not good:
        with pytest.raises(SimulationError, match="no fleet of these hosts"):
            find_least_fleet(wanted)
        return
    found = find_least_fleet(wanted)
    (chosen,) = [row for row in found.rows if row["chosen"]]
    least = min(good, key=lambda row: (row["price_per_hour"], row["count"]))
    assert (chosen["hosts"], chosen["price_per_hour"]) == (least["hosts"], least["price_per_hour"])


def test_a_mix_is_taken_where_it_is_cheaper() -> None:
    found = find_least_fleet(want(4.5, 0.7, 1.6, 0.4))
    (chosen,) = [row for row in found.rows if row["chosen"]]
    assert (chosen["hosts"], chosen["groups"]) == ("1 slow + 1 fast", 2)


def test_a_mix_is_no_better_than_its_best_group_where_all_are_to_be_alike() -> None:
    wanted = want(4.5, 0.7, 1.6, 0.4)
    found = find_least_fleet(replace(wanted, request=replace(wanted.request, alike=True)))
    by_hosts = {row["hosts"]: row for row in found.rows}
    (chosen,) = [row for row in found.rows if row["chosen"]]
    assert "+" not in chosen["hosts"]
    assert {row.get("groups", 1) for row in found.rows} == {1}
    assert by_hosts["1 slow + 1 fast"]["attainment"] <= by_hosts["1 fast"]["attainment"]
