"""Workers as subprocesses, beyond the contract."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest

from orchestrator.errors import WorkerLost
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.local import LocalCluster
from orchestrator.workers.messages import Event, Finished, Ready
from tests.support import engines
from tests.support.workers import is_gone, start_worker, tokens_until

pytestmark = pytest.mark.asyncio


async def test_a_stopped_process_is_killed_all_the_same() -> None:
    async with start_worker(LocalCluster()) as (worker, _, ready):
        os.kill(ready.pid, signal.SIGSTOP)
        await worker.stop(0.1)
        assert await is_gone(ready.pid, within_s=2.0)


async def test_close_stops_every_worker() -> None:
    cluster = LocalCluster()
    pids = []
    for _ in range(2):
        worker = await cluster.start(engines.spec())
        ready = await anext(event async for event in worker.events() if isinstance(event, Ready))
        pids.append(ready.pid)
    await cluster.close()
    for pid in pids:
        assert await is_gone(pid, within_s=0.5)


async def test_frames_that_are_no_events_end_the_worker() -> None:
    cluster = LocalCluster()
    worker = await cluster.start(WorkerSpec("odd", "tests.workers.test_local:garbage", {}))
    with pytest.raises(WorkerLost, match="what is no event"):
        await tokens_until(worker.events(), 1)
    await cluster.close()


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
    worker = await cluster.start(WorkerSpec("odd", "tests.workers.test_local:stopped", {}))
    events = worker.events()
    await anext(event async for event in events if isinstance(event, Finished))
    pid = int(worker.where.split()[-1])
    begun_s = time.monotonic()
    with pytest.raises(WorkerLost, match="closed its channel and has not ended yet"):
        await tokens_until(events, 1)
    assert time.monotonic() - begun_s < 4.0  # the process itself would be waited for 5 s
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


def stopped(options: dict[str, Any]) -> Stopped:
    return Stopped()
