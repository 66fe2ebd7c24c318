"""Keeps draft workers running beside the target's replicas, and each replica told where its own is.

A draft worker serves any number of replicas. Of each draft there are as many workers as its pool says, or as there are
replicas with it. Which of them drafts for which replica, and when one comes or goes, is decided in
policies.serving.draft_pool. No replica waits for them: it serves before they are ready, while they are started again,
and when that is given up; then it is served plainly, until there is one. No effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Final

from orchestrator.control.actions import Action, LogLine, Send, WakeAfter
from orchestrator.control.draft_worker import DraftWorker
from orchestrator.control.events import WorkerEnded, WorkerEnding, WorkerSaid, WorkerStarted
from orchestrator.control.port import DraftView
from orchestrator.control.worker_life import WorkerLife, WorkerLives
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.draft_messages import AttachDraft, DraftLink, DraftReady
from orchestrator.workers.messages import Ready
from policies.serving.draft_pool import PoolSize, PoolTrend, assign_drafts, choose_leaver, follow_pool

NO_POOLS: Final[Mapping[str, PoolSize]] = MappingProxyType({})
_LEAVE_S = 1.0  # a worker that is not needed is left so long, for its replicas to be connected elsewhere


@dataclass(slots=True)
class _Target:
    """A replica that serves: its worker's number, its host, and the drafts that it knows."""

    worker: int
    host: str
    drafts: Sequence[str]


@dataclass(slots=True)
class _Pool:
    """The workers of one draft. `specs`: what they are started from, in turn. `size` None: one for each spec."""

    specs: list[WorkerSpec]
    size: PoolSize | None
    trend: PoolTrend = field(default_factory=PoolTrend)


