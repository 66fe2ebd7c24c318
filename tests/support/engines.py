"""A scripted engine: no model, every token is a function of (prompt, position), and prompts can make it fail.

A prompt that begins with one of the codes below misbehaves when as many tokens are committed as its second
number says; every other prompt is decoded. Used through its entry, "tests.support.engines:scripted".
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.protocol.commands import Cancel, Command, Stop, Submit
from orchestrator.protocol.contract import Step, WorkerSpec
from orchestrator.protocol.events import Event, Failed, Progress
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Delta, Gauges, Refused, RequestStats, RoundReport
from orchestrator.protocol.trace_messages import RoundTrace, SequenceTrace
from tests.support.ready import PLAIN, change_ready

ENTRY = "tests.support.engines:script_engine"
ROOT = Path(__file__).resolve().parents[2]
_CLOSED_S = 0.02  # a round at a closed gate

CORES_AT_IMPORT = sorted(os.sched_getaffinity(0))

ABORT, SEGFAULT, EXIT_3, RAISE, HANG, UNSUPPORTED, REFUSE, CREEP, NOT_FINITE = range(900_001, 900_010)


def spec(**options: Any) -> WorkerSpec:
    """Return a worker that runs the scripted engine. The checkout is importable where the tests run in it."""
    return WorkerSpec("scripted", ENTRY, options, cpus=0.5)


def token(prompt: list[int], position: int) -> int:
    """Return the token behind `position` generated ones."""
    return zlib.crc32(repr((prompt, position)).encode()) % 1000


def tokens(prompt: list[int], count: int) -> list[int]:
    """Return an undisturbed stream's first tokens."""
    return [token(prompt, position) for position in range(count)]


class Gate:
    """How many tokens a request may have, so that its stream lasts until a test has done what it does meanwhile."""

    def __init__(self, directory: Path, tokens: int = 1) -> None:
        self.path = directory / "gate"
        self.allow(tokens)

    def allow(self, tokens: int) -> None:
        """Let each request of the engines that have `gate=str(path)` come to so many tokens."""
        written = self.path.with_suffix(".new")
        written.write_text(str(tokens))
        written.replace(self.path)

    def open(self) -> None:
        self.allow(sys.maxsize)


class _Over(Exception):
    """The engine ends after the event it has emitted."""


@dataclass(slots=True)
class _Request:
    submit: Submit
    tokens: list[int] = field(default_factory=list)
    steps: int = 0


