"""The replicas there are, and what is known of each. No effects.

A replica is one place among them, filled by one target worker after the other. It knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, count

from orchestrator.control.actions import Action, LogLine
from orchestrator.control.affinity import SeenPrefixes
from orchestrator.control.health import Part, list_parts
from orchestrator.control.port import Totals
from orchestrator.control.state import FAILED, TargetState, add_totals, effective_places, fold_round, kind_of, unlike
from orchestrator.control.worker_life import Stage, WorkerLife, WorkerLives
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.messages import Event, Ready, RoundReport
from policies.serving.replica_load import PairPaces, SeenRound

ALIKE = "set the precision in cluster.yaml (model.activations), and use one set of library versions"
"""The way out where replicas differ."""
_ENOUGH_PROGRESSED = 2  # one of them is not the one that is blamed


class Rank(Enum):
    """Of a replica. A standby waits until no replica serves. One that is joining is made ready and gets no streams. One
    that serves gets them. One that is retiring is left with the streams that only it can go on with to the bit. One
    that leaves is being stopped."""

    STANDBY = "standby"
    JOINING = "joining"
    SERVING = "serving"
    RETIRING = "retiring"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Replica:
    """`engine` is its place among the replicas, from 0. `name` is unique, also among replicas whose spec has the same.
    `standby`: it takes the target's place only. `busy_s`: when it got the first of its streams. `parts`: the device
    and the host that it runs on. Of its worker: `runs` counts the streams that it was sent, `progressed` names the
    first of them that had a token, `death` is the number of its death (None while it lives). `untold`: rounds of which
    it is not known yet how much of the device they had; `last_route`: why the last request went there."""

    life: WorkerLife
    name: str
    engine: int
    state: TargetState
    rank: Rank
    standby: bool = False
    busy_s: float = 0.0
    runs: int = 0
    progressed: set[str] = field(default_factory=set)
    death: int | None = None
    prefixes: SeenPrefixes = field(default_factory=lambda: SeenPrefixes(0))
    paces: PairPaces = field(default_factory=PairPaces)
    untold: list[SeenRound] = field(default_factory=list)
    last_route: str = ""
    parts: tuple[Part, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = list_parts(self.spec)

    @property
    def worker(self) -> int:
        """The number of its worker in events and actions."""
        return self.life.number

    @property
    def spec(self) -> WorkerSpec:
        """What its workers are started from."""
        return self.life.spec

    @property
    def serving(self) -> bool:
        """True while its worker decodes."""
        return self.life.running and self.state.serving

    def observe_progress(self, stream: str) -> None:
        """Its worker made tokens for a stream."""
        if len(self.progressed) < _ENOUGH_PROGRESSED:
            self.progressed.add(stream)

    def observe_start(self, where: str, now_s: float) -> None:
        """Another worker is there."""
        self.runs, self.progressed, self.death = 0, set(), None
        self.state.where, self.state.due_s = where, now_s

    @property
    def kind(self) -> tuple[str, ...]:
        """What decides its tokens (control.state.kind_of)."""
        return kind_of(self.state.ready)

    @property
    def draft(self) -> str:
        """What proposes tokens there now ("": nothing does): the drafters that work, in the order of the chain."""
        ready, gauges = self.state.ready, self.state.gauges
        if ready is None or gauges is None:
            return ""
        return "+".join(one.name for one in gauges.drafters if one.state == "ok" and one.name in ready.drafters)

    def learn(self, stretch: float) -> None:
        """Learn from the rounds that it ran, which took `stretch` times as long as on a device of its own."""
        for seen in self.untold:
            self.paces = self.paces.observe(seen, stretch)
        self.untold.clear()

    @property
    def places(self) -> int:
        """How many streams it decodes at a time."""
        ready = self.state.ready
        return effective_places(ready, self.state.gauges) if ready is not None else 1

    def observe(self, event: Event) -> None:
        """Its worker said something: learn from it for routing."""
        match event:
            case RoundReport():
                tokens = event.round_tokens or sum(len(delta.tokens) for delta in event.deltas)
                # Rounds that are under way together are as one of all their sequences.
                together = event.in_flight
                counts = (
                    together * event.sequences,
                    together * tokens,
                    together * event.rows,
                    together * event.drafted,
                )
                self.untold.append(SeenRound(*counts, event.round_ms, event.draft_ms, self.draft))
            case Ready():
                self.prefixes = SeenPrefixes(event.kv_blocks * event.block_tokens)
            case _:
                pass


class Replicas:
    """All replicas. `gone`: the totals of those that have left no successor."""

    def __init__(self, lives: WorkerLives) -> None:
        self.gone = Totals()
        self.closed = False
        self._lives = lives
        self._by_worker: dict[int, Replica] = {}

    def list_ranked(self, *ranks: Rank) -> list[Replica]:
        """Return the replicas of these ranks, one rank after the other, each in the order of their places."""
        key = ranks.index
        found = [replica for replica in self._by_worker.values() if replica.rank in ranks]
        return sorted(found, key=lambda replica: (key(replica.rank), replica.engine))

    @property
    def serving(self) -> list[Replica]:
        """Those that get requests."""
        return self.list_ranked(Rank.SERVING)

    @property
    def primary(self) -> list[Replica]:
        """Those that get requests, standbys left out."""
        return [replica for replica in self.serving if not replica.standby]

    @property
    def with_streams(self) -> list[Replica]:
        """Those that may have streams."""
        return self.list_ranked(Rank.SERVING, Rank.RETIRING)

    def find(self, worker: int) -> Replica | None:
        """Return the replica whose worker has this number."""
        return self._by_worker.get(worker)

    def create(self, spec: WorkerSpec, engine: int, rank: Rank) -> Replica:
        """Have one replica more, which is to be started."""
        taken = {replica.name for replica in self._by_worker.values()}
        name = next(name for name in chain([spec.name], map(f"{spec.name}.{{}}".format, count(2))) if name not in taken)
        life, standby = self._lives.create(spec, f"worker {name}"), rank is Rank.STANDBY
        replica = Replica(life, name, engine, TargetState(name), rank, standby)
        self._by_worker[replica.worker] = replica
        return replica

    def create_life(self, spec: WorkerSpec, title: str) -> WorkerLife:
        """Return a place for a worker that is no replica."""
        return self._lives.create(spec, title)

    def dismiss(self, replica: Replica) -> list[Action]:
        """End a replica's worker; it is forgotten once that has ended."""
        replica.rank = Rank.LEAVING
        actions = replica.life.close()
        self.forget_ended(replica)
        return actions

    def forget_ended(self, replica: Replica) -> None:
        """Forget a replica that leaves where nothing is left of its worker."""
        if replica.rank is Rank.LEAVING and replica.life.stage is Stage.IDLE:
            self._by_worker.pop(replica.worker, None)

    def are_gone(self, replicas: Collection[Replica]) -> bool:
        """True when all of these are forgotten."""
        return not any(replica.worker in self._by_worker for replica in replicas)

    def close(self) -> list[Action]:
        """End all of them. Idempotent."""
        self.closed = True
        for replica in self._by_worker.values():
            if replica.life.stage is Stage.IDLE and replica.state.phase != FAILED:
                replica.state.mark_worker_lost("the worker was stopped")
        return [action for replica in self._by_worker.values() for action in replica.life.close()]

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
                successor.state.observe(done, delivered)
            else:
                self.gone = fold_round(self.gone, done, delivered)

    def _successor(self, old: Replica) -> Replica | None:
        return next((one for one in self.serving if one.engine == old.engine), None)


def unlike_any(ready: Ready, others: Sequence[Replica]) -> str:
    """Return in what a worker differs from the first of others that is known, so that its tokens may too; "" in
    nothing."""
    known = next((one.state.ready for one in others if one.state.ready is not None), None)
    return unlike(ready, known) if known is not None else ""


def compare(replica: Replica, ready: Ready, others: Sequence[Replica]) -> tuple[str, list[Action]]:
    """Return in what a replica differs from the first of others that is known ("": in nothing), and what to log."""
    for other in others:
        known = other.state.ready
        if other is replica or known is None or other.state.phase == FAILED:
            continue
        told: list[Action] = []
        if ready.device_name != known.device_name and not ready.class_fingerprint:
            text = "%s runs on %s and %s on %s: tokens are the same to the bit on processors of one kind only"
            told = [LogLine("warning", text, (replica.name, ready.device_name, other.name, known.device_name))]
        return unlike(ready, known), told
    return "", []
