"""Tries one numerical class in a process of its own: a runtime that crashes, or keeps its memory, costs that class.

`python -m orchestrator.loading.class_trial` reads a `ClassJob` as JSON from standard input and writes the finding to
standard output; its last line on standard error says why there is none.
"""

from __future__ import annotations

import signal
import subprocess
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
from orchestrator.measuring.class_trial import try_class
from orchestrator.workers.process_memory import KILLED_FOR_MEMORY, MemoryKillWatch

_LONGEST_S = 900.0
"""A class that was not tried by then is not taken: compilers of some devices take minutes, none takes so long."""
_NO_MEMORY = 2
"""What the process exits with for want of memory."""


class ClassJob(msgspec.Struct, frozen=True):
    """What to try: `options.numerical_class`, on a prepared model. `only_bits`: nothing but its fingerprint."""

    adapter: str
    prepared: str
    options: LoadOptions
    text: ShortText | None = None
    only_bits: bool = False


def run_job(job: ClassJob, tried: NumericalClass) -> ClassFinding:
    """Run a job in a process of its own. What goes wrong there is a finding that did not pass. Raises OutOfMemory: that
    says nothing of the class."""
    command = [sys.executable, "-m", "orchestrator.loading.class_trial"]
    kills = MemoryKillWatch()
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(job), capture_output=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ClassFinding(tried, False, f"not tried to its end in {_LONGEST_S:.0f} s")
    if done.returncode == 0:
        # Libraries may have said something before.
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=ClassFinding)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode == _NO_MEMORY or (done.returncode == -signal.SIGKILL and kills.has_kill()):
        why = said[-1] if said and done.returncode > 0 else f"its process {KILLED_FOR_MEMORY}"
        raise OutOfMemory(f"trying {tried}: {why}")
    ended = f"its process ended by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else "it failed"
    return ClassFinding(tried, False, said[-1] if said and done.returncode > 0 else ended)


def run_here(adapter: ModelLoader, job: ClassJob) -> ClassFinding:
    """Run a job in this process. Raises what adapters raise."""
    clock = SystemClock()
    started_s = clock.monotonic_s()
    model: LoadedModel = adapter.load(Path(job.prepared), job.options, lambda stage, fraction: None)
    try:
        if job.only_bits:
            return ClassFinding(model.capabilities.numerical_class, True, "", fingerprint_bits(model))
        return try_class(model, job.text, clock, clock.monotonic_s() - started_s)
    finally:
        model.close()


def main() -> int:
    """Do the job; 0 with the finding on standard output, 1 with the reason on standard error, or 2 where that is a want
    of memory."""
    end_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ClassJob)
    try:
        found = run_here(registry.get_for(job.adapter, job.options.device, job.options.static), job)
    except (AdapterError, MemoryError) as error:
        sys.stderr.write(f"{str(error) or 'there is no memory for it'}\n")
        return _NO_MEMORY if isinstance(error, OutOfMemory | MemoryError) else 1
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
