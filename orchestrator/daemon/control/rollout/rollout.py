"""Other replicas in place of those that serve, while streams go on. No effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.daemon.control.actions import Action, FinishRollout, LogLine
from orchestrator.daemon.control.drafts.draft_workers import DraftWorkers
from orchestrator.daemon.control.replicas.replicas import Rank, Replica, Replicas
from orchestrator.daemon.control.rollout.replica_diff import arrange_replicas
from orchestrator.daemon.control.routing.router import Router
from orchestrator.daemon.control.state import FAILED, add_totals
from orchestrator.protocol.contract import WorkerSpec


@dataclass(slots=True)
class _Change:
    """One change. `engines`: the place of each spec that is wanted. `error` is why it does not come to pass."""

    engines: tuple[int, ...]
    drafts: Sequence[WorkerSpec]
    coming: list[Replica]
    leaving: list[Replica]
    compared: list[Replica] = field(default_factory=list)
    switched: bool = False
    error: str = ""


class Rollout:
    """Changes `replicas` and the draft workers beside them, one change after the other."""

    def __init__(self, replicas: Replicas, router: Router, drafts: DraftWorkers) -> None:
        self._replicas = replicas
        self._router = router
        self._drafts = drafts
        self._change: _Change | None = None

    @property
    def under_way(self) -> bool:
        return self._change is not None or bool(self._replicas.list_ranked(Rank.RETIRING))

    def list_coming(self) -> list[str]:
        """Return the names of the replicas that are started, and are to take the place of those that serve."""
        change = self._change
        return [] if change is None or change.switched or change.error else [replica.name for replica in change.coming]

    def ask(self, specs: Sequence[WorkerSpec], drafts: Sequence[WorkerSpec]) -> list[Action]:
        """Begin a change: start what is missing, beside what serves. See controller.TargetControl.change."""
        serving = self._replicas.primary
        made = arrange_replicas(serving, specs)
        coming = [self._replicas.create(spec, engine, Rank.JOINING) for engine, spec in made.coming]
        leaving = [replica for replica in serving if replica.engine not in made.kept]
        self._change = _Change(made.engines, drafts, coming, leaving)
        return [action for replica in coming for action in replica.life.begin()]

    def exchange_idle(self, specs: Sequence[WorkerSpec]) -> tuple[list[Action], tuple[int, ...]]:
        """Have other replicas in place of those without a worker; none is started. Returns their numbers, too."""
        actions: list[Action] = []
        made = arrange_replicas(self._replicas.primary, specs)
        for old in [replica for replica in self._replicas.primary if replica.engine not in made.kept]:
            actions += self._replicas.dismiss(old)
            self._replicas.gone = add_totals([self._replicas.gone, old.state.totals])
        for engine, spec in made.coming:
            self._replicas.create(spec, engine, Rank.SERVING)
        return actions, made.engines

    def drop(self) -> list[Action]:
        """Nobody waits for the change: what was not switched to is ended, and what retires goes on retiring."""
        change, self._change = self._change, None
        if change is None or change.switched or change.error:
            return []
        return [action for replica in change.coming for action in self._replicas.dismiss(replica)]

    def advance(self, now_s: float) -> list[Action]:
        change = self._change
        actions: list[Action] = []
        if change is not None and not (change.switched or change.error):
            self._compare_ready(change)
            change.error = change.error or self._find_obstacle(change)
            if change.error:
                actions += [action for replica in change.coming for action in self._replicas.dismiss(replica)]
            elif all(replica.serving for replica in change.coming) or self._begins_with(change):
                actions += self._switch(change, now_s)
        for old in self._replicas.list_ranked(Rank.RETIRING):
            if old.standby and not self._replicas.closed:
                continue  # it stands by again
            if self._replicas.closed or old.state.phase == FAILED or self._router.is_drained(old):
                actions += self._replicas.dismiss(old)
        return actions + self._finish()

    def _compare_ready(self, change: _Change) -> None:
        """Compare each new replica once, as soon as it is ready, with those that stay and its fellows."""
        stay = [replica for replica in self._replicas.primary if replica not in change.leaving]
        for new in change.coming:
            if new.state.ready is not None and new not in change.compared:
                change.compared.append(new)
                if why := self._replicas.refuse(new, new.state.ready, (*stay, *change.coming)):
                    change.error = f"worker {new.name} cannot serve beside the others, with {why}"

    def _find_obstacle(self, change: _Change) -> str:
        for replica in change.coming:
            if replica.state.phase == FAILED or self._replicas.closed:
                return f"worker {replica.name} cannot serve: {replica.state.detail}"
        return ""

    def _begins_with(self, change: _Change) -> bool:
        """Return whether a new replica is the first of all that is ready: it waits for no fellow then, nor for those
        that it was started beside, as at any other start."""
        ready = any(replica.serving for replica in change.coming)
        return ready and not any(replica.life.served for replica in self._replicas.with_streams)

    def _switch(self, change: _Change, now_s: float) -> list[Action]:
        """Let the new replicas serve and take the streams from those that leave, in one step."""
        change.switched = True
        actions: list[Action] = []
        for replica in change.coming:
            replica.rank, replica.life.served = Rank.SERVING, replica.serving
        for old in change.leaving:
            old.rank = Rank.RETIRING
        for old in change.leaving:
            successor = self._replicas.transfer_totals(old)
            moved, cancelled = self._router.retire(old, now_s)
            actions += cancelled
            if successor is not None:
                text = "worker %s takes the place of %s: %d streams move"
                actions.append(LogLine("info", text, (successor.name, old.name, moved)))
            else:
                text = "worker %s is not needed any more: %d streams move"
                actions.append(LogLine("info", text, (old.name, moved)))
        for old in change.leaving:
            actions += self._drafts.detach_target(old.name)
        for replica in change.coming:
            if replica.state.ready is not None:
                actions += self._drafts.target_ready(replica.name, replica.worker, replica.state.ready)
        return actions + self._drafts.run_these(change.drafts)

    def _finish(self) -> list[Action]:
        change = self._change
        if change is None or not (change.switched or change.error):
            return []
        if not self._replicas.are_gone(change.leaving if change.switched else change.coming):
            return []
        self._change = None
        return [FinishRollout(change.engines, change.error)]
