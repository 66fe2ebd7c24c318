"""Keeps draft workers running beside the target's replicas, and each replica told where its own is.

A draft worker serves any number of replicas. Of each draft there are as many workers as its pool says, or as there are
replicas with it. When one comes or goes is decided in policies.serving.draft_pool, and which of them drafts for which
replica in policies.serving.draft_sharing. No replica waits for them: it serves before they are ready, while they are
started again, and when that is given up; then it is served plainly, until there is one. No effects.

Where there are few of them, who drafts for whom is decided anew with each change. Where there are many, it is decided
once a second at most: a thousand workers that become ready are not worth a thousand looks at all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Final

from orchestrator.daemon.control.actions import Action, LogLine, TellUseless, WakeAfter
from orchestrator.daemon.control.drafts.draft_shares import DraftShares
from orchestrator.daemon.control.drafts.draft_worker import DraftWorker
from orchestrator.daemon.control.events import WorkerEnded, WorkerEnding, WorkerEvent, WorkerSaid, WorkerStarted
from orchestrator.daemon.control.port import DraftView
from orchestrator.daemon.control.replicas.worker_life import WorkerLife, WorkerLives
from orchestrator.daemon.control.state import tell_nobody
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.draft_messages import DraftLink, DraftReady
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Gauges
from policies.serving.draft_pool import PoolSize, PoolTrend, choose_leaver, follow_pool
from policies.serving.draft_rest import DraftUse

NO_POOLS: Final[Mapping[str, PoolSize]] = MappingProxyType({})
# Workers and replicas together. ADR 0098.
_FEW: Final = 64
# Where there are more. ADR 0098: ten thousand start in 4.2 s of one core.
_LOOK_EVERY_S: Final = 1.0
_SOON_S: Final = 1e-6  # a timer may go off so much too early
# A worker that is not needed is left so long, for its replicas to be connected elsewhere. ADR 0056.
_LEAVE_S = 1.0


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
        self._workers: dict[int, DraftWorker] = {}  # by the number of their life
        self._named: dict[str, dict[int, DraftWorker]] = {}  # by draft and their number in its pool
        self._fresh: list[DraftWorker] = []  # not begun yet
        self._loading: dict[DraftWorker, None] = {}  # a process is there that is not ready
        self._shares = DraftShares()
        self._changed = True  # since the last look
        self._waits = False  # for the time of the next look
        self._unmatched = False
        self._next_look_s = 0.0  # where there are many
        self._begun = False
        self._closed = False
        self._look_at_s = 0.0

    def set_sizes(self, sizes: Mapping[str, PoolSize]) -> None:
        self._sizes = sizes

    def run_these(self, specs: Sequence[WorkerSpec]) -> list[Action]:
        """Have workers of these specs, once a replica serves. What runs one goes on; what is left is stopped."""
        self._closed = False
        self._changed = True
        wanted = _Wanted(self._choose_specs(specs))
        actions: list[Action] = []
        for worker in sorted(self._workers.values(), key=lambda worker: not self._shares.list_targets(worker)):
            if worker.out_of_use or worker.leaves or not wanted.take(worker.life.spec):
                actions += worker.life.close()
                self._remove(worker)
        for spec in wanted.list_left():
            self._add(spec)
        if self._begun:
            actions += self._start()
        return actions + self._match()

    def target_ready(self, replica: str, number: int, ready: Ready) -> list[Action]:
        """A replica serves: start what is not started yet, and attach what is ready. `number`: its worker's."""
        actions = self._start()
        self._shares.set_target(replica, number, ready)
        for worker in self._list_assigned(replica):
            actions += self._shares.attach(worker, [replica])
        return actions + self._match_soon()

    def detach_target(self, replica: str) -> list[Action]:
        """A replica does not come back: what it had is free."""
        self._shares.drop_target(replica)
        return self._match_soon()

    def forget_links(self, replica: str) -> None:
        """A replica's worker is another one, or none: it is connected to nothing."""
        self._shares.forget_links(replica)

    def observe_link(self, replica: str, link: DraftLink, now_s: float) -> list[Action]:
        self._changed = True
        self._shares.note_link(replica, link)
        worker = self._find_assigned(link.name, replica)
        if worker is None:
            return [] if link.name in self._pools else [_log_endpoint(replica, link)]
        alone = len(self._shares.list_targets(worker)) == 1
        actions = worker.observe_link(replica, link, now_s, alone=alone)
        if link.state == "hung" and worker.suspected:
            actions += self._shares.attach(worker, [replica])
        return actions

    def observe_gauges(self, replica: str, gauges: Gauges, now_s: float) -> None:
        for drafter in gauges.drafters:
            worker = self._find_assigned(drafter.name, replica)
            if worker is not None and worker.serving:
                left_alone = drafter.rests or (drafter.reason if drafter.state == "refused" else "")
                asks = drafter.remote.asks if drafter.remote is not None else 0
                use = DraftUse(left_alone, asks, drafter.accepted, gauges.rounds)
                self._changed |= worker.note_use(replica, use, now_s)

    def find_life(self, worker: int) -> WorkerLife | None:
        draft_worker = self._workers.get(worker)
        return draft_worker.life if draft_worker is not None else None

    def observe_worker(self, event: WorkerEvent, now_s: float) -> list[Action]:
        """Something became of a worker; nothing happens where it is none of these."""
        worker = self._workers.get(event.worker)
        if worker is None:
            return []
        self._changed = True
        actions = self._fold(worker, event, now_s)
        self._note_loading(worker)
        return actions

    def _fold(self, worker: DraftWorker, event: WorkerEvent, now_s: float) -> list[Action]:
        match event:
            case WorkerStarted():
                return worker.observe_start(event.where, now_s)
            case WorkerSaid():
                actions = worker.observe_event(event.event, now_s)
                if isinstance(event.event, DraftReady):
                    actions += [*self._shares.attach(worker, self._shares.list_targets(worker)), *self._match_soon()]
                return actions
            case WorkerEnding():
                worker.life.observe_ending()
                return self._match_soon()
            case WorkerEnded():
                return [*worker.observe_end(event, now_s), *self._match_soon()]

    def advance(self, now_s: float) -> list[Action]:
        """Have one worker more or less of a draft where its load asks for it, and end those that have to go."""
        self._changed = self._waits = False
        if not self._begun or self._closed:
            return []
        left_s = self._next_look_s - now_s
        if self._are_many and left_s > _SOON_S:
            return self._schedule_look(left_s, now_s)
        self._next_look_s = now_s + _LOOK_EVERY_S
        actions = self._match() if self._unmatched else []
        looks = []
        for name, pool in self._pools.items():
            if pool.size is not None:
                changed, look_s = self._follow(name, pool, pool.size, now_s)
                actions += changed
                looks += [] if look_s is None else [look_s]
        for worker in list(self._workers.values()):
            actions += [*worker.end_if_silent(now_s), *worker.try_again(now_s), *self._let_rest(worker, now_s)]
            if worker.leave_s is not None and now_s >= worker.leave_s:
                self._remove(worker)
                actions += worker.life.close()
        looks += [at_s - now_s for worker in self._workers.values() if (at_s := worker.look_at_s) is not None]
        return actions + self._schedule_look(min(looks, default=None), now_s)

    def looks(self, now_s: float) -> bool:
        """Return whether there may be something to do: something has changed, or it is time."""
        return self._changed or (self._waits and now_s >= self._look_at_s)

    @property
    def loads(self) -> bool:
        return bool(self._loading)

    def list_loading(self) -> list[WorkerLife]:
        return [worker.life for worker in self._loading]

    def list_specs(self, replica: str) -> list[WorkerSpec]:
        return [worker.life.spec for worker in self._list_assigned(replica) if worker.serving]

    def views(self) -> tuple[DraftView, ...]:
        shares = self._shares
        return tuple(
            worker.view(shares.list_targets(worker), shares.list_connected(worker)) for worker in self._workers.values()
        )

    def close(self) -> list[Action]:
        self._closed = True
        return [action for worker in self._workers.values() for action in worker.life.close()]

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
        pool_workers = self._named.setdefault(spec.name, {})
        number = (
            len(pool_workers)
            if len(pool_workers) not in pool_workers
            else next(number for number in count() if number not in pool_workers)
        )
        pool = self._pools[spec.name]
        several = pool.size is not None or len(pool.specs) > 1
        label = f"{spec.name} number {number}" if several else spec.name
        life = self._lives.create(spec, f"draft worker {label}")
        worker = self._workers[life.number] = pool_workers[number] = DraftWorker(life, number, label)
        life.on_change = partial(self._note_loading, worker)
        self._fresh.append(worker)
        return worker

    def _remove(self, worker: DraftWorker) -> None:
        del self._workers[worker.life.number], self._named[worker.name][worker.number]
        worker.life.on_change = tell_nobody
        self._loading.pop(worker, None)

    def _note_loading(self, worker: DraftWorker) -> None:
        if worker.life.running and not worker.serving:
            self._loading[worker] = None
        else:
            self._loading.pop(worker, None)

    def _start(self) -> list[Action]:
        self._begun, fresh, self._fresh = True, self._fresh, []
        return [action for worker in fresh for action in worker.life.begin()]

    def _follow(self, name: str, pool: _Pool, size: PoolSize, now_s: float) -> tuple[list[Action], float | None]:
        """Return what follows from a pool's load, and when to look at it again."""
        workers = self._list_pool(name)
        rates = [worker.rate() for worker in workers]
        change = follow_pool(pool.trend, size, rates, self._shares.count_targets(name), now_s)
        pool.trend = change.trend
        actions: list[Action] = []
        if change.more > 0:
            spec = pool.specs[len(workers) % len(pool.specs)]
            text = "draft %s is short of time with %d workers: one more is started"
            actions += [LogLine("info", text, (name, len(workers))), *self._add(spec).life.begin(), *self._match()]
        elif change.more < 0:
            number = choose_leaver(rates, self._shares.find_assigned(name))
            leaver = next(worker for worker in workers if worker.number == number)
            leaver.leave_s = now_s + _LEAVE_S
            text = "draft worker %s, number %d, was not needed for %g s: it is ended"
            actions += [LogLine("info", text, (name, number, size.idle_s)), *self._match()]
        return actions, change.look_s

    def _let_rest(self, worker: DraftWorker, now_s: float) -> list[Action]:
        """Let a worker rest that helps no replica. Where none is left of its draft, that draft is useless."""
        if not worker.uses or not worker.serving or worker.leaves:
            return []
        why = worker.find_why_useless(self._shares.list_targets(worker), now_s)
        if not why:
            return []
        actions = [*self._shares.let_rest(worker, why), *worker.let_rest(why, now_s)]
        if all(other.resting or other.out_of_use for other in self._list_pool(worker.name)):
            actions.append(TellUseless(worker.life.spec, why))
        return actions

    def _list_pool(self, name: str) -> list[DraftWorker]:
        return [worker for worker in self._named.get(name, {}).values() if not worker.leaves]

    def _find_assigned(self, draft: str, replica: str) -> DraftWorker | None:
        number = self._shares.find_assigned(draft).get(replica)
        worker = self._named.get(draft, {}).get(number) if number is not None else None
        return worker if worker is not None and not worker.leaves else None

    def _list_assigned(self, replica: str) -> list[DraftWorker]:
        workers = [self._find_assigned(draft, replica) for draft in self._shares.drafts]
        return [worker for worker in workers if worker is not None]

    @property
    def _are_many(self) -> bool:
        return len(self._workers) + len(self._shares) > _FEW

    def _match_soon(self) -> list[Action]:
        """Match at once where there are few of them, else with the next look."""
        self._changed = self._unmatched = True
        return [] if self._are_many else self._match()

    def _match(self) -> list[Action]:
        self._unmatched = False
        usable = {name: [worker for worker in self._list_pool(name) if not worker.out_of_use] for name in self._pools}
        return self._shares.match(usable)

    def _schedule_look(self, look_s: float | None, now_s: float) -> list[Action]:
        self._waits = look_s is not None
        if look_s is None or now_s < self._look_at_s <= now_s + look_s:
            return []
        self._look_at_s = now_s + max(0.0, look_s)
        return [WakeAfter(max(0.0, look_s))]


def _log_endpoint(replica: str, link: DraftLink) -> LogLine:
    if link.state == "connected":
        return LogLine("info", "draft %s of %s is connected to its endpoint", (link.name, replica))
    return LogLine("warning", "draft %s of %s: its endpoint is %s: %s", (link.name, replica, link.state, link.reason))


class _Wanted:
    """The specs that are to run, for workers that run to be found among them. They cannot be hashed."""

    def __init__(self, specs: Iterable[WorkerSpec]) -> None:
        self._specs: dict[tuple[str, str, str], list[WorkerSpec]] = {}
        for spec in specs:
            self._specs.setdefault((spec.name, spec.node, spec.device), []).append(spec)

    def take(self, spec: WorkerSpec) -> bool:
        """Take one that is equal; return whether there is one."""
        alike = self._specs.get((spec.name, spec.node, spec.device), [])
        if spec not in alike:
            return False
        alike.remove(spec)
        return True

    def list_left(self) -> list[WorkerSpec]:
        return [spec for alike in self._specs.values() for spec in alike]
