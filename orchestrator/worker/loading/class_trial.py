"""Tries one numerical class in a process of its own: a runtime that crashes, or keeps its memory, costs that class.

`python -m orchestrator.worker.loading.class_trial` reads a `ClassJob` as JSON from standard input and writes
the finding to standard output; its last line on standard error says why there is none.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import msgspec

from adapters import registry
from adapters.contract import AdapterError, LoadedModel, LoadOptions, ModelLoader, NumericalClass, OutOfMemory
from adapters.decoder.short_text import ShortText
from adapters.invariance import fingerprint_bits
from adapters.parent_process import end_with_parent
from device_profiles.numerical_class import ClassFinding
from orchestrator.clock import SystemClock
from orchestrator.machine.process_memory import KILLED_FOR_MEMORY, MemoryKillWatch
from orchestrator.worker.loading.child_work import OnLook, run_child
from orchestrator.worker.measuring.class_trial import try_class

_NO_MEMORY = 2
"""What the process exits with for want of memory."""


class ClassJob(msgspec.Struct, frozen=True):
    """What to try: `options.numerical_class`, on a prepared model. `only_bits`: nothing but its fingerprint. `far`: far
    positions, too."""

    adapter: str
    prepared: str
    options: LoadOptions
    text: ShortText | None = None
    only_bits: bool = False
    far: bool = True


def run_job(job: ClassJob, tried: NumericalClass, on_look: OnLook) -> ClassFinding:
    """Run a job in a process of its own. What goes wrong there is a finding that did not pass. Raises OutOfMemory: that
    says nothing of the class."""
    command = [sys.executable, "-m", "orchestrator.worker.loading.class_trial"]
    kills = MemoryKillWatch()
    end = run_child(command, msgspec.json.encode(job), on_look)
    if end.status == -signal.SIGKILL and kills.has_kill():
        raise OutOfMemory(f"trying {tried}: its process {KILLED_FOR_MEMORY}")
    if end.status == _NO_MEMORY:
        raise OutOfMemory(f"trying {tried}: {end.failure}")
    if end.failure:
        return ClassFinding(tried, False, end.failure)
    # Libraries may have said something before.
    return msgspec.json.decode(end.output.splitlines()[-1], type=ClassFinding)


def run_here(adapter: ModelLoader, job: ClassJob) -> ClassFinding:
    """Run a job in this process. Raises what adapters raise."""
    clock = SystemClock()
    started_s = clock.monotonic_s()
    model: LoadedModel = adapter.load(Path(job.prepared), job.options, lambda stage, fraction: None)
    try:
        if job.only_bits:
            return ClassFinding(model.capabilities.numerical_class, True, "", fingerprint_bits(model))
        return try_class(model, job.text, clock, clock.monotonic_s() - started_s, far=job.far)
    finally:
        model.close()


def main() -> int:
    """Do the job; 0 with the finding on standard output, 1 with the reason on standard error, or 2 where that is a want
    of memory."""
    end_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ClassJob)
    try:
        finding = run_here(registry.get_for(job.adapter, job.options.device, job.options.static), job)
    except (AdapterError, MemoryError) as error:
        sys.stderr.write(f"{str(error) or 'there is no memory for it'}\n")
        return _NO_MEMORY if isinstance(error, OutOfMemory | MemoryError) else 1
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(finding) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
