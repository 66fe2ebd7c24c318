"""A draft worker for each of very many replicas: who has which is decided for many changes together."""

from __future__ import annotations

from collections import Counter

import pytest

from orchestrator.daemon.control.actions import Action, Send, StartWorker, StopWorker, TellUseless, WakeAfter
from orchestrator.daemon.control.events import (
    ClusterOpened,
    ControlEvent,
    Woke,
    WorkerEnded,
    WorkerEnding,
    WorkerSaid,
    WorkersChosen,
    WorkerStarted,
)
from orchestrator.daemon.control.step import State, step
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.draft_messages import AttachDraft, DrafterState, DraftReady, RemoteState
from orchestrator.protocol.events import Event
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.rounds import Gauges
from tests.api.support import READY
from tests.support.ready import change_ready


class Cluster:
    """Control and its workers, eight replicas to a host, in virtual time. `doors`: where each replica's worker was told
    last that its draft is; `told`: how often any was. `starts`: whether new processes come. `rests`: why each replica's
    draft rests; `useless` are what draft workers were started from that rest, `stopped` the workers that were ended."""

    def __init__(self, replicas: int, workers: int = 0) -> None:
        self.replicas = replicas
        self.state = State(5)
        self.starts = True
        self.now_s = 0.0
        self.doors: dict[int, str] = {}
        self.told = 0
        self.wakes_s: list[float] = []
        self.rests: dict[int, str] = {}
        self.useless: list[WorkerSpec] = []
        self.stopped: list[int] = []
        targets = [WorkerSpec(f"r{number}", "no:where", {}, node=f"h{number // 8}") for number in range(replicas)]
        drafts = [WorkerSpec("small", "no:where", {})] * (workers or replicas)
        self.post(WorkersChosen(targets, drafts))
        self.post(ClusterOpened())

    def post(self, event: ControlEvent) -> None:
        self.now_s += 0.001
        for action in step(self.state, event, self.now_s):
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        match action:
            case StartWorker() if self.starts:
                number, spec = action.worker, action.spec
                self.post(WorkerStarted(number, spec.node))
                self.post(WorkerSaid(number, self.make_ready(number, spec)))
            case Send(worker, AttachDraft(_, LinkEndpoint() as door)):
                self.told += 1
                self.doors[worker] = door.addresses[0]
            case Send(worker, AttachDraft(_, None, why)):
                self.rests[worker] = why
            case TellUseless(spec, _):
                self.useless.append(spec)
            case StopWorker(worker, _):
                self.stopped.append(worker)
            case WakeAfter():
                self.wakes_s.append(self.now_s + action.after_s)
            case _:
                pass

    def make_ready(self, number: int, spec: WorkerSpec) -> Event:
        if spec.name != "small":
            return change_ready(READY, host=spec.node, drafters=["small"])
        host = f"h{(number - self.replicas) // 8}"
        door = LinkEndpoint([f"tcp:{host}:{number}"], b"")
        return DraftReady("small", door, DrafterState("small", "model"), 100, "", "auto", 1, 1.0, host)

    def pass_time(self, until_s: float) -> None:
        """Wake control whenever it has asked for it."""
        while due := [at_s for at_s in self.wakes_s if at_s <= until_s]:
            self.wakes_s.remove(min(due))
            self.now_s = max(self.now_s, min(due))
            self.post(Woke())
        self.now_s = until_s

    def list_hosts_apart(self) -> list[int]:
        """Return the replicas whose draft worker is on another host."""
        return [number for number, door in self.doors.items() if door.split(":")[1] != f"h{number // 8}"]


@pytest.mark.parametrize("replicas", [20, 150])
def test_every_replica_gets_a_worker_of_its_own_on_its_host_without_being_told_often(replicas):
    cluster = Cluster(replicas)
    cluster.pass_time(5.0)
    assert sorted(cluster.doors) == list(range(replicas))
    assert not [door for door, number in Counter(cluster.doors.values()).items() if number > 1]
    assert not cluster.list_hosts_apart()
    assert cluster.told <= 8 * replicas


