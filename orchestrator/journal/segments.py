"""The journal's files: segments that grow at their end. The oldest go when nothing in them is wanted any more.

A write is done before the tokens in it are sent to a client, so the daemon's own death loses nothing that anybody saw.
Where the disk fails, the service goes on without a journal, and tries again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator.journal.records import MAGIC, Record, decode_records, encode_records

_SUFFIX = ".journal"

_log = logging.getLogger(__name__)


class SegmentFiles:
    """The segments in a directory that belongs to this process alone. `number` is of the one that is written now."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = -1
        self.number = 0
        self.written_bytes = 0  # of the segment of now
        self.problem = ""

    def replay(self) -> Iterator[Record]:
        """Yield the records that earlier processes left, oldest first."""
        for number in self._list():
            try:
                data = self._path(number).read_bytes()
            except OSError as error:
                _log.warning("a part of the journal is lost: %s", error)
                continue
            yield from decode_records(data)

    def begin(self, records: Sequence[Record], *, sync: bool = False) -> None:
        """Begin a new segment with these records, on the disk already with `sync`. Where that fails, `problem` says
        why, and nothing is written."""
        self._close()
        old = self._list()
        self.number = max(old, default=self.number) + 1
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path(self.number), flags, 0o600)
            self._write(MAGIC + encode_records(records))
            if sync:
                os.fdatasync(self._descriptor)
        except OSError as error:
            self._fail(error)
            return
        if self.problem:
            _log.warning("the journal is written again: %s", self._directory)
        self.problem = ""

    def append(self, records: Sequence[Record]) -> None:
        """Write records, with one system call. What cannot be written is dropped."""
        if self._descriptor >= 0:
            try:
                self._write(encode_records(records))
            except OSError as error:
                self._fail(error)

    def drop_before(self, number: int) -> None:
        """Remove the segments before this one."""
        for old in self._list():
            if old < number:
                with suppress(OSError):
                    self._path(old).unlink()

    def sync(self) -> None:
        """Force what was written to the disk. Blocks; from any thread."""
        with suppress(OSError):
            copy = os.dup(self._descriptor)
            try:
                os.fdatasync(copy)
            finally:
                os.close(copy)

    def count_bytes(self) -> int:
        """Return what the files take."""
        found = 0
        for number in self._list():
            with suppress(OSError):
                found += self._path(number).stat().st_size
        return found

    def close(self, *, keep: bool) -> None:
        """Write no more. Without `keep` nothing is left."""
        self._close()
        if not keep:
            self.drop_before(self.number + 1)

    def _write(self, data: bytes) -> None:
        written = os.write(self._descriptor, data)
        if written < len(data):  # the disk is full just here; the next write says so
            written += os.write(self._descriptor, data[written:])
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes could be written")
        self.written_bytes += written

    def _fail(self, error: OSError) -> None:
        """Give the segment up: what stands behind a torn record is never read."""
        self._close()
        if not self.problem:
            way = "streams go on, and would not outlive the daemon"
            _log.error("the journal cannot be written: %s: %s; %s", self._directory, error.strerror or error, way)
        self.problem = str(error.strerror or error)

    def _close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1
        self.written_bytes = 0

    def _list(self) -> list[int]:
        found = []
        with suppress(OSError):
            for name in os.listdir(self._directory):
                stem = name.removesuffix(_SUFFIX)
                if stem != name and stem.isdecimal():
                    found.append(int(stem))
        return sorted(found)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}{_SUFFIX}"
