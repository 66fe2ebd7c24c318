"""What becomes of workers when their daemon is killed: they end with it, or wait for the next one, but not for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from orchestrator.launch.homes import list_homes, read_guard
from orchestrator.launch.local import LocalCluster, OrphanPolicy
from orchestrator.launch.local_worker import LocalWorker
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.events import Event
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Gauges, RoundReport
from tests.support import engines
from tests.support.workers import collect, is_gone, tokens_until

pytestmark = pytest.mark.asyncio


DRIVER = """
import asyncio, sys
from pathlib import Path
from orchestrator.launch.local import LocalCluster, OrphanPolicy
from orchestrator.launch.ray_runtime import RayCluster
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import RoundReport
from orchestrator.protocol.ready import Ready
from tests.support import engines

async def main():
    runtime, prompt, directory, wait_s = sys.argv[1:]
    policy = OrphanPolicy(Path(directory), float(wait_s)) if directory else None
    cluster = LocalCluster(policy) if runtime == "local" else RayCluster("")
    await cluster.open()
    worker = await cluster.start(engines.spec(step_s=0.01))
    told = False
    async for event in worker.events():
        if isinstance(event, Ready):
            worker.send(Submit("a", [int(prompt), 5], max_tokens=100_000))
            pid = event.pid
        # One that hangs says nothing behind its fifth token.
        if isinstance(event, RoundReport) and not told and event.deltas:
            told = True
            print(pid, flush=True)

asyncio.run(main())
"""


async def kill_daemon(runtime: str, prompt: int, directory: Path | None = None, wait_s: float = 0.0) -> int:
    """Start a daemon with a worker that decodes, kill the daemon alone, and return the worker's number."""
    driver, pid = await start_daemon(runtime, prompt, directory, wait_s)
    with driver:
        driver.kill()
    return pid


