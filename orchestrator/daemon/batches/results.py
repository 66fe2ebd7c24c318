"""The output of a batch: one line a result, written once, at the end of the file, by one process at a time.

A line is written with one system call. Lines are forced to the disk in groups. A process that is killed leaves at most
one torn line, the last, which the next run takes away.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from orchestrator.daemon.batches.lines import BatchError, NoRoom
from orchestrator.durable import is_full
from orchestrator.json_lines import escape_line_ends

# ADR 0054: what a loss of power may cost to compute again.
SYNC_EVERY_S = 0.5
_READ_BYTES = 1 << 20  # of one read. Not tuned.


class ResultFile:
    """An output file that this process has locked. `done`: the ids of the results in it, and which have an error."""

    def __init__(self, path: Path, descriptor: int, done: dict[str, bool], size: int) -> None:
        self.path = path
        self.done = done
        self.size = size
        self.failed = sum(done.values())
        self._descriptor = descriptor
        self._unsynced = False

    def append(self, result: Mapping[str, Any]) -> None:
        """Write a result, unless it is there. Raises BatchError where that is not possible."""
        if result["id"] in self.done:
            return
        data = encode_line(result)
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            raise _name_problem(error)(f"{self.path}: cannot be written: {error.strerror}") from error
        if written < len(data):
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            raise NoRoom(f"{self.path}: cannot be written: no space left on the device")
        self.size += written
        self.done[result["id"]] = has_failed(result)
        self.failed += self.done[result["id"]]
        self._unsynced = True

    def sync(self) -> None:
        """Force what was written to the disk. Raises BatchError where that fails."""
        if self._unsynced:
            self._unsynced = False
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                raise _name_problem(error)(f"{self.path}: cannot be forced to the disk: {error.strerror}") from error

    async def keep_synced(self) -> None:
        """Force what was written to the disk, again and again, off the event loop."""
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            await asyncio.to_thread(self.sync)


@contextmanager
def open_results(path: Path, known: frozenset[str]) -> Iterator[ResultFile]:
    """Lock an output file and repair its torn last line. `known`: the ids that its results may have.

    Raises BatchError where another run has it, or it holds anything else than results of this input.
    """
    path = path.resolve()
    lock = FileLock(f"{path}.lock", mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BatchError(f"{path}: another run writes it now; wait for its end, or name another output") from None
    except OSError as error:
        raise _name_problem(error)(f"{path}: cannot be locked: {error.strerror}") from error
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _name_problem(error)(f"{path}: cannot be written: {error.strerror}") from error
        try:
            done, size = _recover(path, descriptor, known)
            results = ResultFile(path, descriptor, done, size)
            yield results
            results.sync()
        finally:
            os.close(descriptor)
    finally:
        lock.release()


def read_results(path: Path) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the whole results of an output that nobody writes, each with whether it is an error line."""
    with path.open("rb") as file:
        for raw in file:
            result = _decode(raw) if raw.endswith(b"\n") else None
            if result is not None:
                yield result, has_failed(result)


def encode_line(result: Mapping[str, Any]) -> bytes:
    """Return a result as a line of UTF-8. Half a surrogate pair, which UTF-8 cannot write, stays escaped, and so does
    what readers of lines take for the end of one."""
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    try:
        return escape_line_ends(text.encode()) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(result, separators=(",", ":")).encode() + b"\n"


def has_failed(result: Mapping[str, Any]) -> bool:
    """Return whether a result is an error line."""
    return result.get("error") is not None


def _name_problem(error: OSError) -> type[BatchError]:
    return NoRoom if is_full(error) else BatchError


def _recover(path: Path, descriptor: int, known: frozenset[str]) -> tuple[dict[str, bool], int]:
    """Return the results of earlier runs and the file's size, without a torn line at its end."""
    done: dict[str, bool] = {}
    size = 0
    with open(os.dup(descriptor), "rb", buffering=_READ_BYTES) as file:  # its own descriptor: closing that is harmless
        file.seek(0)
        number, torn = 0, False
        for number, raw in enumerate(file, start=1):
            if torn:
                raise BatchError(f"{path}:{number - 1}: is no result of a batch; name another output")
            if not raw.endswith(b"\n") or (result := _decode(raw)) is None:
                torn = True  # only the last line may be
                continue
            if result["id"] not in known:
                text = "is the result of another input, or that was changed; name another output"
                raise BatchError(f"{path}:{number}: {text}")
            if result["id"] in done:
                raise BatchError(f"{path}:{number}: is there twice; name another output")
            done[result["id"]] = has_failed(result)
            size += len(raw)
        if torn and number == 1 and not _looks_torn(path):
            raise BatchError(f"{path}:1: is no result of a batch; name another output")
    if torn:
        os.ftruncate(descriptor, size)
    return done, size


def _looks_torn(path: Path) -> bool:
    """Return whether a file of one broken line may be ours: nobody's other file is cut."""
    start = path.read_bytes()[:16]
    return start == b'{"id":"batch_req_'[: len(start)] or not start.strip(b"\0\n")


def _decode(raw: bytes) -> dict[str, Any] | None:
    try:
        result = json.loads(raw)
    except ValueError:
        return None
    return result if isinstance(result, dict) and isinstance(result.get("id"), str) else None
