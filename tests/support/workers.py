"""Workers over the scripted engine, as tests of clusters start and read them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import psutil

from orchestrator.errors import ClusterAway
from orchestrator.protocol.contract import Cluster, Worker
from orchestrator.protocol.events import Event
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Delta, RoundReport
from tests.support import engines, warm
from tests.support.waiting import is_alive


def rays_environment() -> dict[str, str]:
    """The variables that Ray reads, but for one that importing it sets."""
    names = [name for name in os.environ if name.startswith("RAY_") and name != "RAY_CLIENT_MODE"]
    return {name: os.environ[name] for name in (*names, "PYTHONBREAKPOINT") if name in os.environ}


def list_workers() -> list[psutil.Process]:
    """Return this process's workers in the order in which they began. Other tests may have left children of other
    kinds, and some that nobody waited for."""
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    running = [
        child
        for child in children
        if child.pid in warm.forked_workers or "orchestrator.worker.local_host" in _read_command(child)
    ]
    return sorted(running, key=lambda child: (child.create_time(), child.pid))


def _read_command(child: psutil.Process) -> list[str]:
    """Return a child's command line. The kernel shows none yet for a moment in which whoever started it may go on."""
    for _ in range(100):
        with suppress(psutil.ZombieProcess):  # it has ended meanwhile
            if command := child.cmdline():
                return command
        time.sleep(0.001)
    return []


@asynccontextmanager
async def start_worker(cluster: Cluster, **options: Any) -> AsyncIterator[tuple[Worker, AsyncIterator[Event], Ready]]:
    """A worker that is ready, with its events; stopped in the end, whatever happened."""
    worker = await cluster.start(engines.spec(**options))
    events = worker.events()
    try:
        async for event in events:
            if isinstance(event, Ready):
                yield worker, events, event
                break
    finally:
        await worker.stop(5.0)


async def start_on(cluster: Cluster, within_s: float, node: str = "") -> Worker:
    """Return a worker, once the cluster has a place for one."""
    spec = msgspec.structs.replace(engines.spec(step_s=0.005), node=node)
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await cluster.start(spec)
        except ClusterAway:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.2)


async def deltas(events: AsyncIterator[Event]) -> AsyncIterator[Delta]:
    async for event in events:
        if isinstance(event, RoundReport):
            for delta in event.deltas:
                yield delta


async def tokens_until(events: AsyncIterator[Event], count: int, into: list[int] | None = None) -> list[int]:
    """Return a lone stream's tokens until it has finished or `count` have come."""
    got = into if into is not None else []
    async for delta in deltas(events):
        got.extend(delta.tokens)
        if delta.finish or len(got) >= count:
            break
    return got


async def collect(events: AsyncIterator[Event], into: list[Event]) -> None:
    """Keep the events that came, also when their end is an error."""
    async for event in events:
        into.append(event)


async def is_gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process ends; one that nobody has reaped yet has ended too."""
    deadline = time.monotonic() + within_s
    while is_alive(pid):
        if time.monotonic() >= deadline:
            return not is_alive(pid)  # it may have ended while this process stood still
        await asyncio.sleep(0.02)
    return True
