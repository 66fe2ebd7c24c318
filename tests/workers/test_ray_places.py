"""Places that are kept from other tenants of a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import msgspec
import pytest

from orchestrator.errors import WorkerError
from orchestrator.launch.ray_places import list_gpus
from orchestrator.launch.ray_runtime import RayCluster
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import Worker, WorkerSpec
from orchestrator.protocol.events import Failed
from orchestrator.protocol.rounds import RoundReport
from tests.support import engines
from tests.support.gpu_tenant import GpuTenant, start_gpu_tenant

MOST_CPUS = 64  # of a Ray of our own


def spec_at(device: str, cpus: float) -> WorkerSpec:
    return msgspec.structs.replace(engines.spec(), name=device, node="here", device=device, reserved_cpus=cpus)


def replica_at(number: int, cpus: float) -> WorkerSpec:
    return msgspec.structs.replace(spec_at("CPU", cpus), name=f"target-{number}")


@pytest.mark.parametrize(
    ("devices", "indexes"),
    [
        (["CUDA:0"], [0]),
        (["CUDA"], [0]),
        (["cuda:3"], [3]),
        (["CUDA1"], [1]),
        (["ROCm2"], [2]),
        (["CUDA:1", "CUDA:2", "CPU"], [1, 2]),
        (["CPU", "CUDA:1"], [1]),
        (["CPU"], []),
        (["GPU"], []),
    ],
)
def test_a_worker_asks_for_each_gpu_that_ray_counts(devices: list[str], indexes: list[int]) -> None:
    spec = msgspec.structs.replace(spec_at(devices[0], 2), further_devices=devices[1:])
    assert list_gpus(spec) == indexes


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
        left = MOST_CPUS - 12  # what is unreserved counts, too
        replicas = [await cluster.start(replica_at(number, left / 2)) for number in range(3)]
        assert [replica.unreserved for replica in replicas[:2]] == ["", ""], "each has CPUs of its own"
        assert f"has not {left / 2:g} CPU free" in replicas[2].unreserved
        for replica in replicas[:2]:
            await replica.stop(1.0)
        assert await is_working(replicas[2]), "it had joined a place, which lasts as long as it does"
    finally:
        await cluster.close()


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of both ends of a Ray that is joined."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))


@asynccontextmanager
async def join_cluster(tenant: GpuTenant) -> AsyncIterator[RayCluster]:
    cluster = RayCluster(tenant.address)
    await cluster.open()
    try:
        yield cluster
    finally:
        await cluster.close()


@pytest.mark.ray
@pytest.mark.usefixtures("token")
async def test_workers_keep_their_gpus_from_a_tenant_that_waits_for_one() -> None:
    with start_gpu_tenant({"CUDA_VISIBLE_DEVICES": "5,7"}) as tenant:
        async with join_cluster(tenant) as cluster:
            second = await cluster.start(spec_at("CUDA:1", 1))
            first = await cluster.start(spec_at("cuda0", 1))
            same = await cluster.start(spec_at("CUDA", 1))
            assert [worker.unreserved for worker in (first, second, same)] == ["", "", ""]
            tenant.ask()
            assert not await asyncio.to_thread(tenant.has_told, 2.0)
            await same.stop(1.0)
            await second.stop(1.0)
            assert await asyncio.to_thread(tenant.read) == "7", "the second one is free again, and the first is not"
            assert "GPU 1" in (await cluster.start(spec_at("CUDA:1", 1))).unreserved
            assert "5,7" in await read_shown(cluster), "or it would not find CUDA:1"
            await first.stop(1.0)
            tenant.ask()
            assert await asyncio.to_thread(tenant.read) == "5"


async def is_working(worker: Worker) -> bool:
    worker.send(Submit("a", [4], max_tokens=3))
    return await anext(True async for event in worker.events() if isinstance(event, RoundReport) and event.deltas)


async def read_shown(cluster: RayCluster) -> str:
    """Return what a worker finds in CUDA_VISIBLE_DEVICES."""
    spec = msgspec.structs.replace(spec_at("CUDA:0", 1), entry=f"{__name__}:{tell_shown.__name__}", options={})
    worker = await cluster.start(spec)
    failure = await anext(event async for event in worker.events() if isinstance(event, Failed))
    await worker.stop(1.0)
    return failure.message


def tell_shown(options: dict[str, Any]) -> NoReturn:
    """The entry of a worker."""
    raise WorkerError(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
