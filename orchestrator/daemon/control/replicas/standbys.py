"""Standbys of the target: loaded, activated and given back as policies.serving.failover.standby says. No effects.

A standby is a replica of rank STANDBY until it is activated; then it serves like any other. When the target is back it
retires like one that a rollout replaces, and stands by again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from orchestrator.daemon.control import events
from orchestrator.daemon.control.actions import Action, LogLine, WakeAfter
from orchestrator.daemon.control.drafts.draft_workers import DraftWorkers
from orchestrator.daemon.control.health.health import HealthBoard, list_parts
from orchestrator.daemon.control.port import Totals
from orchestrator.daemon.control.replicas.replicas import Rank, Replica, Replicas, unlike_all
from orchestrator.daemon.control.replicas.worker_life import WorkerLife
from orchestrator.daemon.control.routing.router import Router
from orchestrator.daemon.control.state import FAILED
from orchestrator.protocol.events import Finished
from policies.serving.failover.health import Health
from policies.serving.failover.standby import (
    NO_RULES,
    FailoverRules,
    FailoverSteps,
    Readiness,
    StandbyState,
    TargetState,
    plan_failover,
)

FIRST_ENGINE: Final = 64
"""The number of the first standby; replicas have lower ones, up to MAX_REPLICAS."""
Bits = str
SAME, OTHER = "same", "other"


@dataclass(slots=True)
class _Standby:
    """`called`: an operator wants it to serve, whether the target does or not."""

    wanted: events.StandbySpec
    engine: int
    replica: Replica | None = None
    preparing: WorkerLife | None = None
    refused: str = ""
    lost: bool = False
    called: bool = False


class Standbys:
    """All standbys, in the order in which they are tried. `taken`: how often one took over, by its bits."""

    def __init__(self, replicas: Replicas, router: Router, drafts: DraftWorkers, health: HealthBoard) -> None:
        self.taken: Counter[Bits] = Counter()
        self.rules = NO_RULES
        self._replicas = replicas
        self._router = router
        self._drafts = drafts
        self._health = health
        self._all: list[_Standby] = []
        self._numbers = count(FIRST_ENGINE)
        self._served: bool | None = None
        self._changed_s = 0.0
        self._look_at_s = float("inf")

    def choose(self, wanted: Sequence[events.StandbySpec], rules: FailoverRules, now_s: float) -> list[Action]:
        """Have these standbys from now on. Those wanted already stay; those not wanted give back what they have."""
        self.rules = rules
        kept: list[_Standby] = []
        left = list(self._all)
        for spec in wanted:
            known = next((other for other in left if other.wanted == spec), None)
            if known is not None:
                left.remove(known)
            kept.append(known or _Standby(spec, next(self._numbers)))
        self._all = kept
        actions: list[Action] = []
        for gone in left:
            if gone.replica is not None and gone.replica.rank is not Rank.STANDBY:
                actions += self._retire(gone, now_s)
                gone.replica.standby = False  # it ends as a replica does that a rollout replaces
                gone.replica = None
            actions += self._dismiss(gone)
        return actions

    def find_preparing(self, worker: int) -> WorkerLife | None:
        lives = (standby.preparing for standby in self._all)
        return next((life for life in lives if life is not None and life.number == worker), None)

    def observe_preparing(self, life: WorkerLife, event: events.WorkerEvent, now_s: float) -> list[Action]:
        match event:
            case events.WorkerStarted():
                return life.observe_start(event.where, now_s)
            case events.WorkerSaid():
                actions = life.observe_event(event.event, now_s)
                return [*actions, *(life.close() if isinstance(event.event, Finished) else [])]
            case events.WorkerEnding():
                life.observe_ending()
                return []
            case events.WorkerEnded():
                loss = life.observe_end(event.cause, event.kind, now_s, hopeless=True)
                if not loss.failure:
                    return list(loss.actions)
                return [
                    LogLine("warning", "%s failed; it is prepared when it is needed: %s", (life.title, loss.failure))
                ]

    @property
    def any(self) -> bool:
        return bool(self._all)

    def list_idle(self) -> list[Replica]:
        return [
            standby.replica
            for standby in self._all
            if standby.replica is not None and standby.replica.rank is Rank.STANDBY
        ]

    def list_refused(self) -> dict[str, str]:
        """Return why standbys may not serve that are not even loaded any more, by their names."""
        return {
            standby.wanted.spec.name: standby.refused
            for standby in self._all
            if standby.refused and standby.replica is None
        }

    def list_names(self) -> list[str]:
        return [standby.wanted.spec.name for standby in self._all]

    def find_replica(self, name: str) -> Replica | None:
        """Return the replica of a standby that is loaded, or being loaded, whether it serves or not."""
        return next((standby.replica for standby in self._all if standby.wanted.spec.name == name), None)

    def find_refusal(self, name: str) -> str:
        standby = next((standby for standby in self._all if standby.wanted.spec.name == name), None)
        failed = standby is not None and standby.replica is not None and standby.replica.state.phase == FAILED
        return "" if standby is None else standby.refused or ("it has failed" if failed else "")

    def call(self, name: str, *, called: bool) -> None:
        """An operator wants a standby to serve, or not any more. It is loaded first, where it is not."""
        for standby in self._all:
            if standby.wanted.spec.name == name:
                standby.called = called

    @property
    def can_help(self) -> bool:
        return any(
            not standby.refused and (standby.replica is None or standby.replica.state.phase != FAILED)
            for standby in self._all
        )

    def observe_lost(self, replica: Replica) -> None:
        for standby in self._all:
            if standby.replica is replica:
                standby.lost = True

    def observe_ready(self, replica: Replica) -> list[Action]:
        """A standby's worker is ready. One whose bits differ, where that is not allowed, is ended."""
        standby = next((standby for standby in self._all if standby.replica is replica), None)
        ready = replica.state.ready
        if standby is None or ready is None:
            return []
        standby.lost = False
        replica.life.served = True
        why = unlike_all(ready, self._replicas.primary)
        known = any(other.state.ready is not None for other in self._replicas.primary)
        bits = f"other bits ({why})" if why else "the target's bits" if known else "bits not compared yet"
        line = LogLine("info", "standby %s ready: %s, %s", (replica.name, replica.state.where, bits))
        if why and self.rules.other_bits == "never":
            standby.refused = f"its tokens could differ, with {why}"
            text = "standby %s may not serve: %s, and failover.other_bits is never"
            return [line, LogLine("error", text, (replica.name, standby.refused)), *self._dismiss(standby)]
        return [line]

    def advance(self, now_s: float) -> list[Action]:
        if not self._all or self._replicas.closed:
            return []
        target = self._look_at_target(now_s)
        steps = plan_failover(target, [self._state(standby, now_s) for standby in self._all], self.rules)
        actions = [action for number in steps.begin for action in self._begin(self._all[number])]
        for number in steps.activate:
            actions += self._activate(self._all[number])
        for standby in [standby for standby in self._all if standby.called and not self._is_refused(standby, now_s)]:
            if standby.replica is None:
                actions += self._begin(standby)
            elif standby.replica.rank is Rank.STANDBY and standby.replica.serving:
                actions += self._activate(standby)
        for number in steps.retire:
            if not (self._all[number].called and target.serves):
                actions += self._retire(self._all[number], now_s)
        if target.serves:
            for standby in self._all:
                standby.lost = False
                actions += self._prepare(standby)
        return actions + self._finish_retiring() + self._schedule_look(steps, now_s)

    def close(self) -> list[Action]:
        """End what prepares; the replicas end as all others do."""
        return [
            action for standby in self._all if standby.preparing is not None for action in standby.preparing.close()
        ]

    def _look_at_target(self, now_s: float) -> TargetState:
        primary = self._replicas.primary
        judged = [(replica, self._health.judge(replica.parts, now_s, replica.name)) for replica in primary]
        tried = (Health.HALF_OPEN,) if self._served is False else ()
        serves = any(replica.serving and not health.refuses and health.state not in tried for replica, health in judged)
        if serves is not self._served:
            self._served, self._changed_s = serves, now_s
        return TargetState(
            serves=serves,
            hopeless=bool(primary)
            and all(replica.state.phase == FAILED or health.refuses for replica, health in judged),
            since_s=now_s - self._changed_s,
            began=any(replica.life.served or replica.state.totals.restarts for replica in primary),
        )

    def _state(self, standby: _Standby, now_s: float) -> StandbyState:
        replica = standby.replica
        return StandbyState(
            standby.wanted.readiness,
            loaded=replica is not None,
            ready=replica is not None and replica.serving,
            active=replica is not None and replica.rank is Rank.SERVING,
            refused=self._is_refused(standby, now_s),
            lost=standby.lost,
        )

    def _is_refused(self, standby: _Standby, now_s: float) -> bool:
        if standby.refused or (standby.replica is not None and standby.replica.state.phase == FAILED):
            return True
        return self._health.judge(list_parts(standby.wanted.spec), now_s).refuses

    def _begin(self, standby: _Standby) -> list[Action]:
        stopped = standby.preparing.close() if standby.preparing is not None else []
        standby.replica = self._replicas.create(standby.wanted.spec, standby.engine, Rank.STANDBY)
        line = LogLine("info", "standby %s is started (%s)", (standby.replica.name, standby.wanted.readiness.value))
        return [line, *stopped, *standby.replica.life.begin()]

    def _prepare(self, standby: _Standby) -> list[Action]:
        if standby.wanted.prepare is None or standby.preparing is not None or standby.replica is not None:
            return []
        standby.preparing = self._replicas.create_life(
            standby.wanted.prepare, f"the preparation of {standby.wanted.spec.name}"
        )
        return standby.preparing.begin()

    def _activate(self, standby: _Standby) -> list[Action]:
        replica = standby.replica
        assert replica is not None and replica.state.ready is not None  # noqa: S101, PT018 -- it is ready
        why = unlike_all(replica.state.ready, self._replicas.primary)
        self.taken[OTHER if why else SAME] += 1
        replica.rank = Rank.SERVING
        replica.state.totals = Totals()  # what it did while it retired is counted
        text = "standby %s takes the target's place: %s"
        bits = f"its tokens may differ, with {why}" if why else "to the bit"
        line = LogLine("warning", text, (replica.name, bits))
        drafts = self._drafts.target_ready(replica.name, replica.worker, replica.state.ready)
        return [line, *drafts]

    def _retire(self, standby: _Standby, now_s: float) -> list[Action]:
        replica = standby.replica
        assert replica is not None  # noqa: S101 -- it is active
        replica.rank = Rank.RETIRING
        self._replicas.transfer_totals(replica)
        replica.state.totals = Totals()
        moved, cancelled = self._router.retire(replica, now_s)
        line = LogLine("info", "standby %s gives back: %d streams move", (replica.name, moved))
        return [line, *cancelled, *self._drafts.detach_target(replica.name)]

    def _finish_retiring(self) -> list[Action]:
        actions: list[Action] = []
        for standby in self._all:
            replica = standby.replica
            if replica is None or replica.rank is not Rank.RETIRING or not self._router.is_drained(replica):
                continue
            if standby.wanted.readiness is Readiness.HOT and replica.state.phase != FAILED:
                replica.rank = Rank.STANDBY
            else:
                actions += self._dismiss(standby)
        return actions

    def _dismiss(self, standby: _Standby) -> list[Action]:
        replica, standby.replica = standby.replica, None
        stopped = standby.preparing.close() if standby.preparing is not None else []
        return stopped + (self._replicas.dismiss(replica) if replica is not None else [])

    def _schedule_look(self, steps: FailoverSteps, now_s: float) -> list[Action]:
        if steps.look_s is None or (now_s < self._look_at_s <= now_s + steps.look_s):
            return []
        self._look_at_s = now_s + steps.look_s
        return [WakeAfter(steps.look_s)]
