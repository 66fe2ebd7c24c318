"""Places that are kept from other tenants of a Ray cluster."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.launch.ray_places import Places
from orchestrator.launch.ray_runtime import RayCluster
from orchestrator.protocol.contract import WorkerSpec
from tests.support import engines

MOST_CPUS = 64  # of a Ray of our own


def spec_at(device: str, cpus: float) -> WorkerSpec:
    return msgspec.structs.replace(engines.spec(), name=device, node="here", device=device, reserved_cpus=cpus)


class RecordingRay:
    """Stands for Ray where the groups that are asked for count, and hands out none."""

    class exceptions:  # as Ray's module is called
        RayError = RuntimeError

    def __init__(self) -> None:
        self.bundles: list[dict[str, float]] = []
        self.util = self

    def placement_group(self, bundles: list[dict[str, float]], **_: object) -> None:
        self.bundles += bundles
        raise self.exceptions.RayError("there is none")


@pytest.mark.parametrize(("device", "gpus"), [("CUDA:0", 1.0), ("CUDA", 1.0), ("CPU", None), ("GPU", None)])
def test_a_worker_on_cuda_asks_for_one_of_rays_gpus(device: str, gpus: float | None) -> None:
    ray = RecordingRay()
    Places(ray, "10.0.0.1").take(1, spec_at(device, 2))
    assert [one.get("GPU") for one in ray.bundles] == [gpus]


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
