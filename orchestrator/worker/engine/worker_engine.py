"""The engine: what runs inside a worker process. Commands come in from any thread, events go out.

Grammars compile beside the command thread: cancels, stops and other requests pass by while one does.

The library gives up the GIL while it compiles. Small grammars do not wait behind large ones. A client's grammar comes
here after the daemon's sandbox has compiled it, in less stack and in bounded time and memory. So what takes too long
here, over the model's own tokens and behind the decode loop, ends by itself.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import psutil

from adapters.errors import AdapterError
from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.machine.process_memory import peak_rss_bytes, sum_family_bytes
from orchestrator.protocol.commands import Cancel, Command, Grammar, MoveOut, Retune, Stop, Submit
from orchestrator.protocol.contract import Step
from orchestrator.protocol.draft_messages import AttachDraft, ChooseDrafters, DraftLink
from orchestrator.protocol.events import Event, Retuned, StillWorking
from orchestrator.protocol.failures import describe_failure, describe_loading_failure
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Gauges, Refused, RoundReport
from orchestrator.side_lane import SideLane
from orchestrator.worker.engine.flights import Flights
from orchestrator.worker.engine.kv_transfer.departures import Departures
from orchestrator.worker.engine.kv_transfer.intake import KvIntake
from orchestrator.worker.engine.kv_transfer.mover import KvMover
from orchestrator.worker.engine.loop import DecodeLoop
from orchestrator.worker.engine.variants import SpeculationVariants
from policies.serving.failover.watchdog import Pulse

# A grammar that is compiled within some milliseconds is small. Not tuned.
LARGE_BYTES = 8 * 1024
STACK_BYTES = 8 * 1024 * 1024
"""Four times what the sandbox has (orchestrator.daemon.sandbox.nursery): what it compiles does not overflow here."""
# ADR 0047: no grammar within the bounds of size took over 0.13 s.
COMPILE_TIMEOUT_S = 10.0
# ADR 0046: as often as pulses; low acceptance is heard of so (ADR 0035). Not tuned.
_GAUGES_EVERY_S = 0.25
# For a word to have left the process. Not tuned: its thread has but to be woken.
_TOLD_WITHIN_S = 0.05
_WARM_UP_AFTER_S = 2.0
"""Without a request. A vocabulary of 150,000 tokens takes a second, which a first answer, or one that goes on after a
loss, is not to wait for."""

Emit = Callable[[Event], None]
Retuning = Future[Callable[[], Ready]]
ROUND = Step("round", 0.0)

_WARM_UP = Step("loading what grammars need", COMPILE_TIMEOUT_S * MS_PER_S)


@dataclass(slots=True, eq=False)
class _Job:
    request: Submit
    arrived_s: float
    task: Future[None] | None = None


class CompileLanes:
    """`compile_grammar` does the work. A request whose grammar is there goes to `accept` with the time of its arrival;
    one whose grammar takes longer than `timeout_s` goes to `refuse`. Both are called in another thread."""

    def __init__(
        self,
        compile_grammar: Callable[[Submit], None],
        accept: Callable[[Submit, float], None],
        refuse: Callable[[Refused], None],
        timeout_s: float,
    ) -> None:
        self._compile_grammar = compile_grammar
        self._accept = accept
        self._refuse = refuse
        self._timeout_s = timeout_s
        self._changing = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._small = SideLane("small grammars", gives_way=True, stack_bytes=STACK_BYTES)
        self._large = SideLane("large grammars", gives_way=True, stack_bytes=STACK_BYTES)

    def warm_up(self) -> None:
        """Load what every grammar needs, so that the first one does not wait for that. To be called while nothing else
        runs: the tokenizer's library keeps the GIL."""
        try:
            self._compile_grammar(Submit("", [], 0, grammar=Grammar("regex", "a")))
        except Exception:  # whoever needs a grammar is told
            traceback.print_exc()

    def add(self, request: Submit, arrived_s: float) -> None:
        job = _Job(request, arrived_s)
        with self._changing:
            self._jobs[request.request_id] = job
            job.task = self._lane_of(request).submit(self._compile, job)

    def cancel(self, request_id: str) -> None:
        """Drop a request whose grammar is not there yet. Others are not known here."""
        with self._changing:
            job = self._jobs.pop(request_id, None)
        if job is not None and job.task is not None:
            job.task.cancel()

    def _lane_of(self, request: Submit) -> SideLane:
        text = request.grammar.text if request.grammar is not None else ""
        return self._large if len(text) > LARGE_BYTES else self._small

    def _compile(self, job: _Job) -> None:
        alarm = threading.Timer(self._timeout_s, self._give_up, (job,))
        alarm.daemon = True
        alarm.start()
        try:
            self._compile_grammar(job.request)
        except Exception:  # one request is lost, not the worker with all of them
            traceback.print_exc()
            self._end(job, "the grammar could not be compiled; the log says why", "failed")
        finally:
            alarm.cancel()
        with self._changing:
            if self._take(job):
                self._accept(job.request, job.arrived_s)

    def _give_up(self, job: _Job) -> None:
        if job.task is not None:
            self._lane_of(job.request).leave_behind(job.task)
        self._end(job, f"the grammar takes longer than {self._timeout_s:g} s to compile; send a simpler one", "invalid")

    def _end(self, job: _Job, message: str, kind: str) -> None:
        with self._changing:
            if self._take(job):
                self._refuse(Refused(job.request.request_id, message, kind))

    def _take(self, job: _Job) -> bool:
        """Forget a request that waits here; False where it was cancelled or refused."""
        if self._jobs.get(job.request.request_id) is not job:
            return False
        del self._jobs[job.request.request_id]
        return True


