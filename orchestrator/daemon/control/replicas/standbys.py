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

from orchestrator.daemon.control.actions import Action, LogLine, WakeAfter
from orchestrator.daemon.control.drafts.draft_workers import DraftWorkers
from orchestrator.daemon.control.events import StandbySpec, WorkerEnded, WorkerEnding, WorkerSaid, WorkerStarted
from orchestrator.daemon.control.health.health import HealthBoard, list_parts
from orchestrator.daemon.control.port import Totals
from orchestrator.daemon.control.replicas.replicas import Rank, Replica, Replicas, unlike_any
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
"""The number of the first standby; replicas have lower ones."""
Bits = str
SAME, OTHER = "same", "other"


@dataclass(slots=True)
class _Standby:
    """`called`: an operator wants it to serve, whether the target does or not."""

    wanted: StandbySpec
    engine: int
    replica: Replica | None = None
    preparing: WorkerLife | None = None
    refused: str = ""
    lost: bool = False
    called: bool = False


class Standbys:
    """All standbys, in the order in which they are tried. `taken`: how often one took the target's place, by whether
    its bits are the target's."""

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

    def choose(self, wanted: Sequence[StandbySpec], rules: FailoverRules, now_s: float) -> list[Action]:
        """Have these standbys from now on. One that is wanted already stays as it is. One that is not wanted any more
        gives back what it has first."""
        self.rules = rules
        kept: list[_Standby] = []
        left = list(self._all)
        for one in wanted:
            known = next((other for other in left if other.wanted == one), None)
            if known is not None:
                left.remove(known)
            kept.append(known or _Standby(one, next(self._numbers)))
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
        """Return the worker of this number, where it prepares a standby's model."""
        lives = (one.preparing for one in self._all)
        return next((life for life in lives if life is not None and life.number == worker), None)

    def observe_preparing(
        self, life: WorkerLife, event: WorkerStarted | WorkerSaid | WorkerEnding | WorkerEnded, now_s: float
    ) -> list[Action]:
        """Something became of a worker that prepares."""
        match event:
            case WorkerStarted():
                return life.observe_start(event.where, now_s)
            case WorkerSaid():
                told = life.observe(event.event, now_s)
                return [*told, *(life.close() if isinstance(event.event, Finished) else [])]
            case WorkerEnding():
                life.observe_ending()
                return []
            case WorkerEnded():
                loss = life.observe_end(event.cause, event.kind, now_s, hopeless=True)
                if not loss.failure:
                    return list(loss.actions)
                return [
                    LogLine("warning", "%s failed; it is prepared when it is needed: %s", (life.title, loss.failure))
                ]

    @property
    def any(self) -> bool:
        """True where there are standbys."""
        return bool(self._all)

    def list_idle(self) -> list[Replica]:
        """Return the standbys that are loaded or being loaded, and do not serve."""
        return [one.replica for one in self._all if one.replica is not None and one.replica.rank is Rank.STANDBY]

    def list_refused(self) -> dict[str, str]:
        """Return why standbys may not serve that are not even loaded any more, by their names."""
        return {one.wanted.spec.name: one.refused for one in self._all if one.refused and one.replica is None}

    def list_names(self) -> list[str]:
        """Return the names of all, loaded or not."""
        return [one.wanted.spec.name for one in self._all]

    def find(self, name: str) -> Replica | None:
        """Return the replica of a standby that is loaded, or being loaded, whether it serves or not."""
        return next((one.replica for one in self._all if one.wanted.spec.name == name), None)

    def find_refusal(self, name: str) -> str:
        """Return why a standby may not serve; "" where it may."""
        found = next((one for one in self._all if one.wanted.spec.name == name), None)
        failed = found is not None and found.replica is not None and found.replica.state.phase == FAILED
        return "" if found is None else found.refused or ("it has failed" if failed else "")

    def call(self, name: str, *, called: bool) -> None:
        """An operator wants a standby to serve, or not any more. It is loaded first, where it is not."""
        for one in self._all:
            if one.wanted.spec.name == name:
                one.called = called

    @property
    def can_help(self) -> bool:
        """True where a standby may serve yet."""
        return any(not one.refused and (one.replica is None or one.replica.state.phase != FAILED) for one in self._all)

    def observe_lost(self, replica: Replica) -> None:
        """A standby's worker was lost: the next one is tried while it is started again."""
        for one in self._all:
            if one.replica is replica:
                one.lost = True

    def observe_ready(self, replica: Replica) -> list[Action]:
        """A standby's worker is ready. One whose bits differ, where that is not allowed, is ended."""
        one = next((one for one in self._all if one.replica is replica), None)
        ready = replica.state.ready
        if one is None or ready is None:
            return []
        one.lost = False
        replica.life.served = True
        why = unlike_any(ready, self._replicas.primary)
        bits = (
            f"other bits ({why})" if why else "the target's bits" if self._target_known() else "bits not compared yet"
        )
        line = LogLine("info", "standby %s ready: %s, %s", (replica.name, replica.state.where, bits))
        if why and self.rules.other_bits == "never":
            one.refused = f"its tokens could differ, with {why}"
            text = "standby %s may not serve: %s, and failover.other_bits is never"
            return [line, LogLine("error", text, (replica.name, one.refused)), *self._dismiss(one)]
        return [line]

    def advance(self, now_s: float) -> list[Action]:
        """Take the steps that are due."""
        if not self._all or self._replicas.closed:
            return []
        target = self._look_at_target(now_s)
        steps = plan_failover(target, [self._state(one, now_s) for one in self._all], self.rules)
        actions = [action for number in steps.begin for action in self._begin(self._all[number])]
        for number in steps.activate:
            actions += self._activate(self._all[number])
        for one in [one for one in self._all if one.called and not self._is_refused(one, now_s)]:
            if one.replica is None:
                actions += self._begin(one)
            elif one.replica.rank is Rank.STANDBY and one.replica.serving:
                actions += self._activate(one)
        for number in steps.retire:
            if not (self._all[number].called and target.serves):
                actions += self._retire(self._all[number], now_s)
        if target.serves:
            for one in self._all:
                one.lost = False
                actions += self._prepare(one)
        return actions + self._finish_retiring() + self._schedule_look(steps, now_s)

    def close(self) -> list[Action]:
        """End what prepares; the replicas end as all others do."""
        return [action for one in self._all if one.preparing is not None for action in one.preparing.close()]

    def _look_at_target(self, now_s: float) -> TargetState:
        primary = self._replicas.primary
        judged = ((one, self._health.judge(one.parts, now_s, one.name)) for one in primary)
        tried = (Health.HALF_OPEN,) if self._served is False else ()
        serves = any(one.serving and not health.refuses and health.state not in tried for one, health in judged)
        judged = ((one, self._health.judge(one.parts, now_s, one.name)) for one in primary)
        if serves is not self._served:
            self._served, self._changed_s = serves, now_s
        return TargetState(
            serves=serves,
            hopeless=bool(primary) and all(one.state.phase == FAILED or health.refuses for one, health in judged),
            since_s=now_s - self._changed_s,
            began=any(one.life.served or one.state.totals.restarts for one in primary),
        )

    def _target_known(self) -> bool:
        return any(one.state.ready is not None for one in self._replicas.primary)

    def _state(self, one: _Standby, now_s: float) -> StandbyState:
        replica = one.replica
        return StandbyState(
            one.wanted.readiness,
            loaded=replica is not None,
            ready=replica is not None and replica.serving,
            active=replica is not None and replica.rank is Rank.SERVING,
            refused=self._is_refused(one, now_s),
            lost=one.lost,
        )

    def _is_refused(self, one: _Standby, now_s: float) -> bool:
        if one.refused or (one.replica is not None and one.replica.state.phase == FAILED):
            return True
        return self._health.judge(list_parts(one.wanted.spec), now_s).refuses

    def _begin(self, one: _Standby) -> list[Action]:
        stopped = one.preparing.close() if one.preparing is not None else []
        one.replica = self._replicas.create(one.wanted.spec, one.engine, Rank.STANDBY)
        line = LogLine("info", "standby %s is started (%s)", (one.replica.name, one.wanted.readiness.value))
        return [line, *stopped, *one.replica.life.begin()]

    def _prepare(self, one: _Standby) -> list[Action]:
        """Prepare a warm standby's model, once, behind the target's first start."""
        if one.wanted.prepare is None or one.preparing is not None or one.replica is not None:
            return []
        one.preparing = self._replicas.create_life(one.wanted.prepare, f"the preparation of {one.wanted.spec.name}")
        return one.preparing.begin()

    def _activate(self, one: _Standby) -> list[Action]:
        replica = one.replica
        assert replica is not None and replica.state.ready is not None  # noqa: S101, PT018 -- it is ready
        why = unlike_any(replica.state.ready, self._replicas.primary)
        self.taken[OTHER if why else SAME] += 1
        replica.rank = Rank.SERVING
        replica.state.totals = Totals()  # what it did while it retired is counted
        text = "standby %s takes the target's place: %s"
        bits = f"its tokens may differ, with {why}" if why else "to the bit"
        line = LogLine("warning", text, (replica.name, bits))
        drafts = self._drafts.target_ready(replica.name, replica.worker, replica.state.ready)
        return [line, *drafts]

    def _retire(self, one: _Standby, now_s: float) -> list[Action]:
        replica = one.replica
        assert replica is not None  # noqa: S101 -- it is active
        replica.rank = Rank.RETIRING
        self._replicas.transfer_totals(replica)
        replica.state.totals = Totals()
        moved, cancelled = self._router.retire(replica, now_s)
        line = LogLine("info", "standby %s gives back: %d streams move", (replica.name, moved))
        return [line, *cancelled, *self._drafts.detach_target(replica.name)]

    def _finish_retiring(self) -> list[Action]:
        actions: list[Action] = []
        for one in self._all:
            replica = one.replica
            if replica is None or replica.rank is not Rank.RETIRING or not self._router.is_drained(replica):
                continue
            if one.wanted.readiness is Readiness.HOT and replica.state.phase != FAILED:
                replica.rank = Rank.STANDBY
            else:
                actions += self._dismiss(one)
        return actions

    def _dismiss(self, one: _Standby) -> list[Action]:
        replica, one.replica = one.replica, None
        told = one.preparing.close() if one.preparing is not None else []
        return told + (self._replicas.dismiss(replica) if replica is not None else [])

    def _schedule_look(self, steps: FailoverSteps, now_s: float) -> list[Action]:
        if steps.look_s is None or (now_s < self._look_at_s <= now_s + steps.look_s):
            return []
        self._look_at_s = now_s + steps.look_s
        return [WakeAfter(steps.look_s)]
