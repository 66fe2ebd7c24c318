"""One worker after the other in one place: when the next is started, and when that is given up. No effects."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import count

from orchestrator.control.actions import Action, LogLine, StartWorker, StopWorker
from orchestrator.control.state import RestartBudget
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.messages import Event, Failed

STOP_GRACE_S = 5.0


class Stage(Enum):
    """Of the place: nothing is there, a process is due, it is there, or it is being ended."""

    IDLE = "idle"
    COMING = "coming"
    RUNNING = "running"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker ended for `cause`. `restart` says that another follows, `failure` why none ever does. Both are empty
    where it was told to end."""

    cause: str
    restart: str = ""
    failure: str = ""
    actions: tuple[Action, ...] = ()


@dataclass(slots=True, eq=False)
class WorkerLife:
    """`number` names the place in events and actions, `title` in the log."""

    number: int
    spec: WorkerSpec
    title: str
    budget: RestartBudget
    stage: Stage = Stage.IDLE
    _begun: bool = False
    _closed: bool = False
    _ended_here: bool = False
    _failure: Failed | None = None

    @property
    def running(self) -> bool:
        """True while there is a process that is not being ended."""
        return self.stage is Stage.RUNNING

    def begin(self) -> list[Action]:
        """Have a worker from now on. Nothing happens the second time."""
        if self._begun or self._closed:
            return []
        self._begun = True
        return [self._start(0.0)]

    def end(self, why: Failed) -> list[Action]:
        """End the worker, if there is one, as if it had failed in this way."""
        if not self.running:
            return []
        self._failure, self._ended_here, self.stage = why, True, Stage.ENDING
        return [StopWorker(self.number, 0.0)]

    def close(self) -> list[Action]:
        """End the worker; no other follows. Idempotent."""
        self._closed = True
        if self.stage in (Stage.IDLE, Stage.ENDING):
            return []
        self.stage = Stage.ENDING
        return [StopWorker(self.number, STOP_GRACE_S)]

    def observe_start(self, where: str) -> list[Action]:
        """A process is there."""
        if self.stage is Stage.COMING:
            self.stage = Stage.RUNNING
        return [LogLine("info", "%s started: %s", (self.title, where))]

    def observe(self, event: Event) -> list[Action]:
        """The worker said something."""
        if not isinstance(event, Failed) or self._ended_here:
            return []
        self._failure = event
        return [LogLine("error", "%s: %s", (self.title, event.message))]

    def observe_ending(self) -> None:
        """The worker says nothing more."""
        self.stage = Stage.ENDING

    def observe_end(self, cause: str, now_s: float) -> Loss:
        """The worker is gone: return what follows."""
        self.stage = Stage.IDLE
        failure = self._failure
        if failure is not None:
            cause = failure.message if self._ended_here else f"{failure.message} ({cause})"
        if self._closed:
            return Loss(cause)
        if failure is not None and not failure.restartable:
            return Loss(cause, failure=failure.message)
        after_s = self.budget.spend(cause, now_s)
        if after_s is None:
            return Loss(cause, failure=self.budget.describe_exhaustion(cause))
        restart = f"restart {len(self.budget.restarts_s)} of {self.budget.limit} in ten minutes"
        line = LogLine("warning", "%s lost: %s; %s follows in %.1f s", (self.title, cause, restart, after_s))
        return Loss(cause, restart=f"{cause}; {restart}", actions=(line, self._start(after_s)))

    def _start(self, after_s: float) -> StartWorker:
        self.stage, self._failure, self._ended_here = Stage.COMING, None, False
        return StartWorker(self.number, self.spec, self.title, after_s)


class WorkerLives:
    """Numbers the places. Each may have `max_restarts` workers more within ten minutes."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._numbers = count()

    def create(self, spec: WorkerSpec, title: str) -> WorkerLife:
        """Return a place that was not there before."""
        return WorkerLife(next(self._numbers), spec, title, RestartBudget(self._max_restarts))
