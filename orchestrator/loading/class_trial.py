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
from adapters.contract import AdapterError, LoadedModel, LoadOptions, ModelLoader, NumericalClass
from adapters.decoder.pieces import count_cores
from adapters.decoder.short_text import ShortText
from adapters.invariance import fingerprint_bits
from adapters.parent_process import end_with_parent
from device_profiles.numerical_class import ClassFinding
from orchestrator.clock import SystemClock
from orchestrator.measuring.class_trial import try_class
from orchestrator.workers.work_meter import LOOK_S, WorkMeter

_LONGEST_S = 900.0
"""Of processor time: a class that was not tried by then is not taken. Compilers of some devices take minutes, none
takes so long."""
_LONGEST_IDLE_S = 100.0
"""A trial that does nothing for so long is not taken either, before the worker itself counts as hanging."""


class ClassJob(msgspec.Struct, frozen=True):
    """What to try: `options.numerical_class`, on a prepared model. `only_bits`: nothing but its fingerprint."""

    adapter: str
    prepared: str
    options: LoadOptions
    text: ShortText | None = None
    only_bits: bool = False


def run_job(job: ClassJob, tried: NumericalClass) -> ClassFinding:
    """Run a job in a process of its own. What goes wrong there is a finding that did not pass."""
    command = [sys.executable, "-m", "orchestrator.loading.class_trial"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as trial:
        try:
            output, errors, given_up = _wait(trial, msgspec.json.encode(job))
        finally:
            trial.kill()
    if given_up:
        return ClassFinding(tried, False, given_up)
    if trial.returncode == 0:
        # Libraries may have said something before.
        return msgspec.json.decode(output.splitlines()[-1], type=ClassFinding)
    said = errors.decode(errors="replace").strip().splitlines()
    ended = f"its process ended by {signal.Signals(-trial.returncode).name}" if trial.returncode < 0 else "it failed"
    return ClassFinding(tried, False, said[-1] if said and trial.returncode > 0 else ended)


def _wait(trial: subprocess.Popen[bytes], job: bytes) -> tuple[bytes, bytes, str]:
    """Return what a trial printed, and why it is given up; "" where it came to its end. A machine that is busy with
    something else makes it take longer, and is no reason."""
    meter = WorkMeter(trial.pid)
    while True:
        try:
            return *trial.communicate(job, timeout=LOOK_S), ""
        except subprocess.TimeoutExpired:
            meter.measure()
        if meter.cpu_s > _LONGEST_S * count_cores():
            return b"", b"", f"not tried to its end in {meter.cpu_s:.0f} s of processor time"
        if meter.idle_s > _LONGEST_IDLE_S:
            return b"", b"", f"its trial did nothing for {meter.idle_s:.0f} s"


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
    """Do the job; 0 with the finding on standard output, 1 with the reason on standard error."""
    end_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ClassJob)
    try:
        found = run_here(registry.get_for(job.adapter, job.options.device, job.options.static), job)
    except (AdapterError, MemoryError) as error:
        sys.stderr.write(f"{error or 'there is no memory for it'}\n")
        return 1
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
