"""How a worker was lost: the kernel killed it for memory, somebody killed it, or it crashed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import psutil
import pytest
from outrider_lab.chaos.faults.memory import find_memory_cgroup, starve

from orchestrator.errors import WorkerLost
from orchestrator.launch.local import LocalCluster
from orchestrator.protocol.commands import Submit
from tests.support.workers import start_worker, tokens_until


async def find_kind_of_loss(end: Callable[[int], object]) -> str:
    """Return how a worker was lost whose process was ended so."""
    async with start_worker(LocalCluster(), step_s=0.005) as (worker, events, ready):
        worker.send(Submit("a", [1, 2, 3], max_tokens=1_000_000))
        await tokens_until(events, 10)
        ending = asyncio.create_task(asyncio.to_thread(end, ready.pid))
        with pytest.raises(WorkerLost) as lost:
            await tokens_until(events, 1_000_000)
        assert await ending is not False
        assert ("was killed for want of memory" in str(lost.value)) == (lost.value.kind == "memory")
        return lost.value.kind


async def test_a_worker_that_the_kernel_ended_for_memory_is_told_from_one_that_somebody_killed() -> None:
    if find_memory_cgroup() is None or os.geteuid() != 0:
        pytest.skip("memory cgroups cannot be made here")
    starved = f"outrider-test-{os.getpid()}"
    assert await find_kind_of_loss(lambda pid: starve(pid, starved, lambda: not is_running(pid))) == "memory"
    assert await find_kind_of_loss(lambda pid: os.kill(pid, signal.SIGKILL)) == "killed"
    assert await find_kind_of_loss(lambda pid: os.kill(pid, signal.SIGABRT)) == "crashed"


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
