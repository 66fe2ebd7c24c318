"""Lets models come and go: carries out what control.replicas.roster decides, on the controls of all models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from orchestrator.clock import Clock
from orchestrator.daemon.control.actions import TellStage
from orchestrator.daemon.control.controller import TargetControl
from orchestrator.daemon.control.replicas.residency import ResidencyTerms
from orchestrator.daemon.control.replicas.roster import Roster, SeenModel
from orchestrator.errors import RequestError
from orchestrator.telemetry import get_logger
from policies.serving.residency import ModelStage, ResidencySteps

_log = get_logger(__name__)
# A timer may go off so much too early.
_LATER_S = 0.01
_RETRY_AFTER_S = 10  # where the daemon ends, or a load came to nothing. Not tuned.


class ModelGate:
    """How requests come to a model that they load. Until one can be read, by the tokenizer of what a worker has loaded
    (`can_read`), they wait here; behind that with control."""

    def __init__(self, control: TargetControl, can_read: Callable[[], bool]) -> None:
        self.changed: Callable[[], object] = lambda: None
        self._control = control
        self._can_read = can_read
        self._coming = 0
        self._waiting: set[asyncio.Future[None]] = set()
        control.observers.follow(TellStage, self._observe_stage)
        control.heard = self._hear
        control.views.count_unread = lambda: len(self._waiting)

    @property
    def request_timeout_s(self) -> float:
        """The longest time for any request; 0 is no limit."""
        return self._control.request_timeout_s

    @contextmanager
    def hold_model(self) -> Iterator[None]:
        """A request is about to come: its model is not idle."""
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1
            self.changed()

    async def wait_readable(self) -> None:
        """Have the model loaded, and wait for it. Raises RequestError 503 where that comes to nothing."""
        while not self._can_read():
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            self.changed()
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)
                self.changed()

    def release_waiting(self) -> None:
        for waiting in self._waiting if self._can_read() else ():
            if not waiting.done():
                waiting.set_result(None)

    def refuse(self, why: str) -> None:
        error = RequestError(
            f"the model is not loaded: {why}",
            status=503,
            code="model_not_loaded",
            retry_after_s=_RETRY_AFTER_S,
        )
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)

    def see(self) -> SeenModel:
        """Return how the model stands. Until requests can be read for it, it is not loaded to the end."""
        seen = self._control.see_model()
        unread = seen.stage is ModelStage.LOADED and bool(self._waiting)
        waiting = seen.waiting + len(self._waiting)
        return replace(
            seen,
            stage=ModelStage.LOADING if unread else seen.stage,
            live=seen.live + self._coming,
            waiting=waiting,
        )

    def _observe_stage(self, event: TellStage) -> None:
        if event.stage is ModelStage.UNLOADING and self._waiting:
            self.refuse(event.why)
        self.release_waiting()

    def _hear(self) -> None:
        self.changed()


class ModelRoster:
    """The models of a daemon, in its file's order. Those without a gate stay: their memory is taken for good."""

    def __init__(
        self,
        names: Sequence[str],
        gates: Sequence[ModelGate | None],
        controls: Sequence[TargetControl],
        terms: Sequence[ResidencyTerms],
        memory: Mapping[str, int],
        at_start: Collection[int],
        clock: Clock,
    ) -> None:
        self._names = names
        self._gates = gates
        self._controls = controls
        self._clock = clock
        self._roster = Roster(terms, memory, at_start, clock.monotonic_s())
        self._timer: asyncio.TimerHandle | None = None
        self._looking = False
        self._again = False
        self._closed = False
        for gate in gates:
            if gate is not None:
                gate.changed = self.advance_models

    def advance_models(self) -> None:
        self._again = True
        if self._looking or self._closed:
            return
        self._looking = True
        try:
            while self._again:
                self._again = False
                seen = [self._see(number) for number in range(len(self._gates))]
                self._carry_out(self._roster.decide_steps(seen, self._clock.monotonic_s()))
        finally:
            self._looking = False

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _see(self, number: int) -> SeenModel:
        gate = self._gates[number]
        return gate.see() if gate is not None else SeenModel(ModelStage.LOADED, 0, 0, 0)

    def _carry_out(self, steps: ResidencySteps) -> None:
        for number in steps.keep:
            self._controls[number].load_model()
        for number, room_for in steps.unload:
            why = "it was not used" if room_for is None else f"its room is for {self._names[room_for]}"
            _log.info("a model leaves the memory", model=self._names[number], why=why)
            self._controls[number].leave_memory("" if room_for is None else self._names[room_for])
        if steps.load is not None:
            _log.info("a model is loaded", model=self._names[steps.load])
            self._controls[steps.load].load_model()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if steps.look_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, steps.look_s) + _LATER_S, self.advance_models)
