"""What follows from load for replicas: who is asked for one more or one less, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from orchestrator.daemon.control.events import StandbySpec
from orchestrator.daemon.control.replicas.scale_load import SeenReplicas
from orchestrator.daemon.control.replicas.scaler import PlacedReplicas, ReplicaScaler
from orchestrator.errors import WorkerError
from orchestrator.protocol.contract import WorkerSpec
from policies.serving.scaling import ADD_AFTER_S, FIRST_PAUSE_S, ScaleBounds, ScaledReplica, ScaleLoad

IDLE_S = 10.0
PLACES = [WorkerSpec(f"target-{number}", "", {}, cores=[number]) for number in range(3)]
DRAFT = WorkerSpec("model", "", {})


@dataclass
class Workers:
    """Runs what it is told at once, and takes note of it. `requests` are shared evenly, and each has 4 places."""

    running: list[WorkerSpec] = field(default_factory=lambda: PLACES[:1])
    drafts: Sequence[Sequence[WorkerSpec]] = ()
    gone: set[str] = field(default_factory=set)
    requests: int = 0
    refuses: str = ""
    asked: int = 0
    now_s: float = 0.0

    async def change(
        self,
        specs: Sequence[WorkerSpec],
        drafts: Sequence[Sequence[WorkerSpec]],
        standbys: Sequence[StandbySpec] | None = None,
    ) -> list[int]:
        self.asked += 1
        if self.refuses:
            raise WorkerError(self.refuses)
        self.running, self.drafts = list(specs), drafts
        return list(range(len(specs)))

    def measure(self) -> SeenReplicas:
        seen = [
            ScaledReplica(one.name, serving=one.name not in self.gone, gone=one.name in self.gone, places=4)
            for one in self.running
        ]
        return SeenReplicas(ScaleLoad(tuple(seen), self.requests), {one.name: one for one in self.running})

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.running]


def scaler_of(workers: Workers, places: Sequence[WorkerSpec] = PLACES, least: int = 1) -> ReplicaScaler:
    placed = PlacedReplicas(workers, places, [DRAFT], "all are taken")
    return ReplicaScaler(ScaleBounds(least, 3, IDLE_S), workers.measure, placed, workers)


async def look(scaler: ReplicaScaler, workers: Workers, seconds: float) -> None:
    for _ in range(round(seconds)):
        await scaler.look()
        workers.now_s += 1.0


async def test_places_are_taken_one_after_the_other_and_the_newest_is_given_back_first():
    workers = Workers(requests=20)
    scaler = scaler_of(workers)
    await look(scaler, workers, ADD_AFTER_S)
    assert workers.names == ["target-0"]
    await look(scaler, workers, 1.0)
    assert workers.names == ["target-0", "target-1"]
    assert workers.drafts == [[DRAFT], [DRAFT]], "each has its draft workers"
    await look(scaler, workers, ADD_AFTER_S + 1.0)
    assert workers.names == ["target-0", "target-1", "target-2"]
    view = scaler.view()
    assert (view.wanted, view.there, view.ready, view.least, view.most) == (3, 3, 3, 1, 3)
    assert view.last.startswith("2 -> 3 in 0.0 s: 20 requests for 8 places")
    workers.requests = 0
    await look(scaler, workers, IDLE_S + 1.0)
    assert workers.names == ["target-0", "target-1"]
    await look(scaler, workers, 10 * IDLE_S)
    assert workers.names == ["target-0"]


async def test_a_start_that_fails_is_tried_again_later_and_told(caplog: pytest.LogCaptureFixture):
    workers = Workers(requests=20, refuses="the worker has no memory")
    scaler = scaler_of(workers)
    await look(scaler, workers, ADD_AFTER_S + 1.0)
    assert workers.asked == 1
    assert "there is no replica more: the worker has no memory; tried again in 5 s" in caplog.text
    assert scaler.view().last == "one more could not be had: the worker has no memory"
    await look(scaler, workers, FIRST_PAUSE_S - 1.0)
    assert workers.asked == 1
    assert scaler.view().wanted == 2
    assert "one more could not be had, tried again in" in scaler.view().why
    await look(scaler, workers, FIRST_PAUSE_S)
    assert workers.asked == 2
    workers.refuses = ""
    await look(scaler, workers, 3 * FIRST_PAUSE_S)
    assert workers.names == ["target-0", "target-1", "target-2"]


async def test_a_replica_that_is_gone_is_replaced_in_another_place_as_long_as_there_is_one():
    workers = Workers(running=PLACES[:2], gone={"target-0"})
    scaler = scaler_of(workers, least=2)
    await look(scaler, workers, 1.0)
    assert workers.names == ["target-1", "target-2"]
    workers.gone = {"target-2"}
    await look(scaler, workers, 1.0)
    assert workers.names == ["target-1", "target-0"]
    nowhere = Workers(running=PLACES[:2], gone={"target-0"})
    await look(scaler_of(nowhere, PLACES[:2], least=2), nowhere, 5.0)
    assert nowhere.asked == 0, "it is started again where it was"


async def test_another_place_is_used_at_once_though_a_start_failed():
    workers = Workers(requests=20, refuses="no")
    placed = PlacedReplicas(workers, PLACES[:2], [], "all are taken")
    scaler = ReplicaScaler(ScaleBounds(1, 3, IDLE_S), workers.measure, placed, workers)
    await look(scaler, workers, ADD_AFTER_S + 1.0)
    assert workers.asked == 1
    workers.refuses = ""
    placed.set_places([*PLACES[:2], WorkerSpec("target-2", "", {}, node="10.0.0.2")])
    await look(scaler, workers, ADD_AFTER_S + 1.0)
    assert len(workers.names) == 2
