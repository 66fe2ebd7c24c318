"""Runs measuring workers one after another, so that none disturbs another, and hands over what they find."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass

import msgspec

from orchestrator.errors import WorkerLost
from orchestrator.protocol.commands import Stop
from orchestrator.protocol.contract import Cluster, Worker, WorkerSpec
from orchestrator.protocol.events import EndpointOpened, Event, Failed, Finished, MeasuredValue, Progress
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.measuring import KINDS, Finding

_GRACE_S = 2.0  # a measuring worker has nothing to finish. Not tuned.
_DROPPED_GRACE_S = 0.2  # nobody wants what it measures any more


@dataclass(frozen=True, slots=True)
class Watch:
    """Hears how a piece of work goes: the stage and the fraction done (negative: not known), and what was found."""

    progress: Callable[[str, float], None]
    on_finding: Callable[[Finding], object]


async def measure_on_cluster(cluster: Cluster, spec: WorkerSpec, watch: Watch) -> None:
    """Run one piece of work on an open cluster. Raises WorkerError, with the reason, where it does not end well."""
    worker, grace_s = await cluster.start(spec), _GRACE_S
    try:
        async for event in _events(worker):
            if isinstance(event, Progress):
                watch.progress(event.stage, event.fraction)
            elif isinstance(event, MeasuredValue):
                watch.on_finding(msgspec.convert(event.value, KINDS[event.kind]))
            elif isinstance(event, Finished):
                worker.send(Stop())
    except asyncio.CancelledError:
        grace_s = _DROPPED_GRACE_S
        raise
    finally:
        await worker.stop(grace_s)


async def measure_until(
    cluster: Cluster, spec: WorkerSpec, watch: Watch, end: Coroutine[object, object, object]
) -> bool:
    """Run one piece of work, and drop it when `end` returns first. Returns whether it was done. Raises WorkerError."""
    measuring = asyncio.create_task(measure_on_cluster(cluster, spec, watch), name="measure")
    ending = asyncio.create_task(end, name="wait for a reason to measure later")
    try:
        await asyncio.wait({measuring, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not measuring.done():
            return False
        measuring.result()
        return True
    finally:
        measuring.cancel()
        ending.cancel()
        await asyncio.gather(measuring, ending, return_exceptions=True)


async def measure_path(
    cluster: Cluster, echo: WorkerSpec, probe: Callable[[LinkEndpoint], WorkerSpec], watch: Watch
) -> None:
    """Let the worker of `echo` open an endpoint, and that of `probe` connect to it. Raises WorkerError."""
    worker = await cluster.start(echo)
    try:
        async for event in _events(worker):
            if isinstance(event, EndpointOpened):
                await measure_on_cluster(cluster, probe(event.endpoint), watch)
                return
        raise WorkerLost(f"worker {echo.name} opened no endpoint")
    finally:
        await worker.stop(_GRACE_S)


async def _events(worker: Worker) -> AsyncIterator[Event]:
    """Yield a worker's events; what it says of its failure is the error, and not how its process ended then."""
    async for event in worker.events():
        if isinstance(event, Failed):
            raise WorkerLost(event.message)
        yield event
