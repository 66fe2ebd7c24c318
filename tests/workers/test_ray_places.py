"""Places that are kept from other tenants of a Ray cluster."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.ray_runtime import RayCluster
from tests.support import engines

MOST_CPUS = 64  # of a Ray of our own


def spec_at(device: str, cpus: float) -> WorkerSpec:
    return msgspec.structs.replace(engines.spec(), name=device, node="here", device=device, reserved_cpus=cpus)


@pytest.mark.ray
async def test_a_place_is_shared_by_its_workers_and_kept_from_others() -> None:
    cluster = RayCluster("")
    await cluster.open()
    try:
        first = await cluster.start(spec_at("one", MOST_CPUS - 4))
        second = await cluster.start(spec_at("one", MOST_CPUS - 4))
        assert (first.unreserved, second.unreserved) == ("", ""), "while a plan moves, both are there"
        other = await cluster.start(spec_at("two", 8))
        assert "has not 8 CPU free" in other.unreserved, "and it runs all the same"
        await first.stop(1.0)
        assert "has not 8 CPU free" in (await cluster.start(spec_at("two", 8))).unreserved, "the second is still there"
        await second.stop(1.0)
        assert (await cluster.start(spec_at("two", 8))).unreserved == ""
    finally:
        await cluster.close()
