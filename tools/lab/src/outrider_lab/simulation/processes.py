"""The processes that control starts in a simulation, the links to them, and their ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from device_profiles.units import MS_PER_S
from orchestrator.daemon.control.actions import AskPages, Send, StartWorker, StopWorker
from orchestrator.daemon.control.events import (
    StandbySpec,
    WorkerEnded,
    WorkerEnding,
    WorkerSaid,
    WorkerStarted,
)
from orchestrator.protocol.commands import Cancel, Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.draft_messages import AttachDraft, DraftLink
from orchestrator.protocol.events import Event, MovedOut
from outrider_lab.simulation.draft_worker import SimulatedDraftWorker
from outrider_lab.simulation.figures import TargetUse
from outrider_lab.simulation.fleet import DraftKind, PlacedReplica, build_ready
from outrider_lab.simulation.target_worker import SimulatedTarget
from policies.serving.failover.blame import LossKind

if TYPE_CHECKING:
    from outrider_lab.simulation.world import World


@dataclass(frozen=True, slots=True)
class Timing:
    """What is beside decoding, in ms or s. A request is taken in `intake_ms` after its client sent it, and its tokens
    are with its client `deliver_ms` after the worker said them. A process is there after `spawn_s`. A lost process is
    seen after `crash_seen_s`, a host that is away after `host_seen_s`."""

    intake_ms: float = 2.0
    deliver_ms: float = 1.0
    spawn_s: float = 0.5
    crash_seen_s: float = 0.02
    host_seen_s: float = 3.25


USUAL_TIMING = Timing()


@dataclass(slots=True)
class SimulatedProcess:
    """What control started on a `host`: a target's worker or a draft's. `ready` once it has loaded."""

    order: StartWorker
    host: str
    target: SimulatedTarget | None = None
    draft: SimulatedDraftWorker | None = None
    ready: bool = False


class Processes:
    """All that run, by the number of their place. `away`: hosts that nobody reaches. `slowness`: of replicas on devices
    that are slow, by name. `uses`: what the replicas of each kind did."""

    def __init__(self, world: World) -> None:
        self.away: set[str] = set()
        self.slowness: dict[str, float] = {}
        self.uses: dict[str, TargetUse] = {}
        self.world = world
        self._running: dict[int, SimulatedProcess] = {}
        self._placed: dict[str, PlacedReplica] = {one.name: one for one in world.fleet.replicas}
        self._drafts: dict[str, DraftKind] = {}

    def list_specs(self) -> tuple[list[WorkerSpec], list[WorkerSpec], list[StandbySpec]]:
        """Return what control is to run: targets, draft workers, standbys."""
        targets, standbys, drafts = [], [], []
        for one in self.world.fleet.replicas:
            options = {"placed": one.name, "draft": ""}
            spec = WorkerSpec(one.name, "simulated", options, node=one.host, device=one.device)
            if one.standby is not None:
                standbys.append(StandbySpec(spec, one.standby))
            else:
                targets.append(spec)
            draft = one.kind.draft
            if draft is not None:
                self._drafts[draft.name] = draft
                options = {"placed": "", "draft": draft.name, "name": draft.name}
                drafts.append(
                    WorkerSpec(draft.name, "simulated", options, node=one.draft_host, device=one.draft_device)
                )
        return targets, drafts, standbys

    def list_running(self) -> Iterator[tuple[int, SimulatedProcess]]:
        """Yield the number and the process of each place; places may end meanwhile."""
        yield from list(self._running.items())

    def count_rounds(self) -> int:
        return sum(use.rounds for use in self.uses.values())

    def are_loading(self) -> bool:
        return any(not one.ready for one in reversed(self._running.values()))  # the last ones are ready last

    def listen(self) -> tuple[list[int], bool]:
        """Return the numbers of those that say in each round, or at each step of loading, that they live; and whether
        any stands still."""
        heard, frozen = [], False
        for number, one in self._running.items():
            target = one.target
            if target is not None and target.frozen:
                frozen = True
            elif (target is None or target.busy or not one.ready) and one.host not in self.away:
                heard.append(number)
        return heard, frozen

    def start(self, action: StartWorker) -> None:
        process = self._running[action.worker] = SimulatedProcess(action, action.spec.node)
        self.world.after(action.after_s + self.world.timing.spawn_s, self._finish_spawn, (action.worker, process))

    def stop(self, action: StopWorker) -> None:
        self.end(action.worker, "the worker was stopped", "killed", seen_s=0.0)

    def end(self, worker: int, cause: str, kind: LossKind, *, seen_s: float | None = None) -> None:
        """End a process; control sees it after a while."""
        process = self._running.pop(worker, None)
        if process is None:
            return
        if process.target is not None:
            process.target.lose()
        if process.draft is not None:
            for target in list(process.draft.targets):
                target.follow_draft(None)
                self.tell(target.number, DraftLink(process.draft.kind.name, "lost", cause))
                target.say_gauges()
        delay_s = self.world.timing.crash_seen_s if seen_s is None else seen_s
        self.world.after(delay_s, self._report_end, (worker, cause, kind))

    def send(self, action: Send) -> None:
        """Pass a command on: it is there half a round trip later."""
        process = self._running.get(action.worker)
        if process is None or not process.ready:
            return
        way_s = self._find_way_s(process.host)
        if way_s:
            self.world.after(way_s, self._take, (process, action))
        else:
            self._take((process, action))

    def tell(self, worker: int, event: Event) -> None:
        """A worker says something: control hears of it half a round trip later."""
        process = self._running.get(worker)
        way_s = self._find_way_s(process.host) if process is not None else 0.0
        if way_s:
            self.world.after(way_s, self._hear, (worker, event, process))
        else:
            self.world.post(WorkerSaid(worker, event))

    def forget_pages(self, action: AskPages) -> None:
        """A worker gives a sequence up, and moves no pages: that is not simulated."""
        process = self._running.get(action.worker)
        if process is not None and process.target is not None:
            process.target.cancel(action.sent_id)
            self.world.post(WorkerSaid(action.worker, MovedOut(action.sent_id, None, 0.0, "it is simulated")))

    def is_crowded(self, machine: str) -> bool:
        busy = [one for one in self._running.values() if one.target is not None and one.target.busy]
        return sum(one.target is not None and one.target.replica.machine == machine for one in busy) > 1

    def _hear(self, told: tuple[int, Event, SimulatedProcess]) -> None:
        worker, event, process = told
        if self._running.get(worker) is process and process.host not in self.away:
            self.world.post(WorkerSaid(worker, event))

    def _take(self, sent: tuple[SimulatedProcess, Send]) -> None:
        process, (worker, command) = sent[0], (sent[1].worker, sent[1].command)
        target = process.target
        if target is None or self._running.get(worker) is not process or process.host in self.away:
            return
        match command:
            case Submit():
                target.submit(command)
            case Cancel():
                target.cancel(command.request_id)
            case AttachDraft():
                self._attach(target, command)
            case _:
                pass

    def _attach(self, target: SimulatedTarget, command: AttachDraft) -> None:
        if command.endpoint is None:
            target.follow_draft(None)
            return
        process = self._running.get(int(command.endpoint.addresses[0].partition(":")[2]))
        draft = process.draft if process is not None else None
        if process is None or draft is None or process.host in self.away:
            self.tell(target.number, DraftLink(command.name, "lost", "nobody answers"))
            return
        link = self.world.fleet.find_link(target.replica.host, draft.host)
        draft.rtts_ms[target.number] = (link.rtt_ms, link.bytes_per_s)
        target.follow_draft(draft)
        self.tell(target.number, DraftLink(command.name, "connected"))
        target.say_gauges()

    def _finish_spawn(self, told: tuple[int, SimulatedProcess]) -> None:
        worker, process = told
        if self._running.get(worker) is not process:
            return
        spec = process.order.spec
        if process.host in self.away:
            self.end(worker, "its host is away", "host")
            return
        self.world.post(WorkerStarted(worker, f"simulated on {spec.node or 'this host'}"))
        placed = self._placed.get(spec.options["placed"])
        if placed is not None:
            use = self.uses.setdefault(placed.kind.name, TargetUse())
            process.target = SimulatedTarget(self, worker, placed, use)
            process.target.slowness = self.slowness.get(placed.name, 1.0)
            load_s = placed.kind.load_s
        else:
            process.draft = SimulatedDraftWorker(worker, self._drafts[spec.options["draft"]], process.host)
            load_s = process.draft.kind.load_s
        self.world.after(load_s, self._finish_loading, (worker, process))

    def _finish_loading(self, told: tuple[int, SimulatedProcess]) -> None:
        worker, process = told
        if self._running.get(worker) is not process or process.host in self.away:
            return
        process.ready = True
        if process.target is not None:
            self.tell(worker, build_ready(process.target.replica))
            process.target.say_gauges()
        elif process.draft is not None:
            self.tell(worker, process.draft.describe())

    def _report_end(self, told: tuple[int, str, LossKind]) -> None:
        self.world.post(WorkerEnding(*told))
        self.world.post(WorkerEnded(*told))

    def _find_way_s(self, host: str) -> float:
        api = self.world.fleet.api_host
        return self.world.fleet.find_link(api, host).rtt_ms / 2.0 / MS_PER_S if api and host != api else 0.0
