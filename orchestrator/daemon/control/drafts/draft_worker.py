"""One draft worker after the other, from one spec, and how its replicas get on with it. No effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from orchestrator.daemon.control.actions import Action, LogLine
from orchestrator.daemon.control.events import WorkerEnded
from orchestrator.daemon.control.port import DraftView
from orchestrator.daemon.control.replicas.worker_life import WorkerLife
from orchestrator.daemon.control.state import FAILED, READY, RESTARTING, RESTING, STARTING
from orchestrator.protocol.draft_messages import DraftLink, DraftLoad, DraftReady
from orchestrator.protocol.events import Event, Failed, Progress
from policies.serving.draft_pool import PoolWorker
from policies.serving.draft_rest import REST_S, DraftUse, RestTrend, follow_use

SUSPECTED_S: Final = 3.0
"""How long a worker that one of its replicas calls hung may stay silent before it is ended. ADR 0056."""


class DraftWorker:
    """`number` tells the workers of one draft separately, `label` names it in the log. `leave_s`: when it is ended, as
    it is not needed. `uses`: what the replicas that it drafts for said last, while it drafts."""

    def __init__(self, life: WorkerLife, number: int, label: str) -> None:
        self.life = life
        self.name = life.spec.name
        self.number = number
        self.label = label
        self.ready: DraftReady | None = None
        self.leave_s: float | None = None
        self.uses: dict[str, DraftUse] = {}
        self._trend = RestTrend()
        self._tried_s: float | None = None  # when it is tried again, while it rests
        self._load: DraftLoad | None = None
        self._phase, self._detail = STARTING, "waits for the target"
        self._where = ""
        self._serving = False
        self._restarts = 0
        self._silent: Failed | None = None
        self._silent_since_s = 0.0

    @property
    def serving(self) -> bool:
        return self._serving and self.life.running

    @property
    def leaves(self) -> bool:
        """True when it is about to be ended, as it is not needed."""
        return self.leave_s is not None

    @property
    def out_of_use(self) -> bool:
        return self._phase == FAILED

    @property
    def resting(self) -> bool:
        """True while it has no process, as it helped no replica."""
        return self._tried_s is not None

    @property
    def suspected(self) -> bool:
        """True while it has to show that it does not hang."""
        return self._silent is not None

    @property
    def look_at_s(self) -> float | None:
        if self._tried_s is not None:
            return self._tried_s
        return self._silent_since_s + SUSPECTED_S if self.suspected else self.leave_s

    def note_use(self, replica: str, use: DraftUse, now_s: float) -> bool:
        before = self.uses.get(replica)
        self.uses[replica] = use
        changed = before is None or before.left_alone != use.left_alone or not (before.asks or not use.asks)
        return changed or now_s >= self._trend.due_s

    def find_why_useless(self, connected: Sequence[str], now_s: float) -> str:
        """Return why it is to rest; "" where it is not. `connected`: the replicas that it drafts for."""
        uses = [self.uses[replica] for replica in connected if replica in self.uses]
        change = follow_use(self._trend, uses, now_s)
        self._trend = change.trend
        return change.why

    def let_rest(self, why: str, now_s: float) -> list[Action]:
        self._tried_s, self._serving, self._silent = now_s + REST_S, False, None
        self._phase, self._detail = RESTING, f"{why}; it is tried again after {REST_S / 60:g} min"
        self.uses.clear()
        text = "draft worker %s rests, so that its device is free for %g min: %s"
        return [LogLine("info", text, (self.label, REST_S / 60, why)), *self.life.rest()]

    def try_again(self, now_s: float) -> list[Action]:
        if self._tried_s is None or now_s < self._tried_s:
            return []
        self._tried_s, self._phase, self._detail = None, STARTING, "has rested, and is tried again"
        return self.life.begin()

    def rate(self) -> PoolWorker:
        """Return it as policies.serving.draft_pool takes it."""
        host = self.ready.host if self.ready is not None else ""
        load = self._load if self.serving else None
        if load is None:
            return PoolWorker(self.number, host, self.serving)
        return PoolWorker(self.number, host, self.serving, load.targets, load.busy, load.crowded, load.slowdown)

    def view(self, targets: Sequence[str], connected: Sequence[str]) -> DraftView:
        detail = "is not needed any more" if self.leaves else self._detail
        return DraftView(
            *(self.name, self._phase, detail, self._where, self.ready, self._restarts, self.number),
            targets=tuple(targets),
            connected=tuple(connected),
            load=self._load if self.serving else None,
        )

    def observe_link(self, replica: str, link: DraftLink, now_s: float, *, alone: bool) -> list[Action]:
        """End a process that hangs or talks nonsense; it is then started again. What was merely cut is the target's
        worker's to mend. Where it drafts for others too (not `alone`), one that calls it hung may be wrong: it is then
        told where the worker is once more, and the worker has to say something."""
        if link.state == "connected":
            text = "draft worker %s is connected to %s: %s"
            return [LogLine("info", text, (self.label, replica, self._where))]
        text = "draft worker %s: connection of %s %s: %s"
        actions: list[Action] = [LogLine("warning", text, (self.label, replica, link.state, link.reason))]
        why = Failed(f"{link.state}: {link.reason}", restartable=True)
        if link.state == "garbage" or (link.state == "hung" and alone):
            actions += self.life.end(why) if self.serving else []
        elif link.state == "hung" and self.serving and self._silent is None:
            self._silent, self._silent_since_s = why, now_s
        elif link.state == "refused":
            self._detail = link.reason
        return actions

    def end_if_silent(self, now_s: float) -> list[Action]:
        why = self._silent
        if why is None or now_s < self._silent_since_s + SUSPECTED_S:
            return []
        self._silent = None
        return self.life.end(why) if self.serving else []

    def observe_start(self, where: str, now_s: float) -> list[Action]:
        self._where = where
        return self.life.observe_start(where, now_s)

    def observe_event(self, event: Event, now_s: float) -> list[Action]:
        actions = self.life.observe_event(event, now_s)
        match event:
            case DraftReady():
                self.ready, self._serving, self._load = event, True, None
                self.life.served = True
                self._phase, self._detail = READY, ""
                actions.append(LogLine("info", "draft worker %s ready: %s", (self.label, self._where)))
            case DraftLoad():
                self._load, self._silent = event, None
            case Progress(stage, _):
                self._detail = stage
            case _:
                pass
        return actions

    def observe_end(self, end: WorkerEnded, now_s: float) -> list[Action]:
        """Its worker is gone. One that is lost too often is out of use until it is ready again."""
        loss = self.life.observe_end(end.cause, end.kind, now_s)
        if self.life.resting:
            return []
        self._serving, self._detail, self._silent = False, loss.cause, None
        if loss.restart:
            self._restarts += 1
            self._phase, self._detail = FAILED if loss.spent else RESTARTING, loss.restart
        if not loss.failure:
            return list(loss.actions)
        self._phase, self._detail = FAILED, loss.failure
        text = "draft worker %s failed, the target goes on without it: %s"
        return [*loss.actions, LogLine("error", text, (self.label, loss.failure))]
