"""Trials of numerical classes. Those that passed stay in memory and are timed in turns, so that what else the machine
does decides nothing. Each has a process of its own: a runtime that crashes, or keeps its memory, costs its class.

`python -m orchestrator.worker.loading.timed_trials` reads a `ClassJob` as JSON from standard input and writes the
finding to standard output. It then answers each number of rows with the milliseconds of such a forward. Its last line
on standard error says why there is no finding.
"""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec

from adapters import registry
from adapters.contract import AdapterError, LoadedModel, LoadOptions, ModelLoader, NumericalClass, OutOfMemory, silent
from adapters.decoder.short_text import ShortText
from adapters.device_memory import read_host_memory
from adapters.invariance import fingerprint_bits
from adapters.parent_process import end_with_parent
from device_profiles.numerical_class import ClassFinding
from orchestrator.clock import SystemClock
from orchestrator.machine.process_memory import KILLED_FOR_MEMORY, MemoryKillWatch, peak_rss_bytes
from orchestrator.worker.loading.child_work import ANSWER, AnsweringChild, ChildEnd, OnLook
from orchestrator.worker.measuring.class_trial import CostMeter, time_in_turns, try_class

_NO_MEMORY = 2
"""What the process exits with for want of memory."""
_SPARE = 1.2
"""So many times what a trial took at its peak is to be free for the next one beside it. Not tuned: a class that takes
more ends by itself, and all are timed one after another then."""


class ClassJob(msgspec.Struct, frozen=True):
    """What to try: `options.numerical_class`, on a prepared model. `only_bits`: nothing but its fingerprint. `far`: far
    positions, too."""

    adapter: str
    prepared: str
    options: LoadOptions
    text: ShortText | None = None
    only_bits: bool = False
    far: bool = True


class TrialEnded(Exception):
    """A trial ended while it was timed; the message says why."""

    def __init__(self, trial: ClassTrial, why: str) -> None:
        super().__init__(why)
        self.trial = trial


class ClassTrial(Protocol):
    """A class that was tried, and its model. `needed_bytes`: what another one takes beside it."""

    finding: ClassFinding

    @property
    def needed_bytes(self) -> float: ...

    def measure_ms(self, rows: int) -> float:
        """See CostMeter.measure_ms. Raises TrialEnded, OutOfMemory."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class TrialHere:
    """Implements ClassTrial in this process, where none is beside it. Raises what adapters raise."""

    needed_bytes = math.inf

    def __init__(self, adapter: ModelLoader, job: ClassJob) -> None:
        clock = SystemClock()
        started_s = clock.monotonic_s()
        model: LoadedModel = adapter.load(Path(job.prepared), job.options, silent)
        self._model, self._meter = model, CostMeter(model, clock)
        try:
            if job.only_bits:
                self.finding = ClassFinding(model.capabilities.numerical_class, True, "", fingerprint_bits(model))
            else:
                finding = try_class(model, job.text, clock.monotonic_s() - started_s, far=job.far)
                prompt_tokens = self._meter.prompt_tokens if finding.passed else 0
                self.finding = replace(finding, prefill_tokens=prompt_tokens)
        except BaseException:
            self.close()
            raise

    def measure_ms(self, rows: int) -> float:
        return self._meter.measure_ms(rows)

    def close(self) -> None:
        self._model.close()


def try_apart(job: ClassJob, tried: NumericalClass, on_look: OnLook) -> ClassTrial:
    """Run a job in a process of its own. What goes wrong there is a finding that did not pass. Raises OutOfMemory: that
    says nothing of the class."""
    return _TrialApart(job, tried, on_look)


class _TrialApart:
    """Implements ClassTrial in a process of its own."""

    def __init__(self, job: ClassJob, tried: NumericalClass, on_look: OnLook) -> None:
        self._tried = tried
        self._kills = MemoryKillWatch()
        self._child = AnsweringChild([sys.executable, "-m", "orchestrator.worker.loading.timed_trials"], on_look)
        try:
            answer = self._ask(msgspec.json.encode(job))
        except OutOfMemory:
            self.close()
            raise
        failed = ClassFinding(tried, False, answer.failure)
        self.finding = failed if answer.failure else msgspec.json.decode(answer.output, type=ClassFinding)

    @property
    def needed_bytes(self) -> float:
        return _SPARE * peak_rss_bytes(self._child.pid)

    def measure_ms(self, rows: int) -> float:
        answer = self._ask(b"%d" % rows)
        if answer.failure:
            raise TrialEnded(self, answer.failure)
        return float(answer.output)

    def _ask(self, question: bytes) -> ChildEnd:
        """Raises OutOfMemory."""
        end = self._child.ask_question(question)
        if end.status == -signal.SIGKILL and self._kills.has_kill():
            raise OutOfMemory(f"trying {self._tried}: its process {KILLED_FOR_MEMORY}")
        if end.status == _NO_MEMORY:
            raise OutOfMemory(f"trying {self._tried}: {end.failure}")
        return end

    def close(self) -> None:
        self._child.close()


class TimedTrials:
    """What came of classes, in the order in which they were tried. Those that passed are `open` until they are timed,
    by their places."""

    def __init__(self) -> None:
        self.findings: list[ClassFinding] = []
        self._open: dict[int, ClassTrial] = {}

    @property
    def any_passed(self) -> bool:
        return any(finding.passed for finding in self.findings)

    def add(self, trial: ClassTrial) -> None:
        self._open[len(self.findings)] = trial
        self.findings.append(trial.finding)
        if not trial.finding.passed:
            self._open.popitem()[1].close()

    def leave_room(self) -> bool:
        """Return whether there is memory for one more beside those that are open."""
        needed = max((trial.needed_bytes for trial in self._open.values()), default=0.0)
        return needed <= read_host_memory().free_bytes

    def time_open(self) -> None:
        """Time those that are open in turns, and end them. One that ends meanwhile has not passed. Raises
        OutOfMemory."""
        while self._open:
            places, trials = zip(*self._open.items(), strict=True)
            try:
                costs = time_in_turns([trial.measure_ms for trial in trials])
            except TrialEnded as end:
                place = places[trials.index(end.trial)]
                self.findings[place] = replace(self.findings[place], passed=False, why=str(end))
                self._open.pop(place).close()
                continue
            for place, cost in zip(places, costs, strict=True):
                self.findings[place] = replace(self.findings[place], **cost._asdict())
            self.close()

    def close(self) -> None:
        """End those that are open. Idempotent."""
        while self._open:
            self._open.popitem()[1].close()


def main() -> int:
    """Do the job, and time forwards until the input ends. Return 0, 1 with the reason on standard error, or 2 where
    that is a want of memory."""
    end_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClassJob)
    try:
        trial = TrialHere(registry.get_for(job.adapter, job.options.device, job.options.static), job)
        _answer(msgspec.json.encode(trial.finding))
        for line in sys.stdin.buffer:
            _answer(b"%f" % trial.measure_ms(int(line)))
        trial.close()
    except (AdapterError, MemoryError) as error:
        sys.stderr.write(f"{str(error) or 'there is no memory for it'}\n")
        return _NO_MEMORY if isinstance(error, OutOfMemory | MemoryError) else 1
    return 0


def _answer(content: bytes) -> None:
    """Answer on a line of its own, whatever libraries have said before."""
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + ANSWER + content + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