class Retuner(Protocol):
    """Lets a loaded engine go on by other options."""

    def prepare(self, options: dict[str, Any]) -> Callable[[], Ready]:
        """Load what other options need, in any thread; returns what puts them into effect, between two rounds, and says
        how the worker is then. Raises AdapterError."""
        ...

    def choose(self, names: Collection[str] | None) -> None:
        """Let only drafters of these names propose from now on; None: all."""
        ...


class MemoryObserver(Protocol):
    """Compares what the worker holds with what was announced."""

    def observe_round(self, done: RoundReport) -> None:
        """Note what a round has done."""
        ...

    def observe_held(self, held_bytes: int, *, idle: bool, now_s: float) -> None:
        """Note the most that was held."""
        ...


class Watch(Protocol):
    """Looks after what the worker has loaded, in a thread of its own. `corrupt`: files that it found damaged."""

    corrupt: list[str]

    def start(self, tell: Callable[[], None]) -> None:
        """Begin; `tell` is called, from any thread, when there is another one."""
        ...

    def stop(self) -> None:
        """End. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loop that can run, and the effective state to announce. `attach` connects it to a draft worker. `variants`: how
    requests are served that say nothing, and the other way where one is tried. `mover`: of the target's KV pages.
    `watch` looks after the model's files. `retuner`: None takes no other options, and lets no drafter rest. `memory`:
    None where nothing is announced.
    """

    loop: DecodeLoop | Flights
    ready: Ready
    close: Callable[[], None]
    attach: Callable[[AttachDraft], None]
    variants: SpeculationVariants
    mover: KvMover
    watch: Watch | None = None
    retuner: Retuner | None = None
    memory: MemoryObserver | None = None


