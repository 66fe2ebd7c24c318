"""One worker after the other in one place: when the next is started, and when none can ever work. No effects."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

import msgspec

from orchestrator.config.model_keys import THIS_NODE
from orchestrator.daemon.control.actions import Action, LogLine, StartWorker, StopWorker
from orchestrator.daemon.control.state import tell_nobody
from orchestrator.protocol.contract import MEMORY_SHARE, WorkerSpec
from orchestrator.protocol.draft_messages import DraftReady
from orchestrator.protocol.events import Event, Failed, FailureKind, StillWorking
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import RoundReport
from policies.models.kv_shares import SHARES, find_next_share, name_share
from policies.running_mean import update_mean
from policies.serving.failover.blame import LOSS_KINDS, LossKind
from policies.serving.failover.restarts import RestartBudget
from policies.serving.failover.watchdog import Pulse

STOP_GRACE_S = 5.0  # what a worker may take to end its rounds. Not tuned.
LOADING_GRACE_S = 0.3
"""Of a worker that is not ready: it takes no command while it loads, and has nothing to finish. Not tuned."""
_DEVICE_FAILURES = ("out_of_memory", "device_lost", "ecc", "thermal")
# Weight of the newest round in how long they take; a longer one counts in full. Not tuned.
_NEWEST = 0.1
NO_DEATH = -1
"""The number of a death that no request can be blamed for."""


class Stage(Enum):
    """Of the place: nothing is there, a process is due, it is there, or it is being ended."""

    IDLE = "idle"
    COMING = "coming"
    RUNNING = "running"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker ended for `cause`. `restart` says that another follows, `after_s` when; `spent`: it has been lost too
    often of late. `failure` says why none ever can. All are empty where it was told to end."""

    cause: str
    restart: str = ""
    failure: str = ""
    after_s: float = 0.0
    spent: bool = False
    actions: tuple[Action, ...] = ()