class ScriptedEngine:
    """One token a round for each of the first `slots` requests; a round takes `step_s`.

    `fail_start`: "" or what to do instead of becoming ready ("exit", "restartable", "final", "never"). `ignore_stop`:
    only a signal ends it. `activations`: what it says of them. `cannot`: what it does not do. `loras`: adapters that
    it has. `gives_up`: another worker may have each request. `shown`: a variable, which it tells as its device. `gate`:
    the path of a Gate's file.
    """

    def __init__(
        self,
        *,
        slots: int = 4,
        step_s: float = 0.0,
        fail_start: str = "",
        ignore_stop: bool = False,
        shown: str = "SCRIPTED_DEVICE",
        activations: str = "none",
        cannot: Sequence[str] = (),
        loras: Sequence[str] = (),
        gives_up: bool = False,
        gate: str = "",
    ) -> None:
        self._gate = Path(gate) if gate else None
        self._cannot, self._loras = cannot, loras
        self._gives_up = gives_up
        self._activations = activations
        self._shown = shown
        self._slots = slots
        self._step_s = step_s
        self._fail_start = fail_start
        self._ignore_stop = ignore_stop
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._live: deque[_Request] = deque()
        self._rounds = 0
        self._step: Step | None = Step("load", -1.0)

    def submit(self, command: Command) -> None:
        self._commands.put(command)

    def describe_step(self) -> Step | None:
        return self._step

    def run(self, emit: Callable[[Event], None]) -> None:
        emit(Progress("load", 0.5))
        if self._fail_start == "exit":
            os._exit(7)
        if self._fail_start == "never":
            self._step = Step("load", -1.0)
            time.sleep(3600.0)
        if self._fail_start:
            emit(Failed("no such device", restartable=self._fail_start == "restartable"))
            return
        emit(self._ready())
        emit(self._gauges())
        with suppress(_Over):
            self._decode(emit)

    def _decode(self, emit: Callable[[Event], None]) -> None:
        while self._obey(emit):
            if self._live:
                self._step = Step("round", 1000.0 * self._step_s)
                emit(self._round(emit))
                if not self._live:
                    emit(self._gauges())

    def _obey(self, emit: Callable[[Event], None]) -> bool:
        wait = not self._live
        if wait:
            self._step = None
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if isinstance(command, Stop) and not self._ignore_stop:
                return False
            if isinstance(command, Cancel):
                self._live = deque(r for r in self._live if r.submit.request_id != command.request_id)
            elif isinstance(command, Submit):
                if self._gives_up:
                    emit(Refused(command.request_id, "the server is busy", "elsewhere"))
                elif not command.prompt or command.prompt[0] == REFUSE:
                    emit(Refused(command.request_id, "the prompt is refused", "invalid"))
                else:
                    self._live.append(_Request(command, list(command.committed)))

    def _round(self, emit: Callable[[Event], None]) -> RoundReport:
        time.sleep(self._step_s)
        deltas = []
        most = sys.maxsize if self._gate is None else int(self._gate.read_text())
        running = [self._live[index] for index in range(min(self._slots, len(self._live)))]
        running = [request for request in running if len(request.tokens) < most]
        if not running:
            time.sleep(_CLOSED_S)
        for request in running:
            if _misbehave(request, emit):
                self._live.remove(request)
                continue
            submit = request.submit
            request.tokens.append(token(submit.prompt, len(request.tokens)))
            request.steps += 1
            if len(request.tokens) < submit.max_tokens:
                deltas.append(Delta(submit.request_id, request.tokens[-1:]))
                continue
            self._live.remove(request)
            stats = RequestStats(len(submit.prompt), len(request.tokens), request.steps, 0, 0, 0.0, 0.0)
            deltas.append(Delta(submit.request_id, request.tokens[-1:], "length", stats))
        self._rounds += 1
        counts = (len(running), 2 * len(running), len(running), len(running), 0, [0])
        return RoundReport(deltas, *counts, 1.0, 0.5, 0.1, trace=self._trace(running))

    def _trace(self, running: list[_Request]) -> RoundTrace | None:
        told = [(one.submit, one.submit.trace) for one in running]
        mine = [SequenceTrace(trace, one.request_id, False, 1, 0, 0, 1) for one, trace in told if trace is not None]
        return RoundTrace(self._rounds, os.getpid(), time.time(), 0.1, 0.1, 0.8, mine) if mine else None

    def _gauges(self) -> Gauges:
        return Gauges(min(len(self._live), self._slots), 0, 1024, 1024, 0, 0, self._rounds, 0)

    def _ready(self) -> Ready:
        return change_ready(
            PLAIN,
            pid=os.getpid(),
            model="scripted",
            vocabulary_fingerprint="scripted",
            device_name=os.environ.get(self._shown, "none"),
            activations=self._activations,
            slots=self._slots,
            cores=CORES_AT_IMPORT,
            cannot=list(self._cannot),
            loras=list(self._loras),
        )


def _misbehave(request: _Request, emit: Callable[[Event], None]) -> bool:
    """Do what the prompt says; True where nothing more comes of the request."""
    prompt = request.submit.prompt
    if prompt[0] == CREEP and request.steps:  # one token in each life
        os.abort()
    if prompt[0] <= 900_000 or len(request.tokens) < (prompt[1] if len(prompt) > 1 else 0):
        return False
    code = prompt[0]
    sys.stderr.flush()
    if code == ABORT:
        os.abort()
    elif code == SEGFAULT:
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(10.0)  # the main thread may take it
    elif code == EXIT_3:
        os._exit(3)
    elif code == RAISE:
        raise RuntimeError("the script says so\nand a second line")
    elif code == HANG:
        ctypes.PyDLL(None).sleep(3600)  # like native code that never comes back, and keeps the GIL
    elif code == UNSUPPORTED:
        emit(Failed("the device cannot do this", restartable=False))
        raise _Over
    elif code == NOT_FINITE:
        emit(Refused(request.submit.request_id, "a row is not a number", "not_finite"))
        return True
    return False


def script_engine(options: dict[str, Any]) -> ScriptedEngine:
    """Return the engine; see ScriptedEngine for the options."""
    return ScriptedEngine(**options)
