"""The journal's files: two slots whose space is allocated ahead, written in turns.

A segment begins with all that is kept, and grows by what is committed. A full one is followed by one in the other slot.
A write is done before the tokens in it are sent to a client, so the daemon's own death loses nothing that anybody saw.
A disk that others fill stops nothing that fits into the slots. Where more is wanted, they grow while there is room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.daemon.journal.records import (
    HEAD_BYTES,
    Head,
    Record,
    decode_segment,
    draw_salt,
    encode_records,
    frame_bodies,
    read_head,
)
from orchestrator.daemon.journal.slots import LEAST_SLOT_BYTES, Slot

# ADR 0106.
_SLOTS = 2
_SUFFIX = ".segment"
_FREE_SHARE = 0.25  # of a slot, for what is committed behind a beginning that was cut to fit

_log = logging.getLogger(__name__)


class SegmentFiles:
    """The segments in a directory that belongs to this process alone. `reserve_bytes` are allocated ahead.

    `written_bytes` are in the segment of now. `problem`: why nothing is written; `short`: why less is allocated than is
    to be; both "" where that is not so."""

    def __init__(self, directory: Path, reserve_bytes: int) -> None:
        self._directory = directory
        self._slots = [Slot(directory / f"{index}{_SUFFIX}", reserve_bytes // _SLOTS) for index in range(_SLOTS)]
        self._used_bytes = [0] * _SLOTS
        self._current = -1  # the slot that has all; -1: none has
        self._writes = False
        self._salt = self._number = self._limit_bytes = 0
        self.written_bytes = 0
        self.problem = ""
        self.short = ""

    @property
    def reserve_bytes(self) -> int:
        """What is to be allocated."""
        return sum(slot.wanted_bytes for slot in self._slots)

    @property
    def allocated_bytes(self) -> int:
        """What is allocated."""
        return sum(slot.allocated_bytes for slot in self._slots)

    def reserve(self) -> None:
        """Allocate what is missing of the reserve, or as much as there is; `short` says why some is missing yet."""
        size, refused = self._slots[0].wanted_bytes, ""
        while size >= LEAST_SLOT_BYTES:
            try:
                self._allocate(size)
                break
            except OSError as error:
                refused, size = refused or error.strerror or str(error), size // 2
        if refused and not self.short:
            text = "the journal has %d of the %d bytes that journal.reserve asks for in %s: %s; make room"
            _log.warning(text, self.allocated_bytes, self.reserve_bytes, self._directory, refused)
        elif self.short and not refused:
            _log.warning("the journal has its reserve again: %d bytes", self.allocated_bytes)
        self.short = refused

    def replay(self) -> list[Record]:
        """Return the records that earlier processes left, oldest first: of the last segment that began whole."""
        whole: list[tuple[int, int, list[Record]]] = []
        for index, slot in enumerate(self._slots):
            try:
                data = slot.read()
            except OSError as error:
                _log.warning("a part of the journal is lost: %s", error)
                continue
            self._used_bytes[index] = len(data.rstrip(b"\0"))
            head, records = read_head(data), decode_segment(data)
            if head is not None:
                self._number = max(self._number, head.number)
                if records is not None:
                    whole.append((head.number, index, records))
        if not whole:
            return []
        _, self._current, records = max(whole, key=lambda segment: segment[0])
        return records

    def begin(self, bodies: Sequence[bytes], choose: Callable[[int], list[bytes]], *, sync: bool = False) -> bool:
        """Begin a new segment with these records, on the disk already with `sync`. Where they do not fit and the disk
        is full, those that `choose` picks for so many bytes. Returns whether all are in it; `problem`: why none is."""
        index = (self._current + 1) % _SLOTS
        slot = self._slots[index]
        self._writes = False
        fits = True
        try:
            try:
                self._write_beginning(index, bodies)
            except OSError:
                chosen = choose(int(slot.allocated_bytes * (1.0 - _FREE_SHARE)) - HEAD_BYTES)
                if len(chosen) == len(bodies):
                    raise
                fits = False
                self._write_beginning(index, chosen)
            if sync:
                slot.sync()
        except OSError as error:
            self.give_up(error)
            return False
        self._retire(index)
        if self.problem:
            _log.warning("the journal is written again: %s", self._directory)
        self.problem, self._writes = "", True
        return fits

    def append(self, records: Sequence[Record]) -> bool:
        """Write records, with one system call; False where the segment is full: what is kept is to begin a new one.
        Where nothing can be written they are dropped."""
        if not self._writes:
            return True
        data = encode_records(records, self._salt)
        if self.written_bytes + len(data) > self._limit_bytes:
            return False
        try:
            self._slots[self._current].write(data, self.written_bytes)
        except OSError:
            return False
        self.written_bytes += len(data)
        self._used_bytes[self._current] = max(self._used_bytes[self._current], self.written_bytes)
        return True

    def sync(self) -> OSError | None:
        """Force what was written to the disk; returns why that failed. Blocks; from any thread."""
        try:
            if self._writes:
                self._slots[self._current].sync()
        except OSError as error:
            return error
        return None

    def give_up(self, error: OSError) -> None:
        """Write nothing for now. What stands behind a torn record would never be read."""
        self._writes = False
        if not self.problem:
            way = "streams go on, and would not outlive the daemon"
            _log.error("the journal cannot be written: %s: %s; %s", self._directory, error.strerror or error, way)
        self.problem = str(error.strerror or error)

    def close(self, *, keep: bool) -> None:
        """Write no more. Without `keep` nothing that was written is left. The reserve stays for the next daemon."""
        self._writes = False
        if not keep:
            self._retire(-1)
        for slot in self._slots:
            slot.close()

    def _allocate(self, size: int) -> None:
        """Let each slot have so many bytes, or leave them as they are: one alone is of no use. Raises OSError."""
        for slot in self._slots:
            slot.open()
        before = [
            max(slot.allocated_bytes, slot.found_bytes, used)
            for slot, used in zip(self._slots, self._used_bytes, strict=True)
        ]
        try:
            for slot in self._slots:
                slot.allocate(size)
        except OSError:
            for slot, had in zip(self._slots, before, strict=True):
                slot.give_back(had)
            raise

    def _write_beginning(self, index: int, bodies: Sequence[bytes]) -> None:
        slot, salt, number = self._slots[index], draw_salt(), self._number + 1
        snapshot = frame_bodies(bodies, salt)
        data = Head(number, salt, len(snapshot)).encode() + snapshot
        self._used_bytes[index] = max(self._used_bytes[index], len(data))
        slot.write(data, 0)
        self._salt, self._number, self.written_bytes = salt, number, len(data)
        self._limit_bytes = max(slot.allocated_bytes, 2 * len(data), slot.wanted_bytes)

    def _retire(self, current: int) -> None:
        """From here on this slot has all: leave nothing in the others."""
        self._current = current
        for index, slot in enumerate(self._slots):
            if index != current:
                slot.clear(self._used_bytes[index])
                self._used_bytes[index] = 0