class WorkerEngine:
    """Implements protocol.contract.Engine. `load` prepares and loads everything, reporting progress by `emit`."""

    def __init__(self, load: Callable[[Emit], LoadedEngine], clock: Clock) -> None:
        self._load = load
        self._clock = clock
        # None: tell the gauges
        self._commands: queue.SimpleQueue[tuple[Command | Retuning | None, float]] = queue.SimpleQueue()
        self._preparing = ThreadPoolExecutor(1, "prepare other options")
        self._loop: DecodeLoop | Flights | None = None
        self._lanes: CompileLanes | None = None
        self._intake: KvIntake | None = None
        self._process = psutil.Process()
        self._gauges_s = 0.0
        self._step: Step | None = Step("load", -1.0)
        self._warm_up_in_s: float | None = _WARM_UP_AFTER_S

    def submit(self, command: Command) -> None:
        """See protocol.contract.Engine. What a request needs compiled or read is prepared elsewhere, while others
        decode."""
        arrived_s = self._clock.monotonic_s()
        lanes, intake = self._lanes, self._intake
        if intake is not None and isinstance(command, Submit) and command.pages is not None:
            intake.add(command, arrived_s)
            return
        if intake is not None and isinstance(command, Cancel | MoveOut):
            intake.cancel(command.request_id)
        if lanes is not None and isinstance(command, Cancel | MoveOut):
            lanes.cancel(command.request_id)
        self._queue(command, arrived_s)

    def _queue(self, command: Command, arrived_s: float) -> None:
        """Queue a command; one whose grammar is to be compiled goes by that way. The first of these waits for what all
        need, which is loaded between two rounds."""
        lanes, warm = self._lanes, self._warm_up_in_s is None
        if lanes is not None and warm and isinstance(command, Submit) and command.grammar is not None:
            lanes.add(command, arrived_s)
        else:
            self._commands.put((command, arrived_s))

    def describe_step(self) -> Step | None:
        loop = self._loop
        return Step("round", loop.expected_ms) if self._step is ROUND and loop is not None else self._step

    def run(self, emit: Emit) -> None:
        """What an adapter raises becomes a Failed event with one line."""

        def tell(event: Event) -> None:
            emit(event)
            if isinstance(event, DraftLink):
                self._commands.put((None, 0.0))

        try:
            loaded = self._load(tell)
        except AdapterError as error:
            emit(describe_loading_failure(error))
            return
        self._loop = loaded.loop
        self._lanes = CompileLanes(
            loaded.loop.prepare, lambda *request: self._commands.put(request), emit, COMPILE_TIMEOUT_S
        )
        self._intake = KvIntake(loaded.mover, self._queue, emit, self._clock)
        emit(loaded.ready)
        try:
            if loaded.watch is not None:
                loaded.watch.start(lambda: self._commands.put((None, 0.0)))
            self._decode(loaded, Departures(loaded.loop, loaded.mover, self._clock), emit)
        except (AdapterError, MemoryError) as error:
            emit(describe_failure(error))
        finally:
            self._preparing.shutdown(wait=True, cancel_futures=True)
            if loaded.watch is not None:
                loaded.watch.stop()
            if loaded.mover.inbox is not None:
                loaded.mover.inbox.close()
            loaded.close()

    def _decode(self, loaded: LoadedEngine, departures: Departures, emit: Emit) -> None:
        loop = loaded.loop
        emit(self._gauges(loaded))
        while True:
            if not self._obey(loaded, departures, emit):
                return
            if loop.idle:
                continue
            self._step = ROUND
            done = loop.run_round()
            emit(done)
            if loaded.memory is not None:
                loaded.memory.observe_round(done)
            for left in departures.advance(done.round_ms):
                emit(left)
            for failed in loop.failures():
                emit(failed)
            now = self._clock.monotonic_s()
            if loop.idle or now - self._gauges_s >= _GAUGES_EVERY_S:
                self._gauges_s = now
                emit(self._gauges(loaded))

    def _gauges(self, loaded: LoadedEngine) -> Gauges:
        held = (self._process.memory_info().rss, peak_rss_bytes())
        if loaded.ready.shards.split:  # ranks are processes of their own
            held = sum_family_bytes(self._process)
        gauges = loaded.loop.gauges(*held)
        if loaded.memory is not None:
            loaded.memory.observe_held(held[1], idle=loaded.loop.idle, now_s=self._clock.monotonic_s())
        if loaded.watch is None or not loaded.watch.corrupt:
            return gauges
        return msgspec.structs.replace(gauges, corrupt=loaded.watch.corrupt)

    def _obey(self, loaded: LoadedEngine, departures: Departures, emit: Emit) -> bool:
        """Carry out queued commands, waiting for one when there is nothing to decode. False: stop."""
        loop = loaded.loop
        wait = loop.idle
        while True:
            if wait:
                self._step = None
            try:
                command, arrived_s = self._commands.get(block=wait, timeout=self._warm_up_in_s)
            except queue.Empty:
                if not wait:
                    return True
                self._warm_up_grammars(emit)
                continue
            wait = False
            if isinstance(command, Stop):
                return False
            if command is None:
                emit(self._gauges(loaded))
            elif isinstance(command, Future):
                emit(_finish_retune(command))
                emit(self._gauges(loaded))
            elif isinstance(command, Cancel | MoveOut):
                self._let_go(departures, command, emit)
                if loop.idle:
                    emit(self._gauges(loaded))
            elif isinstance(command, Retune):
                self._begin_retune(loaded, command, emit)
            else:
                self._carry_out(loaded, command, arrived_s, emit)

    def _warm_up_grammars(self, emit: Emit) -> None:
        """Load what grammars need. Mostly no stream waits for it, nor does the first grammar. Where some do, it is said
        before: no thread of this process says anything while it lasts, and control would take that for a hang."""
        step, self._step, self._warm_up_in_s = self._step, _WARM_UP, None
        if self._lanes is not None:
            emit(StillWorking(_WARM_UP.stage, Pulse(_WARM_UP.expected_ms, 0.0, 0.0, 1)))
            time.sleep(_TOLD_WITHIN_S)
            self._lanes.warm_up()
        self._step = step

    def _let_go(self, departures: Departures, command: Cancel | MoveOut, emit: Emit) -> None:
        """Forget a request, at once or once its pages have gone."""
        if self._lanes is not None:  # it may have gone there since
            self._lanes.cancel(command.request_id)
        if isinstance(command, Cancel):
            departures.cancel(command.request_id)
        elif (left := departures.move_out(command)) is not None:
            emit(left)

    def _begin_retune(self, loaded: LoadedEngine, command: Retune, emit: Emit) -> None:
        """Prepare other options while decoding goes on; the decoding thread puts them into effect."""
        if loaded.retuner is None:
            emit(Retuned(None, "it takes no other options while it runs"))
            return
        prepared = self._preparing.submit(loaded.retuner.prepare, command.options)
        prepared.add_done_callback(lambda done: self._commands.put((done, 0.0)))

    def _carry_out(self, loaded: LoadedEngine, command: Command, arrived_s: float, emit: Emit) -> None:
        """Carry out a command that lets no request go, and is not the last."""
        if self._warm_up_in_s is not None and isinstance(command, Submit) and command.grammar is not None:
            self._warm_up_grammars(emit)
            self._queue(command, arrived_s)
        elif isinstance(command, Submit):
            pages = self._intake.take(command.request_id) if self._intake is not None else None
            refused = loaded.loop.submit(loaded.variants.apply_variant(command), arrived_s, pages)
            if refused is not None:
                emit(refused)
            else:
                loaded.variants.join_drafter(command)
        elif isinstance(command, AttachDraft):
            loaded.attach(command)
        elif isinstance(command, ChooseDrafters) and loaded.retuner is not None:
            loaded.retuner.choose(command.names)
            emit(self._gauges(loaded))


def _finish_retune(prepared: Retuning) -> Retuned:
    """Put prepared options into effect; returns what came of it."""
    try:
        apply = prepared.result()
    except Exception as error:  # a runtime raises what it likes; nothing has changed yet, and the worker goes on
        return Retuned(None, str(error) or type(error).__name__)
    try:
        return Retuned(apply())
    except AdapterError as error:
        return Retuned(None, str(error) or type(error).__name__)
