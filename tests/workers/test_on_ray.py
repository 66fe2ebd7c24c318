"""What is said where Ray cannot be had, and what our own Ray leaves behind."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import cast

import psutil
import pytest

from orchestrator.errors import ClusterAway, WorkerError, WorkerLost, WorkerStartFailed
from orchestrator.launch.ray_driver import reason_of
from orchestrator.launch.ray_link import ActorEnd, DriverLink
from orchestrator.launch.ray_messages import Appeared, Order
from orchestrator.launch.ray_runtime import RayCluster, RayWorker
from orchestrator.launch.ray_settings import SessionDirectory, driver_environment
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.ready import Ready
from tests.support import engines
from tests.support.workers import is_gone, start_on, start_worker, tokens_until

PROMPT = [1, 2, 3]


@pytest.fixture
def free_address() -> str:
    """Where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An operator who has a token."""
    without_token(monkeypatch, tmp_path)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")


def without_token(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))


async def test_without_ray_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('there is no Ray')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cluster = RayCluster("")
    with pytest.raises(WorkerError, match=r"outrider extras install ray, or set cluster\.runtime: local"):
        await cluster.open()
    with pytest.raises(WorkerStartFailed):
        await cluster.start(engines.spec())
    await cluster.close()


@pytest.mark.usefixtures("token")
async def test_an_address_where_nothing_listens_is_told_at_once(free_address: str) -> None:
    cluster = RayCluster(free_address)
    began = time.monotonic()
    with pytest.raises(ClusterAway, match=rf"cannot join Ray at {free_address}: ConnectionRefusedError.*ray start"):
        await cluster.open()
    assert time.monotonic() - began < 20.0  # Ray itself tries for 40 s
    await cluster.close()


async def test_rays_client_protocol_is_refused() -> None:
    cluster = RayCluster("ray://somewhere:10001")
    with pytest.raises(WorkerError, match="use HOST:PORT"):
        await cluster.open()
    await cluster.close()


async def test_no_cluster_is_joined_without_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_address: str
) -> None:
    without_token(monkeypatch, tmp_path)
    cluster = RayCluster(free_address)
    with pytest.raises(WorkerError, match=r"without its token: set RAY_AUTH_TOKEN.*or set cluster\.auth: none"):
        await cluster.open()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(WorkerError, match=r"RAY_AUTH_MODE=disabled joins without a token"):
        await cluster.open()
    await cluster.close()


def test_a_token_is_found_where_ray_looks_for_it(tmp_path: Path) -> None:
    def environment(**found: str) -> dict[str, str]:
        return driver_environment("head:6379", has_token=True, environment={"HOME": str(tmp_path), **found})

    file = tmp_path / "token"
    file.write_text(" \n")
    with pytest.raises(WorkerError, match=str(file)):
        environment(RAY_AUTH_TOKEN_PATH=str(file))
    file.write_text("secret\n")
    assert environment(RAY_AUTH_TOKEN_PATH=str(file))["RAY_AUTH_MODE"] == "token"
    (tmp_path / ".ray").mkdir()
    file.rename(tmp_path / ".ray" / "auth_token")
    assert environment()["RAY_AUTH_MODE"] == "token"
    without = driver_environment("head:6379", has_token=False, environment={"RAY_AUTH_MODE": "token"})
    assert without["RAY_AUTH_MODE"] == "disabled"


def test_a_ray_of_our_own_has_a_token_that_nobody_else_knows() -> None:
    one, other = (driver_environment("", has_token=True, environment={}) for _ in range(2))
    assert one["RAY_AUTH_MODE"] == other["RAY_AUTH_MODE"] == "token"
    assert len({one["RAY_AUTH_TOKEN"], other["RAY_AUTH_TOKEN"]}) == 2
    assert driver_environment("", has_token=True, environment={"RAY_AUTH_TOKEN": "x"})["RAY_AUTH_TOKEN"] == "x"  # noqa: S105


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
def test_a_ray_error_becomes_one_line(text: str, line: str) -> None:
    assert reason_of(ValueError(text)) == line


class FarLink:
    """A link whose actors appear on another host."""

    async def start(self, spec: WorkerSpec, end: ActorEnd) -> tuple[int, Appeared]:
        return 0, Appeared(0, "10.0.0.2", 6380, 4711, 0.0, here=False)

    def send(self, order: Order) -> None:
        pass

    def forget(self, number: int) -> None:
        pass


async def test_a_worker_that_was_killed_on_another_host_says_where_to_look_for_want_of_memory() -> None:
    worker = RayWorker("target", cast(DriverLink, FarLink()), lambda worker: None)
    await worker.appear(engines.spec())
    worker.take_end("died: Connection reset by peer", host=False)
    worker.take_gone()
    with pytest.raises(WorkerLost, match=r"if memory was short on host 10\.0\.0\.2, its kernel's log says so") as lost:
        await anext(worker.events())
    assert lost.value.kind == "killed"


def test_sockets_are_where_their_paths_are_short_enough(tmp_path: Path) -> None:
    long, short = tmp_path / ("x" * 80), Path("/tmp")  # noqa: S108 -- tmp_path is too long
    long.mkdir()
    found = SessionDirectory([tmp_path / "missing", long, short])
    assert found.path.parent == short
    assert found.path.stat().st_mode & 0o077 == 0
    longest = found.path / "session_2026-01-01_00-00-00_000000_1234567" / "sockets" / "plasma_store.1"
    assert len(bytes(longest)) <= 107
    found.remove()
    found.remove()
    assert not found.path.exists()
    with pytest.raises(WorkerError, match="set XDG_RUNTIME_DIR or TMPDIR"):
        SessionDirectory([long])


def test_what_a_killed_daemon_left_is_removed_and_what_another_uses_is_not() -> None:
    base = Path("/tmp")  # noqa: S108 -- tmp_path is too long
    used, left = SessionDirectory([base]), SessionDirectory([base])
    left._lock.release()
    for one in (used, left):
        os.utime(one.path, (1.0, 1.0))
    SessionDirectory([base]).remove()
    assert used.path.exists()
    assert not left.path.exists()
    used.remove()


def children_since(before: list[psutil.Process], *, recursive: bool = True) -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=recursive) if one not in before]


@pytest.mark.ray
async def test_an_own_ray_that_dies_is_replaced_and_leaves_nothing() -> None:
    """First its head dies, and the worker goes on. Then the process that drives it dies, and the worker with it."""
    before = psutil.Process().children(recursive=True)
    cluster = RayCluster("")
    await cluster.open()
    try:
        async with start_worker(cluster, step_s=0.01) as (worker, events, ready):
            worker.send(Submit("a", PROMPT, max_tokens=100_000))
            assert await tokens_until(events, 10) == engines.tokens(PROMPT, 10)
            children = children_since(before)
            next(one for one in children if "gcs_server" in one.name()).kill()
            replacement = await start_on(cluster, within_s=180.0)
            assert await tokens_until(events, 300) == engines.tokens(PROMPT, 310)[10:]
            assert psutil.pid_exists(ready.pid)
        assert await is_gone(ready.pid)
        ready = await anext(event async for event in replacement.events() if isinstance(event, Ready))
        for one in children_since(before, recursive=False):
            one.kill()
        with pytest.raises(WorkerLost, match="Ray driver process was killed by SIGKILL") as lost:
            await tokens_until(replacement.events(), 1)
        assert lost.value.kind == "host"
        with pytest.raises(ClusterAway, match="killed by SIGKILL"):
            await cluster.start(engines.spec())
        assert await is_gone(ready.pid, within_s=60.0)
    finally:
        await cluster.close()
    assert not children_since(before)
