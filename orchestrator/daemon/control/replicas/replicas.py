"""The replicas there are, what is known of each, and what was last reckoned of it for routing. No effects.

A replica is one place among them, filled by one target worker after the other. It knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain, count
from typing import Final

from device_profiles.device_load import name_device_counters
from orchestrator.daemon.control.actions import Action
from orchestrator.daemon.control.health.health import list_parts
from orchestrator.daemon.control.port import Totals
from orchestrator.daemon.control.replicas.worker_life import Stage, WorkerLife, WorkerLives
from orchestrator.daemon.control.routing.affinity import SeenPrefixes
from orchestrator.daemon.control.routing.loads import name_device
from orchestrator.daemon.control.state import (
    FAILED,
    TargetState,
    add_totals,
    compare_models,
    effective_places,
    find_group,
    fold_round,
    tell_nobody,
    unlike,
)
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Gauges, RoundReport, ServerLoad
from policies.serving.failover.health import Health
from policies.serving.overrides import OperatorBounds
from policies.serving.replica_load import USUAL_RISE, PairPaces, ReplicaPace, SeenRound, expect_pace
from policies.serving.routing import Route

_UNKNOWN: Final = ReplicaPace()
ONE_GROUP = "model.alike is true: leave it out, or set one precision and use one set of library versions"
"""The way out where replicas are to be alike and differ."""
ONE_MODEL = "give each host the same model files"
# Rounds that wait for the next sample (ADR 0057). Bounds memory.
_MOST_UNTOLD = 4096
# One of them is not the one that is blamed. ADR 0046.
_ENOUGH_PROGRESSED = 2


@dataclass(slots=True, eq=False)
class Standing:
    """What was last reckoned of one replica for routing; control.replicas.fleet keeps it true.

    `in_service`: it is to get requests, and has `failed` or not, is `ready` or not, and has `usable` places, as soon as
    its worker is there. `retires`: it only keeps streams. `serves`: it gets requests and its worker decodes. `decodes`:
    its worker does, whether it gets any or not. It has `live` streams and so many `places`, beside what its `server`
    does for others. Its KV cache holds `kv_tokens`, of which `kv_free_tokens` are free. `draft`: what proposes tokens
    there. `own_ms`: what a token took it by its pace `own_pace` with `own_sequences` at a time. `bounds` of speculation
    are those for `bounds_for`. `expected_pace`: by its own profile; replicas with the same `alike` are on devices that
    are alike. `listed`: control.replicas.fleet has it by its parts; `routed`: it may have streams. `health` and `steps`
    of its pace are those that control.routing.candidates has it by."""

    in_service: bool = False
    failed: bool = False
    retires: bool = False
    ready: bool = False
    usable: int = 0
    serves: bool = False
    decodes: bool = False
    live: int = 0
    places: int = 1
    server: ServerLoad | None = None
    kv_tokens: int = 0
    kv_free_tokens: int = 0
    draft: str = ""
    own_pace: ReplicaPace | None = None
    own_sequences: int = 0
    own_ms: float = 0.0
    bounds: OperatorBounds | None = None
    bounds_for: tuple[object, ...] = ()
    expected_pace: ReplicaPace = _UNKNOWN
    alike: tuple[str, ...] = ()
    listed: bool = False
    routed: bool = False
    health: Health = Health.HEALTHY
    steps: tuple[int, ...] = ()

    def find_own_ms(self, pace: ReplicaPace, sequences: int) -> float:
        """Return what a token takes the replica itself at this pace; 0 where nothing was measured."""
        if pace is not self.own_pace or sequences != self.own_sequences:
            self.own_pace, self.own_sequences = pace, sequences
            self.own_ms = pace.tpot_ms(sequences)
        return self.own_ms


class Rank(Enum):
    """Of a replica. A standby waits until no replica serves. One that is joining is made ready and gets no streams. One
    that serves gets them. One that is retiring is left with the streams that only it can go on with to the bit. One
    that leaves is being stopped."""

    STANDBY = "standby"
    JOINING = "joining"
    SERVING = "serving"
    RETIRING = "retiring"
    LEAVING = "leaving"


class Replica:
    """`engine` is its place among the replicas, from 0. `name` is unique, also among replicas whose spec has the same.
    `standby`: it takes the target's place only. `busy_s`: when it got the first of its streams. `parts`: the device
    and the host that it runs on, `device` as samples name it. Of its worker: `runs` counts the streams that
    it was sent, `progressed` names the first of them that had a token, `death` is the number of its death (None while
    it lives). `untold`: rounds of which it is not known yet how much of the device they had; `taken_by`: the route by
    which the last request went there.
    `on_change`, `on_pace` and `on_rank` are called with each change that routing has to know of."""

    def __init__(
        self, life: WorkerLife, name: str, engine: int, state: TargetState, rank: Rank, standby: bool = False
    ) -> None:
        self.life = life
        self.name = name
        self.engine = engine
        self.state = state
        self.standby = standby
        self.busy_s = 0.0
        self.runs = 0
        self.progressed: set[str] = set()
        self.death: int | None = None
        self.prefixes = SeenPrefixes(0)
        self.untold: list[SeenRound] = []
        self.taken_by: Route | None = None
        self.parts = list_parts(self.spec)
        self.device = name_device(self.spec)
        self.devices = tuple(name_device_counters(part.name) for part in self.parts if part.kind == "device")
        self.standing = Standing()
        self.on_change: Callable[[], object] = tell_nobody
        self.on_pace: Callable[[], object] = tell_nobody
        self.on_rank: Callable[[], object] = tell_nobody
        self._rank = rank
        self._paces = PairPaces()
        self._group = ""
        self._ready_read: Ready | None = None
        self._alike: tuple[str, ...] = ()
        self._expected_pace = ReplicaPace()
        self._drafted_by: tuple[Ready | None, Gauges | None] = (None, None)
        self._draft = ""

    @property
    def rank(self) -> Rank:
        return self._rank

    @rank.setter
    def rank(self, rank: Rank) -> None:
        self._rank = rank
        self.on_rank()

    @property
    def paces(self) -> PairPaces:
        return self._paces

    @paces.setter
    def paces(self, paces: PairPaces) -> None:
        self._paces = paces
        self.on_pace()

    @property
    def worker(self) -> int:
        return self.life.number

    @property
    def spec(self) -> WorkerSpec:
        return self.life.spec

    @property
    def serving(self) -> bool:
        return self.life.running and self.state.serving

    def observe_progress(self, stream: str) -> None:
        if len(self.progressed) < _ENOUGH_PROGRESSED:
            self.progressed.add(stream)

    def observe_start(self, where: str, now_s: float) -> None:
        self.runs, self.progressed, self.death = 0, set(), None
        self.state.mark_started(where, now_s)

    def begin(self, now_s: float) -> list[Action]:
        self.state.due_s = self.state.due_s or now_s
        return self.life.begin()

    @property
    def group(self) -> str:
        self._read_ready()
        return self._group

    @property
    def alike(self) -> tuple[str, ...]:
        """What its pace is shared with: replicas on the same devices, in the same formats. () where it is not known."""
        self._read_ready()
        return self._alike

    @property
    def expected_pace(self) -> ReplicaPace:
        self._read_ready()
        return self._expected_pace

    def _read_ready(self) -> None:
        ready = self.state.ready
        if ready is self._ready_read or ready is None:
            return
        self._ready_read = ready
        self._group = find_group(ready)
        device, expected = ready.device, ready.expected_rounds
        formats = (device.adapter, device.full_name, ready.precision.weights)
        self._alike = (*formats, str(len(device.cores)), *ready.shards.layers)
        self._expected_pace = ReplicaPace()
        if expected is not None:
            self._expected_pace = expect_pace(
                places=ready.slots,
                alone_ms=expected.alone_ms,
                full_ms=expected.full_ms,
                prefill_ms=expected.prefill_row_ms,
            )

    @property
    def draft(self) -> str:
        """What proposes tokens there now ("": nothing does): the drafters that work, in the order of the chain."""
        ready, gauges = self.state.ready, self.state.gauges
        if ready is not self._drafted_by[0] or gauges is not self._drafted_by[1]:
            self._drafted_by = (ready, gauges)
            self._draft = ""
            if ready is not None and gauges is not None:
                working = [drafter.name for drafter in gauges.drafters if drafter.state == "ok"]
                self._draft = "+".join(name for name in working if name in ready.drafting.drafters)
        return self._draft

    def see_round(self, done: RoundReport, *, sampled: bool, beside: bool = False) -> None:
        """Its worker finished a round: learn from it at once, or with the next sample where the device is `sampled`.
        That says how much of the device the round had. Rounds that are under way together are as one of all their
        sequences. `beside`: other replicas have requests."""
        tokens = done.round_tokens
        if not tokens:
            for delta in done.deltas:
                tokens += len(delta.tokens)
        together, others = done.in_flight, self.others_running
        if others and done.sequences:  # its server runs theirs with ours, and makes as many tokens for each
            tokens *= (done.sequences + others) / done.sequences
        seen = SeenRound(
            together * done.sequences + others,
            together * tokens,
            together * done.rows + 2 * others,
            together * done.drafted,
            done.round_ms,
            done.draft_ms,
            self.draft,
            beside,
        )
        if self.untold or sampled:
            self.untold.append(seen)
            if not sampled or len(self.untold) >= _MOST_UNTOLD:
                self.learn(1.0)
        else:
            self.paces = self._paces.observe(seen, rise=self._rise)

    @property
    def _rise(self) -> float:
        """What each sequence more adds to a lone one's time, as its profile has it."""
        expected = self.expected_pace
        return expected.rise / expected.weight if expected.weight else USUAL_RISE

    @property
    def others_running(self) -> int:
        gauges = self.state.gauges
        return gauges.server.others_running if gauges is not None and gauges.server is not None else 0

    def learn(self, stretch: float) -> None:
        """Learn from the rounds that it ran, which took `stretch` times as long as on a device of its own."""
        if not self.untold:
            return
        paces = self._paces
        for seen in self.untold:
            paces = paces.observe(seen, stretch, self._rise)
        self.untold.clear()
        self.paces = paces

    @property
    def places(self) -> int:
        ready = self.state.ready
        return effective_places(ready, self.state.gauges) if ready is not None else 1

    def forget_prompts(self, ready: Ready) -> None:
        self.prefixes.tell(None, "", 0)
        self.prefixes = SeenPrefixes(ready.kv.tokens)


