"""What is said where Ray cannot be had."""

from __future__ import annotations

import socket
import sys

import pytest

from orchestrator.errors import WorkerError, WorkerStartFailed
from orchestrator.workers.ray_runtime import RayCluster, reason
from tests.support import engines
from tests.support.workers import rays_environment

pytestmark = pytest.mark.asyncio


async def test_without_ray_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    cluster = RayCluster("")
    with pytest.raises(WorkerError, match=r"pip install ray, or set cluster\.runtime: local"):
        await cluster.open()
    with pytest.raises(WorkerStartFailed):
        await cluster.start(engines.spec())
    await cluster.close()


async def test_an_address_where_nothing_listens_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    before = rays_environment()
    cluster = RayCluster(address)
    with pytest.raises(WorkerError, match=rf"cannot join Ray at {address}: ConnectionRefusedError.*ray start"):
        await cluster.open()
    assert rays_environment() == before  # a node of Ray that is started later tries more often than we do
    await cluster.close()


async def test_rays_client_protocol_is_refused() -> None:
    cluster = RayCluster("ray://somewhere:10001")
    with pytest.raises(WorkerError, match="use HOST:PORT"):
        await cluster.open()
    await cluster.close()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("The actor died.\n\tpid: 3\nWorker exit detail: Gone. Some common causes include: (1) ...", "Gone."),
        (
            "Worker exit type: X Worker exit detail: Node died. There are some potential root causes",
            "Node died.",
        ),
        ("first\n  last  \n\n", "last"),
        ("", "ValueError"),
    ],
)
async def test_a_ray_error_becomes_one_line(text: str, line: str) -> None:
    assert reason(ValueError(text)) == line
