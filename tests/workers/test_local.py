"""Workers as subprocesses, beyond the contract."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from adapters.framing import add_header
from orchestrator.errors import WorkerLost
from orchestrator.launch.local import LocalCluster
from orchestrator.protocol.commands import Cancel, Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.events import Event, Finished
from orchestrator.protocol.frames import encode
from orchestrator.protocol.ready import Ready
from tests.support import engines
from tests.support.waiting import RunningTime
from tests.support.workers import is_gone, list_workers, start_worker, tokens_until

pytestmark = pytest.mark.asyncio


async def test_a_stopped_process_is_killed_all_the_same() -> None:
    async with start_worker(LocalCluster()) as (worker, _, ready):
        os.kill(ready.pid, signal.SIGSTOP)
        await worker.stop(0.1)
        assert await is_gone(ready.pid, within_s=10.0)


async def test_close_stops_every_worker() -> None:
    cluster = LocalCluster()
    pids = []
    for _ in range(2):
        worker = await cluster.start(engines.spec())
        ready = await anext(event async for event in worker.events() if isinstance(event, Ready))
        pids.append(ready.pid)
    await cluster.close()
    for pid in pids:
        assert await is_gone(pid, within_s=3.0)


async def test_frames_that_are_no_events_end_the_worker() -> None:
    cluster = LocalCluster()
    worker = await cluster.start(WorkerSpec("odd", "tests.workers.test_local:garbage", {}))
    with pytest.raises(WorkerLost, match="what is no event"):
        await tokens_until(worker.events(), 1)
    await cluster.close()


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (add_header(b"\xc1 is no MessagePack"), "DecodeError"),
        (add_header(encode([Cancel("a")])[:-3]), "DecodeError"),
        (b"\xff\xff\xff\xff", "ProtocolError: a frame of 4294967295 bytes was announced"),
    ],
)
async def test_a_thread_that_dies_of_a_broken_frame_ends_the_worker_with_a_reason(frame: bytes, said: str) -> None:
    with structlog.testing.capture_logs() as entries:
        async with start_worker(LocalCluster(), step_s=0.005) as (worker, events, ready):
            worker.send(Submit("a", [1, 2], max_tokens=100_000))
            await tokens_until(events, 3)
            cast(Any, worker)._writer.write(frame)
            with pytest.raises(WorkerLost, match=r"exited with code 3$"):
                await tokens_until(events, 100_000)
            assert await is_gone(ready.pid)
    lines = [str(entry.get("line")) for entry in entries]
    assert any(line.startswith("the thread commands died, and the worker with it") and said in line for line in lines)


async def test_a_worker_whose_events_nobody_takes_ends() -> None:
    async with start_worker(LocalCluster(), step_s=0.005) as (worker, events, ready):
        worker.send(Submit("a", [1, 2], max_tokens=100_000))
        await tokens_until(events, 3)
        cast(Any, worker)._writer.get_extra_info("socket").shutdown(socket.SHUT_RD)
        assert await is_gone(ready.pid, within_s=60.0), "it decodes for nobody"


@pytest.mark.parametrize(("how", "thread"), [("encoding", "events"), ("thread", "helper")])
async def test_a_thread_that_dies_of_a_mistake_of_ours_ends_the_worker_with_a_reason(how: str, thread: str) -> None:
    cluster = LocalCluster()
    with structlog.testing.capture_logs() as entries:
        worker = await cluster.start(WorkerSpec("odd", "tests.workers.test_local:faulty", {"how": how}))
        with pytest.raises(WorkerLost, match=r"exited with code 3$"):
            await tokens_until(worker.events(), 1)
        await cluster.close()
    assert any(f"the thread {thread} died" in str(entry.get("line")) for entry in entries)


async def test_the_kernel_takes_workers_before_the_daemon() -> None:
    async with start_worker(LocalCluster()) as (_, _, ready):
        assert oom_score(ready.pid) == min(1000, oom_score(os.getpid()) + 500)


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


class Faulty:
    """Decodes for ever, while one of its threads dies."""

    def __init__(self, how: str) -> None:
        self._how = how

    def submit(self, command: object) -> None: ...

    def run(self, emit: Callable[[Event], None]) -> None:
        if self._how == "encoding":
            emit(cast(Event, object()))
        else:
            threading.Thread(target=lambda: 1 // 0, name="helper").start()
        time.sleep(60.0)


def faulty(options: dict[str, Any]) -> Faulty:
    return Faulty(**options)


class Garbage:
    """Emits what is not in the contract."""

    def submit(self, command: object) -> None: ...

    def describe_step(self) -> None: ...

    def run(self, emit: Callable[[Event], None]) -> None:
        emit(cast(Event, {"type": "unheard of"}))
        time.sleep(60.0)


def garbage(options: dict[str, Any]) -> Garbage:
    return Garbage()


async def test_a_channel_that_closes_is_told_before_the_process_has_ended() -> None:
    cluster = LocalCluster()
    worker = await cluster.start(WorkerSpec("odd", "tests.workers.test_local:make_stopped", {}))
    events = worker.events()
    await anext(event async for event in events if isinstance(event, Finished))
    pid = int(worker.where.split()[-1])
    with RunningTime() as running, pytest.raises(WorkerLost, match="closed its channel and has not ended yet"):
        await tokens_until(events, 1)
    assert running.read_s() < 4.0  # the process itself would be waited for 5 s
    await worker.stop(0.0)
    assert await is_gone(pid)
    await cluster.close()


class Stopped:
    """Hangs up, and stops its own process: it can neither go on nor end."""

    def submit(self, command: object) -> None: ...

    def describe_step(self) -> None: ...

    def run(self, emit: Callable[[Event], None]) -> None:
        emit(Finished())
        time.sleep(0.3)
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as link:
                link.shutdown(socket.SHUT_RDWR)
                os.kill(os.getpid(), signal.SIGSTOP)


def make_stopped(options: dict[str, Any]) -> Stopped:
    return Stopped()


async def test_a_worker_that_was_started_ahead_is_the_one_that_starts() -> None:
    cluster = LocalCluster()
    spec = WorkerSpec("ahead", engines.ENTRY, {})
    try:
        await cluster.start_ahead(spec)
        (before,) = list_children()
        worker = await cluster.start(spec)
        assert list_children() == [before]
        assert worker.where.endswith(str(before))
        assert str(before) not in (await cluster.start(spec)).where, "it is taken once"
    finally:
        await cluster.close()


async def test_a_worker_that_was_started_ahead_of_another_one_ends_and_so_does_one_that_nobody_wants() -> None:
    cluster = LocalCluster()
    try:
        await cluster.start_ahead(WorkerSpec("ahead", engines.ENTRY, {"step_s": 0.5}))
        await cluster.start_ahead(WorkerSpec("unwanted", engines.ENTRY, {}))
        first, second = list_children()
        await cluster.start(WorkerSpec("ahead", engines.ENTRY, {"step_s": 0.1}))
        assert first not in list_children()
        assert second in list_children()
    finally:
        await cluster.close()
    assert list_children() == []


def list_children() -> list[int]:
    """Return the workers of this process that run, in the order in which they began."""
    return [worker.pid for worker in list_workers()]
