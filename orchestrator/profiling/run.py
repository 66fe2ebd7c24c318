"""Runs measuring workers one after another, so that none disturbs another, and hands over what they find."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from orchestrator.errors import WorkerLost
from orchestrator.links.address import LinkEndpoint
from orchestrator.measuring.engine import KINDS, Found
from orchestrator.workers.contract import Cluster, Worker, WorkerSpec
from orchestrator.workers.messages import EndpointOpened, Event, Failed, Finished, MeasuredValue, Progress, Stop

_GRACE_S = 2.0
_DROPPED_GRACE_S = 0.2  # nobody wants what it measures any more


@dataclass(frozen=True, slots=True)
class Watch:
    """Hears how a piece of work goes: the stage and the fraction done (negative: not known), and what was found."""

    progress: Callable[[str, float], None]
    found: Callable[[Found], object]


async def measure_on_cluster(cluster: Cluster, spec: WorkerSpec, watch: Watch) -> None:
    """Run one piece of work on an open cluster. Raises WorkerError, with the reason, where it does not end well."""
    worker, grace_s = await cluster.start(spec), _GRACE_S
    try:
        async for event in _events(worker):
            if isinstance(event, Progress):
                watch.progress(event.stage, event.fraction)
            elif isinstance(event, MeasuredValue):
                watch.found(msgspec.convert(event.value, KINDS[event.kind]))
            elif isinstance(event, Finished):
                worker.send(Stop())
    except asyncio.CancelledError:
        grace_s = _DROPPED_GRACE_S
        raise
    finally:
        await worker.stop(grace_s)


async def measure_path(
    cluster: Cluster, echo: WorkerSpec, probe: Callable[[LinkEndpoint], WorkerSpec], watch: Watch
) -> None:
    """Let the worker of `echo` open an endpoint, and that of `probe` connect to it. Raises WorkerError."""
    worker = await cluster.start(echo)
    try:
        async for event in _events(worker):
            if isinstance(event, EndpointOpened):
                await measure_on_cluster(cluster, probe(event.door), watch)
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