async def start_daemon(
    runtime: str, prompt: int, directory: Path | None, wait_s: float
) -> tuple[subprocess.Popen[str], int]:
    """Start a daemon with a worker that decodes; returns it, and the worker's number."""
    told = (runtime, str(prompt), str(directory or ""), str(wait_s))
    driver = subprocess.Popen(  # noqa: ASYNC220 -- it is killed below, and must not be asyncio's child
        [sys.executable, "-c", DRIVER, *told],
        cwd=engines.ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    lines = iter(driver.stdout.readline, "")  # a log line may come before
    pid = int(await asyncio.to_thread(lambda: next(line for line in lines if line.strip().isdigit())))
    assert psutil.pid_exists(pid)
    if prompt == engines.HANG:
        await asyncio.sleep(0.2)
    return driver, pid


@asynccontextmanager
async def next_daemon(directory: Path, **options: Any) -> AsyncIterator[tuple[LocalWorker, AsyncIterator[Event]]]:
    """The cluster of the daemon that follows, and its worker."""
    cluster = LocalCluster(OrphanPolicy(directory, 20.0))
    await cluster.open()
    try:
        worker = await cluster.start(engines.spec(**{"step_s": 0.01, **options}))
        yield worker, worker.events()
    finally:
        await cluster.close()


async def read_ready(events: AsyncIterator[Event]) -> Ready:
    return await anext(event async for event in events if isinstance(event, Ready))


@pytest.mark.parametrize(
    ("runtime", "prompt", "within_s"),
    [
        ("local", 1, 2.0),
        ("local", engines.HANG, 2.0),
        pytest.param("ray", 1, 10.0, marks=pytest.mark.ray),
    ],
)
async def test_no_worker_outlives_a_killed_daemon_unless_it_is_to_wait(
    runtime: str, prompt: int, within_s: float
) -> None:
    pid = await kill_daemon(runtime, prompt)
    assert await is_gone(pid, within_s)


async def test_an_orphan_is_adopted_as_it_is_and_has_forgotten_what_it_did(tmp_path: Path) -> None:
    pid = await kill_daemon("local", 1, tmp_path, 20.0)
    async with next_daemon(tmp_path) as (worker, events):
        seen: list[Event] = [await anext(events), await anext(events)]
        ready = next(event for event in seen if isinstance(event, Ready))
        assert ready.pid == pid
        assert worker.where == f"local pid {pid}"
        assert any(isinstance(event, Gauges) for event in seen)
        worker.send(Submit("b", [1, 2, 3], max_tokens=8))
        got: dict[str, list[int]] = {}
        async for event in events:
            for delta in event.deltas if isinstance(event, RoundReport) else ():
                got.setdefault(delta.request_id, []).extend(delta.tokens)
            if len(got.get("b", ())) == 8:
                break
        assert got["b"] == engines.tokens([1, 2, 3], 8)
        assert len(got.get("a", ())) <= 1  # the round that ran when it was cancelled
    assert await is_gone(pid)
    assert list_homes(tmp_path) == []
    assert read_guard(tmp_path) is None


async def test_an_adopted_worker_can_be_orphaned_again(tmp_path: Path) -> None:
    pid = await kill_daemon("local", 1, tmp_path, 20.0)
    assert await kill_daemon("local", 1, tmp_path, 20.0) == pid
    async with next_daemon(tmp_path) as (_, events):
        assert (await read_ready(events)).pid == pid


async def test_what_an_orphan_prints_is_in_the_next_daemons_log(tmp_path: Path) -> None:
    await kill_daemon("local", 1, tmp_path, 20.0)
    with structlog.testing.capture_logs() as entries:
        async with next_daemon(tmp_path) as (worker, events):
            worker.send(Submit("b", [engines.RAISE, 0], max_tokens=1))
            with pytest.raises(Exception, match=r"^worker scripted \(pid \d+\) ended$"):
                await collect(events, [])
    assert any("a second line" in str(entry.get("line")) for entry in entries)


async def test_an_orphan_that_nobody_adopts_ends(tmp_path: Path) -> None:
    driver, pid = await start_daemon("local", 1, tmp_path, 1.0)
    killed_s = time.monotonic()
    with driver:
        driver.kill()
    assert await is_gone(pid, 30.0)
    assert time.monotonic() - killed_s >= 1.0, "it waits for the next daemon"


async def test_an_orphan_that_hangs_ends_all_the_same(tmp_path: Path) -> None:
    pid = await kill_daemon("local", engines.HANG, tmp_path, 0.5)
    assert await is_gone(pid, 30.0)


@pytest.mark.parametrize("prompt", [1, engines.HANG])
async def test_an_orphan_that_is_another_worker_or_hangs_makes_room(tmp_path: Path, prompt: int) -> None:
    pid = await kill_daemon("local", prompt, tmp_path, 60.0)
    before_s = time.monotonic()
    async with next_daemon(tmp_path, slots=4 if prompt == engines.HANG else 3) as (worker, events):
        ready = await read_ready(events)
        assert ready.pid != pid
        assert await is_gone(pid, 0.5)
        assert time.monotonic() - before_s < 20.0
        worker.send(Submit("b", [1], max_tokens=3))
        assert await tokens_until(events, 3) == engines.tokens([1], 3)


async def test_another_process_with_an_orphans_number_is_left_alone(tmp_path: Path) -> None:
    pid = await kill_daemon("local", 1, tmp_path, 20.0)
    os.kill(pid, signal.SIGKILL)
    assert await is_gone(pid)
    bystander = subprocess.Popen(["sleep", "30"])  # noqa: ASYNC220 -- killed below
    try:
        (home,) = list_homes(tmp_path)
        record = home.read_record()
        assert record is not None
        home.write_record(type(record)(record.name, bystander.pid, record.birth, record.digest))
        async with next_daemon(tmp_path) as (_, events):
            assert (await read_ready(events)).pid != bystander.pid
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