class Replicas:
    """All replicas. `gone`: the totals of those that have left no successor. `alike`: all are to be of one group.
    `changed`: those of which something has
    changed that routing has to know of, `paced`: those of which the pace alone has (control.replicas.fleet)."""

    def __init__(self, lives: WorkerLives) -> None:
        self.gone = Totals()
        self.closed = False
        self.alike = False
        self.changed: dict[Replica, None] = {}
        self.paced: dict[Replica, None] = {}
        self._lives = lives
        self._by_worker: dict[int, Replica] = {}
        self._by_name: dict[str, Replica] = {}
        self._ranked: dict[tuple[Rank, ...], list[Replica]] = {}
        self._primary: list[Replica] | None = None
        self._engines: dict[int, Replica] | None = None

    def list_ranked(self, *ranks: Rank) -> list[Replica]:
        """Return the replicas of these ranks, one rank after the other, each in the order of their places. The list
        stays the same until a rank changes; nobody changes it."""
        known = self._ranked.get(ranks)
        if known is None:
            key = ranks.index
            ranked = [replica for replica in self._by_worker.values() if replica.rank in ranks]
            known = self._ranked[ranks] = sorted(ranked, key=lambda replica: (key(replica.rank), replica.engine))
        return known

    @property
    def serving(self) -> list[Replica]:
        return self.list_ranked(Rank.SERVING)

    @property
    def primary(self) -> list[Replica]:
        if self._primary is None:
            self._primary = [replica for replica in self.serving if not replica.standby]
        return self._primary

    @property
    def with_streams(self) -> list[Replica]:
        return self.list_ranked(Rank.SERVING, Rank.RETIRING)

    def list_all(self) -> list[Replica]:
        """Return all replicas, of whatever rank, in the order in which they came."""
        return list(self._by_worker.values())

    def find_by_worker(self, worker: int) -> Replica | None:
        return self._by_worker.get(worker)

    def find_named(self, name: str) -> Replica | None:
        return self._by_name.get(name)

    def has(self, replica: Replica) -> bool:
        return self._by_worker.get(replica.worker) is replica

    def create(self, spec: WorkerSpec, engine: int, rank: Rank) -> Replica:
        names = chain([spec.name], map(f"{spec.name}.{{}}".format, count(2)))
        name = next(name for name in names if name not in self._by_name)
        life, standby = self._lives.create(spec, f"worker {name}"), rank is Rank.STANDBY
        replica = Replica(life, name, engine, TargetState(name), rank, standby)
        self._by_worker[replica.worker] = self._by_name[name] = replica
        replica.on_change = replica.state.on_change = life.on_change = partial(self.changed.__setitem__, replica, None)
        replica.on_pace = partial(self.paced.__setitem__, replica, None)
        replica.on_rank = partial(self._rerank, replica)
        replica.on_rank()
        return replica

    def create_life(self, spec: WorkerSpec, title: str) -> WorkerLife:
        return self._lives.create(spec, title)

    def dismiss(self, replica: Replica) -> list[Action]:
        """End a replica's worker; it is forgotten once that has ended."""
        replica.rank = Rank.LEAVING
        actions = replica.life.close()
        self.forget_ended(replica)
        return actions

    def forget_ended(self, replica: Replica) -> None:
        if replica.rank is Rank.LEAVING and replica.life.stage is Stage.IDLE and self.has(replica):
            del self._by_worker[replica.worker], self._by_name[replica.name]
            self._rerank(replica)

    def _rerank(self, replica: Replica) -> None:
        self.changed[replica] = None
        self._ranked.clear()
        self._primary = self._engines = None

    def are_gone(self, replicas: Collection[Replica]) -> bool:
        return not any(replica.worker in self._by_worker for replica in replicas)

    def close(self) -> list[Action]:
        self.closed = True
        for replica in self._by_worker.values():
            if replica.life.stage is Stage.IDLE and replica.state.phase != FAILED:
                replica.state.mark_worker_lost("the worker was stopped")
        return [action for replica in self._by_worker.values() for action in replica.life.close()]

    def refuse(self, replica: Replica, ready: Ready, others: Sequence[Replica]) -> str:
        """Return why a worker may not serve beside others: it has another model than the first of them that is known,
        or other bits where all are to be alike. "" where it may."""
        for other in others:
            known = other.state.ready
            if other is replica or known is None or other.state.phase == FAILED:
                continue
            if why := compare_models(ready, known):
                return f"{why}; {ONE_MODEL}"
            why = unlike(ready, known) if self.alike else ""
            return f"{why}, so its tokens would differ from the other replicas'; {ONE_GROUP}" if why else ""
        return ""

    def transfer_totals(self, old: Replica) -> Replica | None:
        """Count what one that leaves did for its successor, and return that; None where there is none."""
        successor = self._successor(old)
        if successor is not None:
            successor.state.totals = add_totals([old.state.totals, successor.state.totals])
        else:
            self.gone = add_totals([self.gone, old.state.totals])
        return successor

    def count_for_successor(self, replica: Replica, done: RoundReport, delivered: int) -> None:
        """Count a round of one that is retiring for its successor. `delivered`: see state.fold_round."""
        if replica.rank is Rank.RETIRING:
            successor = self._successor(replica)
            if successor is not None:
                successor.state.observe_event(done, delivered)
            else:
                self.gone = fold_round(self.gone, done, delivered)

    def _successor(self, old: Replica) -> Replica | None:
        if self._engines is None:
            self._engines = {replica.engine: replica for replica in reversed(self.serving)}
        return self._engines.get(old.engine)


def has_lost_model(replica: Replica) -> bool:
    """Return whether a replica has failed as its model was replaced: a reload takes what is there now."""
    return replica.state.phase == FAILED and replica.life.failure_kind == "model_replaced"


def unlike_all(ready: Ready, others: Sequence[Replica]) -> str:
    """Return in what a worker differs from all known others, so that its tokens may too; "" where from none."""
    known = [replica for replica in others if replica.state.ready is not None]
    group = find_group(ready)
    if not known or any(replica.group == group for replica in known):
        return ""
    return unlike(ready, known[0].state.ready) if known[0].state.ready is not None else ""
