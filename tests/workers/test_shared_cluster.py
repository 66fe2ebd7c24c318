"""One cluster for several users: opened once, closed behind the last, and nobody ends another's workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from orchestrator.daemon.cluster.shared_cluster import SharedCluster
from orchestrator.errors import WorkerError
from orchestrator.launch.homes import list_homes
from orchestrator.launch.local import LocalCluster, OrphanPolicy
from orchestrator.launch.ray_runtime import RayCluster
from orchestrator.protocol.contract import Cluster
from orchestrator.protocol.ready import Ready
from tests.support import engines
from tests.support.workers import is_gone

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)]
)
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    yield LocalCluster() if request.param == "local" else RayCluster("")


async def start(cluster: Cluster) -> int:
    worker = await cluster.start(engines.spec())
    async for event in worker.events():
        if isinstance(event, Ready):
            return event.pid
    raise AssertionError("it ended")


async def test_whoever_leaves_ends_its_own_workers_and_the_last_one_the_cluster(cluster: Cluster) -> None:
    shared = SharedCluster(cluster)
    one, other = shared.share(), shared.share("other/")
    await asyncio.gather(one.open(), other.open())
    await one.open()
    mine, theirs = await asyncio.gather(start(one), start(other))
    assert await one.nodes() == await other.nodes()
    assert one.runtime == cluster.runtime
    await one.close()
    await one.close()
    assert await is_gone(mine)
    assert not await is_gone(theirs, 0.2)
    more = await start(other)  # it is still open
    await other.close()
    assert await is_gone(theirs)
    assert await is_gone(more)


class Closed(LocalCluster):
    """A cluster that cannot be opened at first."""

    tries = 0

    async def open(self) -> None:
        self.tries += 1
        if self.tries == 1:
            raise WorkerError("nobody answers")
        await super().open()


async def test_each_that_opens_it_hears_why_it_cannot_be_opened() -> None:
    shared = SharedCluster(Closed())
    one, other = shared.share(), shared.share("other/")
    with pytest.raises(WorkerError, match="nobody answers"):
        await one.open()
    await one.close()
    await other.open()
    await other.close()


async def test_workers_of_two_users_have_names_of_their_own(tmp_path, caplog) -> None:
    shared = SharedCluster(LocalCluster(OrphanPolicy(tmp_path / "workers", 5.0)))
    one, other = shared.share(), shared.share("other/")
    await asyncio.gather(one.open(), other.open())
    await asyncio.gather(start(one), start(other))
    homes = sorted(home.path.name.partition(".")[0] for home in list_homes(tmp_path / "workers"))
    name = engines.spec().name
    assert homes == sorted([name, f"other_{name}"])
    await asyncio.gather(one.close(), other.close())