@dataclass(slots=True, eq=False)
class WorkerLife:
    """`number` names the place in events and actions, `title` in the log. A place has `served` once a worker of its was
    of use: then whatever goes wrong may come right again, but for a model that was replaced. Of the worker: `heard_s`
    is when it said something last, `pulse` that it said of a step that it has not finished, `round_ms` how long its
    rounds take of late. `memory_share`: the next one gets one part in so many of the configured KV cache, since the
    last was killed for want of memory. `on_change` is called when it comes or goes."""

    number: int
    spec: WorkerSpec
    title: str
    budget: RestartBudget
    served: bool = False
    heard_s: float = 0.0
    pulse: Pulse | None = None
    round_ms: float = 0.0
    memory_share: int = 1
    _kv_tokens: int = 0
    _ready_s: float | None = None
    _started: bool = False
    _closed: bool = False
    _resting: bool = False
    _ended_here: bool = False
    _changed_class: bool = False
    _failure: Failed | None = None
    on_change: Callable[[], object] = tell_nobody
    _stage: Stage = field(default=Stage.IDLE, init=False)

    @property
    def stage(self) -> Stage:
        return self._stage

    @stage.setter
    def stage(self, stage: Stage) -> None:
        self._stage = stage
        self.on_change()

    @property
    def running(self) -> bool:
        return self._stage is Stage.RUNNING

    @property
    def failure_kind(self) -> FailureKind:
        return self._failure.kind if self._failure is not None else ""

    @property
    def starved(self) -> bool:
        return self.failure_kind == "out_of_memory" and self._ready_s is None

    @property
    def refused(self) -> bool:
        """Whether its worker said, or was told, that none can ever work here."""
        failure = self._failure
        if failure is None or failure.restartable:
            return False
        return not self.served or failure.kind == "model_replaced"

    @property
    def changes_class(self) -> bool:
        """Whether its worker was ended for one that runs the model in another numerical class: no loss, but once."""
        return self.failure_kind == "other_class" and not self._changed_class

    @property
    def coming(self) -> bool:
        return self.stage is Stage.COMING

    def begin(self) -> list[Action]:
        """Have a worker from now on. Nothing happens the second time."""
        if self._started or self._closed:
            return []
        self._started, self._resting = True, False
        return [self._start(0.0)]

    def end(self, why: Failed) -> list[Action]:
        """End the worker, if there is one, as if it had failed in this way."""
        if not self.running:
            return []
        self._failure, self._ended_here, self.stage = why, True, Stage.ENDING
        return [StopWorker(self.number, 0.0)]

    @property
    def resting(self) -> bool:
        """Whether it has no worker, or none for long, as nobody wants one."""
        return self._resting

    def rest(self) -> list[Action]:
        """End the worker; another follows once `begin` is called again, behind its end."""
        self._started, self._resting = False, True
        return self._stop()

    def close(self) -> list[Action]:
        """End the worker; no other follows. Idempotent."""
        self._closed = True
        return self._stop()

    def _stop(self) -> list[Action]:
        if self.stage in (Stage.IDLE, Stage.ENDING):
            return []
        self.stage = Stage.ENDING
        return [StopWorker(self.number, LOADING_GRACE_S if self._ready_s is None else STOP_GRACE_S)]

    def observe_start(self, where: str, now_s: float) -> list[Action]:
        self.heard_s, self.pulse, self.round_ms = now_s, None, 0.0
        if self.stage is Stage.COMING:
            self.stage = Stage.RUNNING
        return [LogLine("info", "%s started: %s", (self.title, where))]

    def observe_event(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, RoundReport):
            self.hear_round(event.round_ms, now_s)
            return []
        self.heard_s = now_s
        self.pulse = event.pulse if isinstance(event, StillWorking) else None
        if isinstance(event, Ready | DraftReady):
            self._ready_s = now_s
        if isinstance(event, Ready):
            self._kv_tokens = event.kv.tokens
            self.memory_share = SHARES[min(len(event.device.memory_reduced), len(SHARES) - 1)]
        if not isinstance(event, Failed) or self._ended_here:
            return []
        self._failure = event
        return [LogLine("error", "%s: %s", (self.title, event.message))]

    def hear_round(self, round_ms: float, now_s: float) -> None:
        self.heard_s, self.pulse = now_s, None
        self.round_ms = max(round_ms, update_mean(self.round_ms, round_ms, _NEWEST))

    def observe_ending(self) -> None:
        self.stage = Stage.ENDING

    def explain(self, cause: str, kind: LossKind) -> tuple[str, LossKind]:
        """Return why its worker is lost, and how, by what it said itself and by how that looked from outside."""
        failure = self._failure
        if failure is None:
            return cause, kind
        reason = failure.message if self._ended_here else f"{failure.message} ({cause})"
        if failure.kind in _DEVICE_FAILURES:
            return reason, "device"
        if failure.kind == "endpoint":
            return reason, "host"
        return reason, next((known for known in LOSS_KINDS if known == failure.kind), "crashed")

    def observe_end(
        self,
        cause: str,
        kind: LossKind,
        now_s: float,
        *,
        number: int = NO_DEATH,
        explained: Container[int] = (),
        hopeless: bool = False,
        wait_s: float = 0.0,
        longest_tokens: int = 0,
    ) -> Loss:
        """The worker is gone: return what follows. `number`: of its death; those `explained` spend no budget.
        `hopeless`: nothing of its kind ever served, so a spent budget is the end. `wait_s`: before which nothing is to
        be started where it was. `longest_tokens`: of a stream that is to go on, which the next KV cache has to hold."""
        self.stage = Stage.IDLE
        failure = self._failure
        cause, kind = self.explain(cause, kind)
        if self._closed or self._resting:
            return Loss(cause)
        if failure is not None and self.refused:
            return Loss(cause, failure=self._name_host(failure.message))
        if self.changes_class:
            self._changed_class = True
            line = LogLine("info", "%s is started again: %s", (self.title, cause))
            return Loss(cause, restart=cause, actions=(line, self._start(0.0)))
        smallest = find_next_share(self.memory_share) is None
        if hopeless and smallest and kind == "memory":
            return Loss(
                cause,
                failure=self._name_host(f"{cause}; it had {name_share(self.memory_share)} of its KV cache already"),
            )
        self._choose_share(kind, longest_tokens)
        served_s = now_s - self._ready_s if self._ready_s is not None else 0.0
        self.budget = self.budget.observe_loss(number, kind, cause, now_s, served_s)
        self.budget = self.budget.forgive(
            frozenset(loss.number for loss in self.budget.made if loss.number in explained)
        )
        if hopeless and self.budget.is_spent(kind):
            return Loss(cause, failure=self._name_host(self.budget.describe_end(kind)))
        after_s, restart = max(wait_s, self.budget.delay_s(kind)), self.budget.describe(kind)
        if self.memory_share > 1:
            restart += f", with {name_share(self.memory_share)} of its KV cache"
        line = LogLine("warning", "%s lost: %s; %s follows in %.1f s", (self.title, cause, restart, after_s))
        return Loss(
            cause,
            restart=f"{cause}; {restart}",
            after_s=after_s,
            spent=self.budget.is_spent(kind),
            actions=(line, self._start(after_s)),
        )

    def _name_host(self, failure: str) -> str:
        """Return why no worker can work here, with the host that it is bound to."""
        node = self.spec.node
        where = "the daemon's own host" if node == THIS_NODE else f"host {node}"
        return f"{where}: {failure}" if node else failure

    def _choose_share(self, kind: LossKind, longest_tokens: int) -> None:
        """Ask for less memory after a worker that had too much of it, else for all that is configured. A KV cache that
        cannot hold the longest stream would cost that stream: it stays as it is."""
        starved = kind == "memory" or (self.failure_kind == "out_of_memory" and self._ready_s is not None)
        if not starved:
            self.memory_share = 1
            return
        smaller = find_next_share(self.memory_share) or self.memory_share
        if longest_tokens * smaller <= self._kv_tokens * self.memory_share or not self._kv_tokens:
            self.memory_share = smaller

    def _start(self, after_s: float) -> StartWorker:
        self.stage, self._failure, self._ended_here, self._ready_s = Stage.COMING, None, False, None
        spec = self.spec
        if self.memory_share > 1:
            spec = msgspec.structs.replace(spec, options={**spec.options, MEMORY_SHARE: self.memory_share})
        return StartWorker(self.number, spec, self.title, after_s)


class WorkerLives:
    """Numbers the places. Each may have `max_restarts` workers more within ten minutes; then one a minute."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._numbers = count()

    def create(self, spec: WorkerSpec, title: str) -> WorkerLife:
        return WorkerLife(next(self._numbers), spec, title, RestartBudget(self._max_restarts))