class DraftWorkers:
    """All draft workers, of every draft. `sizes`: of those that have a pool, by the draft's name."""

    def __init__(self, lives: WorkerLives, sizes: Mapping[str, PoolSize] = NO_POOLS) -> None:
        self._lives = lives
        self._sizes = sizes
        self._pools: dict[str, _Pool] = {}
        self._workers: list[DraftWorker] = []
        self._targets: dict[str, _Target] = {}
        self._assigned: dict[str, dict[str, int]] = {}  # by draft and replica: the worker's number in its pool
        self._connected: dict[str, set[str]] = {}  # by replica: drafts that it says it is connected to
        self._targets_of: dict[tuple[str, int], list[str]] | None = None  # replicas by draft and worker's number
        self._workers_of: dict[str, list[DraftWorker]] | None = None  # by replica
        self._changed = True  # since the last look
        self._waits = False  # for the time of the next look
        self._loads: bool | None = None
        self._begun = False
        self._closed = False
        self._look_at_s = 0.0

    def set_sizes(self, sizes: Mapping[str, PoolSize]) -> None:
        """Have pools of these sizes, from the next `run_these` on."""
        self._sizes = sizes

    def run_these(self, specs: Sequence[WorkerSpec]) -> list[Action]:
        """Have workers of these specs, from when a replica serves. What runs one of them goes on, before others where
        it has a replica; what is left over is stopped."""
        self._closed = False
        self._note_change()
        wanted = self._choose_specs(specs)
        kept: list[DraftWorker] = []
        actions: list[Action] = []
        for worker in sorted(self._workers, key=lambda one: not self._list_targets(one)):
            if worker.life.spec in wanted and not worker.out_of_use and not worker.leaves:
                wanted.remove(worker.life.spec)
                kept.append(worker)
            else:
                actions += worker.life.close()
        self._workers = [worker for worker in self._workers if worker in kept]
        for spec in wanted:
            self._add(spec)
        if self._begun:
            actions += self._start()
        return actions + self._match()

    def target_ready(self, replica: str, number: int, ready: Ready) -> list[Action]:
        """A replica serves: start what is not started yet, and attach what is ready. `number`: its worker's."""
        self._note_change()
        actions = self._start()
        self._targets[replica] = _Target(number, ready.host, ready.all_drafters)
        self.forget_links(replica)
        for worker in self._workers:
            if replica in self._list_targets(worker):
                actions += self._attach(worker, [replica])
        return actions + self._match()

    def detach_target(self, replica: str) -> list[Action]:
        """A replica does not come back: what it had is free."""
        self._note_change()
        self._targets.pop(replica, None)
        self.forget_links(replica)
        return self._match()

    def forget_links(self, replica: str) -> None:
        """A replica's worker is another one, or none: it is connected to nothing."""
        self._connected.pop(replica, None)

    def observe_link(self, replica: str, link: DraftLink, now_s: float) -> list[Action]:
        """A replica's worker said how its connection to a draft worker is."""
        self._note_change()
        actions: list[Action] = []
        if link.state == "connected":
            self._connected.setdefault(replica, set()).add(link.name)
        else:
            self._disconnect(replica, link.name)
        for worker in self._workers:
            targets = self._list_targets(worker)
            if worker.name == link.name and replica in targets:
                alone = len(targets) == 1
                actions += worker.observe_link(replica, link, now_s, alone=alone)
                if link.state == "hung" and worker.suspected:
                    actions += self._attach(worker, [replica])
        return actions

    def observe(self, event: WorkerStarted | WorkerSaid | WorkerEnding | WorkerEnded, now_s: float) -> list[Action]:
        """Something became of a worker; nothing happens where it is none of these."""
        worker = next((one for one in self._workers if one.life.number == event.worker), None)
        if worker is None:
            return []
        self._note_change()
        match event:
            case WorkerStarted():
                return worker.observe_start(event.where, now_s)
            case WorkerSaid():
                told = worker.observe(event.event, now_s)
                if isinstance(event.event, DraftReady):
                    told += [*self._attach(worker, self._list_targets(worker)), *self._match()]
                return told
            case WorkerEnding():
                worker.life.observe_ending()
                return self._match()
            case WorkerEnded():
                return [*worker.observe_end(event, now_s), *self._match()]

    def advance(self, now_s: float) -> list[Action]:
        """Have one worker more or less of a draft where its load asks for it, and end those that have to go."""
        self._changed = self._waits = False
        if not self._begun or self._closed:
            return []
        actions: list[Action] = []
        looks = []
        for name, pool in self._pools.items():
            if pool.size is not None:
                changed, look_s = self._follow(name, pool, pool.size, now_s)
                actions += changed
                looks += [] if look_s is None else [look_s]
        for worker in list(self._workers):
            actions += worker.end_if_silent(now_s)
            if worker.leave_s is not None and now_s >= worker.leave_s:
                self._workers.remove(worker)
                actions += worker.life.close()
        looks += [at_s - now_s for worker in self._workers if (at_s := worker.look_at_s) is not None]
        self._waits = bool(looks)
        return actions + self._schedule_look(min(looks, default=None), now_s)

    def looks(self, now_s: float) -> bool:
        """Return whether there may be something to do: something has changed, or it is time."""
        return self._changed or (self._waits and now_s >= self._look_at_s)

    @property
    def loads(self) -> bool:
        """True where a process is there that is not ready."""
        if self._loads is None:
            self._loads = any(life.running for life in self.list_loading())
        return self._loads

    def list_loading(self) -> list[WorkerLife]:
        """Return the workers that are not ready yet."""
        return [worker.life for worker in self._workers if not worker.serving]

    def list_specs(self, replica: str) -> list[WorkerSpec]:
        """Return what the draft workers that serve a replica now were started from."""
        if self._workers_of is None:
            self._workers_of = {}
            for worker in self._workers:
                for target in self._list_targets(worker):
                    self._workers_of.setdefault(target, []).append(worker)
        drafting = self._workers_of.get(replica, ())
        return [worker.life.spec for worker in drafting if worker.serving and not worker.leaves]

    def views(self) -> tuple[DraftView, ...]:
        """Return the state of each."""
        found = []
        for worker in self._workers:
            targets = self._list_targets(worker)
            connected = [one for one in targets if worker.serving and worker.name in self._connected.get(one, ())]
            found.append(worker.view(targets, connected))
        return tuple(found)

    def close(self) -> list[Action]:
        """End every draft worker. Idempotent."""
        self._closed = True
        return [action for worker in self._workers for action in worker.life.close()]

    def _choose_specs(self, specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Return a spec for each worker that there is to be, and remember what the pools are made of."""
        before, self._pools = self._pools, {}
        for spec in specs:
            pool = self._pools.setdefault(spec.name, _Pool([], self._sizes.get(spec.name)))
            pool.specs.append(spec)
        wanted = []
        for name, pool in self._pools.items():
            now = len(self._list_pool(name)) if name in before else 0
            number = len(pool.specs) if pool.size is None else max(pool.size.least, min(now, pool.size.most))
            wanted += [pool.specs[index % len(pool.specs)] for index in range(number)]
        return wanted

    def _add(self, spec: WorkerSpec) -> DraftWorker:
        taken = {worker.number for worker in self._workers if worker.name == spec.name}
        number = next(number for number in count() if number not in taken)
        pool = self._pools[spec.name]
        several = pool.size is not None or len(pool.specs) > 1
        label = f"{spec.name} number {number}" if several else spec.name
        worker = DraftWorker(self._lives.create(spec, f"draft worker {label}"), number, label)
        self._workers.append(worker)
        return worker

    def _start(self) -> list[Action]:
        self._begun = True
        return [action for worker in self._workers for action in worker.life.begin()]

    def _follow(self, name: str, pool: _Pool, size: PoolSize, now_s: float) -> tuple[list[Action], float | None]:
        """Return what follows from a pool's load, and when to look at it again."""
        workers = self._list_pool(name)
        replicas = sum(name in target.drafts for target in self._targets.values())
        found = follow_pool(pool.trend, size, [worker.rate() for worker in workers], replicas, now_s)
        pool.trend = found.trend
        actions: list[Action] = []
        if found.more > 0:
            spec = pool.specs[len(workers) % len(pool.specs)]
            text = "draft %s is short of time with %d workers: one more is started"
            actions += [LogLine("info", text, (name, len(workers))), *self._add(spec).life.begin(), *self._match()]
        elif found.more < 0:
            number = choose_leaver([worker.rate() for worker in workers], self._assigned.get(name, {}))
            leaver = next(worker for worker in workers if worker.number == number)
            leaver.leave_s = now_s + _LEAVE_S
            text = "draft worker %s, number %d, was not needed for %g s: it is ended"
            actions += [LogLine("info", text, (name, number, size.idle_s)), *self._match()]
        return actions, found.look_s

    def _list_pool(self, name: str) -> list[DraftWorker]:
        return [worker for worker in self._workers if worker.name == name and not worker.leaves]

    def _list_targets(self, worker: DraftWorker) -> list[str]:
        """Return the replicas that a worker drafts for."""
        if worker.leaves:
            return []
        if self._targets_of is None:
            self._targets_of = {}
            for draft, assigned in self._assigned.items():
                for replica, number in assigned.items():
                    self._targets_of.setdefault((draft, number), []).append(replica)
        return self._targets_of.get((worker.name, worker.number), [])

    def _attach(self, worker: DraftWorker, replicas: Iterable[str]) -> list[Action]:
        """Tell replicas' workers where a draft worker is, if it is ready."""
        if not worker.serving or worker.ready is None:
            return []
        command = AttachDraft(worker.name, worker.ready.door)
        return [Send(self._targets[replica].worker, command) for replica in replicas if replica in self._targets]

    def _match(self) -> list[Action]:
        """Give each replica the worker that is to draft for it."""
        actions: list[Action] = []
        before, self._assigned = self._assigned, {}
        self._targets_of = self._workers_of = None
        for name in self._pools:
            usable = [worker for worker in self._list_pool(name) if not worker.out_of_use]
            replicas = {key: target.host for key, target in self._targets.items() if name in target.drafts}
            known = before.get(name, {})
            found = assign_drafts(replicas, [worker.rate() for worker in usable], known)
            self._assigned[name] = found
            self._targets_of = None
            for worker in usable:
                fresh = [key for key, number in found.items() if number == worker.number != known.get(key)]
                for key in fresh:
                    self._disconnect(key, name)
                actions += self._attach(worker, fresh)
        return actions

    def _disconnect(self, replica: str, draft: str) -> None:
        there = self._connected.get(replica)
        if there is not None:
            there.discard(draft)
            if not there:
                del self._connected[replica]

    def _note_change(self) -> None:
        self._changed, self._loads = True, None

    def _schedule_look(self, look_s: float | None, now_s: float) -> list[Action]:
        if look_s is None or now_s < self._look_at_s <= now_s + look_s:
            return []
        self._look_at_s = now_s + max(0.0, look_s)
        return [WakeAfter(max(0.0, look_s))]
