"""A conversion in a process of its own, and both ends of what it prints.

A line of JSON on standard output says how many bytes of its source are done, and of how many; other lines are a
library's. The last line on standard error says why it failed.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO, Final

from adapters.contract import ModelRefused, OutOfMemory, Progress, RuntimeFailed
from adapters.source_meter import say_bytes

# What is said is said again, as silence would be a hang (ADR 0107). Not tuned.
_SAID_EVERY_S: Final = 1.0
_REFUSED, _DISK_FULL, _NO_MEMORY = 1, 3, 4  # exit codes of the process, for this module alone
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_ENDED_BY_OTHERS: Final = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


def print_bytes(done: int, total: int) -> None:
    """Tell the process that waits for this one how many bytes of the source are done."""
    print(json.dumps([done, total]), flush=True)  # noqa: T201


def end_conversion(convert: Callable[[], None]) -> int:
    """Run a conversion in the process that was started for it; returns its exit status."""
    try:
        convert()
    except ModelRefused as error:
        sys.stderr.write(f"{error}\n")
        return _REFUSED
    except MemoryError:
        sys.stderr.write("there is no memory for it\n")
        return _NO_MEMORY
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return _DISK_FULL if isinstance(error, OSError) and error.errno in _FULL else _REFUSED
    return 0


def run_conversion(command: Sequence[str], name: str, progress: Progress) -> None:
    """Run a conversion to its end. `progress` hears every second how far it is. Raises ModelRefused with its reason,
    RuntimeFailed where somebody ended it, OutOfMemory, and OSError for a full disk."""
    stage = f"convert {name}"
    progress(stage, -1.0)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        try:
            assert process.stdout is not None  # noqa: S101  # it is a pipe
            _tell_progress(process.stdout, progress, stage)
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None  # noqa: S101
            process.stdout.close()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if status:
        raise _describe_end(status, f"{name} cannot be converted: ", lines)
    progress(stage, 1.0)


def _tell_progress(output: IO[bytes], progress: Progress, stage: str) -> None:
    """Say how far it is until the output ends; again where it says nothing for a while."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in output:
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, name="conversion", daemon=True).start()
    say, counts = say_bytes(progress, stage), (0, 0)
    while True:
        try:
            line = lines.get(timeout=_SAID_EVERY_S)
        except queue.Empty:
            line = b"\n"
        if not line:
            return
        counts = _read_bytes(line) or counts
        if counts[1]:
            say(*counts)


def _read_bytes(line: bytes) -> tuple[int, int] | None:
    try:
        done, total = json.loads(line)
        return int(done), int(total)
    except (ValueError, TypeError):
        return None


def _describe_end(status: int, failed: str, lines: Sequence[str]) -> Exception:
    if status < 0:
        by = (
            signal.Signals(-status).name
            if -status in {number.value for number in signal.Signals}
            else f"signal {-status}"
        )
        if by in _ENDED_BY_OTHERS:
            return RuntimeFailed(f"{failed}its process was ended by {by}. What it has finished is kept.")
        return ModelRefused(f"{failed}its process ended by {by}")
    reason = lines[-1] if lines else f"the converter ended with {status}"
    if status == _DISK_FULL:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OutOfMemory(f"{failed}{reason}") if status == _NO_MEMORY else ModelRefused(f"{failed}{reason}")
