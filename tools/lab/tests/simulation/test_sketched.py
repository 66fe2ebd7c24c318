"""A large sketch as a fleet: each entry is planned by itself, and those that are alike once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from outrider_lab.simulation.sketched import AcceptanceBook, SimulatedLimits, build_fleet

from orchestrator.config.sketch import parse_sketch
from orchestrator.planning.wanted import build_request_from_sketch

SKETCH = """
hosts:
  - {name: east, count: 4, zone: zone-1, cores: 64, memory: 512 GiB, devices: [{device: nvidia-l4, count: 8}]}
  - {name: west, count: 5, zone: zone-2, cores: 64, memory: 512 GiB, devices: [{device: nvidia-l4, count: 8}]}
  - {name: north, zone: zone-2, cores: 64, memory: 512 GiB, devices: [{device: nvidia-l40s, count: 8}]}
target:
  name: llama-3.1-8b
  shape: {layers: 32, hidden: 4096, heads: 32, kv_heads: 8, head_dim: 128, mlp: 14336, vocabulary: 128256}
  weights: [bf16]
"""


def test_entries_that_are_alike_have_their_own_hosts_and_zones() -> None:
    sketch = parse_sketch(SKETCH, Path("sketch.yaml"))
    request = build_request_from_sketch(sketch, None, Path())
    fleet = build_fleet(sketch, request, AcceptanceBook({}), SimulatedLimits(8))
    hosts = {*(f"east-{number}" for number in range(1, 5)), *(f"west-{number}" for number in range(1, 6)), "north"}
    assert {one.host for one in fleet.replicas} == hosts
    assert len({(one.host, one.device) for one in fleet.replicas}) == len(fleet.replicas) == fleet.devices == 80
    assert Counter(one.zone for one in fleet.replicas) == {"zone-1": 32, "zone-2": 48}
    assert Counter(one.kind.name.split()[0] for one in fleet.replicas) == {"nvidia-l4": 72, "nvidia-l40s": 8}
    assert len({id(one.kind) for one in fleet.replicas}) == len({one.kind.group for one in fleet.replicas}) == 2


def test_of_entries_that_are_to_be_alike_the_best_group_stays() -> None:
    sketch = parse_sketch(SKETCH, Path("sketch.yaml"))
    request = replace(build_request_from_sketch(sketch, None, Path()), alike=True)
    fleet = build_fleet(sketch, request, AcceptanceBook({}), SimulatedLimits(8))
    assert {one.kind.name.split()[0] for one in fleet.replicas} == {"nvidia-l4"}  # 72 of them make more than 8 L40S
    assert (len(fleet.replicas), fleet.devices) == (72, 80)
