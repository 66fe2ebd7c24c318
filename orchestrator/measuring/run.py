"""Runs measuring workers one after another, so that none disturbs another, and hands over what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from device_profiles.store import as_value
from orchestrator.cluster.port import Cluster, Failed, Finished, Measured, Progress, Stop, WorkerSpec
from orchestrator.errors import WorkerError
from orchestrator.measuring.engine import KINDS, Found

_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Watch:
    """Hears how a piece of work goes: its worker's name, the stage, and the fraction done (negative: not known)."""

    progress: Callable[[str, str, float], None]
    found: Callable[[str, Found], object]
    failed: Callable[[str, str], None]


async def run(cluster: Cluster, specs: Sequence[WorkerSpec], watch: Watch) -> None:
    """Run the work; what one of them fails with is told, and the next one goes on. Raises WorkerError where the cluster
    cannot be opened."""
    await cluster.open()
    try:
        for spec in specs:
            try:
                await _run(cluster, spec, watch)
            except WorkerError as error:
                watch.failed(spec.name, str(error))
    finally:
        await cluster.close()


async def _run(cluster: Cluster, spec: WorkerSpec, watch: Watch) -> None:
    worker = await cluster.start(spec)
    failed = False
    try:
        async for event in worker.events():
            if isinstance(event, Progress):
                watch.progress(spec.name, event.stage, event.fraction)
            elif isinstance(event, Measured):
                watch.found(spec.name, as_value(KINDS[event.kind], event.value))
            elif isinstance(event, Finished):
                worker.send(Stop())
            elif isinstance(event, Failed):
                failed = True
                watch.failed(spec.name, event.message)
    except WorkerError:
        if not failed:  # it said itself why it ended
            raise
    finally:
        await worker.stop(_GRACE_S)