def test_the_replica_of_a_lost_worker_drafts_elsewhere_within_two_seconds():
    cluster = Cluster(150)
    cluster.pass_time(5.0)
    lost = int(cluster.doors[149].rpartition(":")[2])
    cluster.starts = False
    cluster.post(WorkerEnding(lost, "exit code 1", "crashed"))
    cluster.post(WorkerEnded(lost, "exit code 1", "crashed"))
    cluster.pass_time(7.0)
    assert cluster.doors[149].rpartition(":")[2] != str(lost)
    assert "r149" not in next(one for one in cluster.state.drafts.views() if one.number == lost - 150).targets


def say_use(cluster: Cluster, replica: int, rounds: int, accepted: int, rests: str = "") -> None:
    """A replica says how it gets on with its draft after so many rounds."""
    remote = RemoteState(asks=rounds)
    state = DrafterState("small", "model", accepted=accepted, rests=rests, remote=remote)
    cluster.post(WorkerSaid(replica, Gauges(1, 0, 9, 9, 0, 0, rounds, 0, drafters=[state])))


def list_phases(cluster: Cluster) -> set[str]:
    return {view.phase for view in cluster.state.drafts.views()}


def test_a_draft_worker_that_helps_no_replica_rests_within_a_minute_and_is_tried_again_later():
    cluster = Cluster(2, workers=1)
    for turn in range(40):
        cluster.pass_time(1.0 + turn)
        say_use(cluster, 0, 10 * turn, 5 * turn)
        say_use(cluster, 1, 10 * turn, 0, "no gain")
    assert list_phases(cluster) == {"ready"}, "it helps one of them"
    begun_s = cluster.now_s
    while list_phases(cluster) == {"ready"}:
        turn += 1
        cluster.pass_time(1.0 + turn)
        say_use(cluster, 0, 10 * turn, 200, "no gain")
        say_use(cluster, 1, 10 * turn, 0, "no gain")
        assert cluster.now_s - begun_s < 60.0
    (view,) = cluster.state.drafts.views()
    assert view.detail == "it helped no replica for 30 s: no gain; it is tried again after 10 min"
    assert set(cluster.rests.values()) == {"it helped no replica for 30 s: no gain"}
    assert set(cluster.rests) == {0, 1}
    assert [spec.name for spec in cluster.useless] == ["small"]
    (ended,) = cluster.stopped
    cluster.post(WorkerEnding(ended, "it was stopped", "crashed"))
    cluster.post(WorkerEnded(ended, "it was stopped", "crashed"))
    assert list_phases(cluster) == {"resting"}
    cluster.doors.clear()
    cluster.pass_time(cluster.now_s + 590.0)
    assert cluster.doors == {}
    cluster.pass_time(cluster.now_s + 11.0)
    assert list_phases(cluster) == {"ready"}
    assert set(cluster.doors) == {0, 1}, "they draft with it again"
    assert next(iter(cluster.state.drafts.views())).restarts == 0


def test_a_draft_is_useless_only_once_all_of_its_workers_rest():
    cluster = Cluster(2)
    for turn in range(40):
        cluster.pass_time(1.0 + turn)
        say_use(cluster, 0, 10 * turn, 5 * turn)
        say_use(cluster, 1, 10 * turn, 0, "no gain")
    assert list_phases(cluster) == {"ready", "resting"}, "a device that helps nobody is free"
    assert cluster.useless == [], "its draft helps another replica"
    for turn in range(40, 110):
        cluster.pass_time(1.0 + turn)
        say_use(cluster, 0, 10 * turn, 200, "no gain")
        say_use(cluster, 1, 10 * turn, 0, "no gain")
    assert list_phases(cluster) == {"resting"}
    assert [spec.name for spec in cluster.useless] == ["small"]
