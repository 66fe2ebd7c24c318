"""Files and batches in the daemon's state directory, within bounds. A record is replaced as a whole, or not at all.

A file's bytes are there before its record is: bytes without a record belong to a batch that lives, or to nobody.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from device_profiles.whole_file import replace_file
from orchestrator.clock import Clock
from orchestrator.config.model import BatchesSection
from orchestrator.daemon.api.batches.records import BatchRecord, CreateBatch, FileRecord
from orchestrator.durable import has_room, is_full, sync_directory
from orchestrator.errors import RequestError
from orchestrator.telemetry import get_logger

_Record = TypeVar("_Record", FileRecord, BatchRecord)
_ID_BYTES = 12
_MAX_NAME = 255  # Linux's for a file's name
# ADR 0106: left free on the disk. Not tuned.
_ROOM_BYTES = 1024 * 1024

_log = get_logger(__name__)


class BatchStore:
    """What is kept for all owners. Only its own daemon writes into the directory."""

    def __init__(self, directory: Path, limits: BatchesSection, clock: Clock) -> None:
        self.limits = limits
        self._directory = directory
        self._clock = clock
        self.files: dict[str, FileRecord] = {}
        self.batches: dict[str, BatchRecord] = {}

    def open(self) -> None:
        """Read what earlier daemons left, and remove what belongs to nobody. On a disk that is full there may be
        nothing yet; the first upload tries again. Raises OSError."""
        try:
            self._make_directory()
        except OSError as error:
            if not is_full(error):
                raise
            _log.warning("files of batches cannot be kept yet", directory=str(self._directory), reason=error.strerror)
            return
        self.files = _read_records(self._directory, "file-*.json", FileRecord)
        self.batches = _read_records(self._directory, "batch_*.json", BatchRecord)
        live = [batch for batch in self.batches.values() if batch.live]
        wanted = set(self.files) | {batch.id for batch in live}
        for path in self._directory.iterdir():
            name = path.name.partition(".")[0]
            if path.suffix == ".new" or (path.suffix in (".jsonl", ".lock") and name not in wanted):
                path.unlink(missing_ok=True)
        self.expire()

    def _make_directory(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path_of(self, name: str) -> Path:
        return self._directory / f"{name}.jsonl"

    @property
    def used_bytes(self) -> int:
        return sum(record.bytes for record in list(self.files.values()))

    def has_room(self) -> bool:
        """Whether it is worth while to try to write again. Raises OSError."""
        return has_room(self._directory, _ROOM_BYTES)

    def find_file(self, file_id: str, owner: str) -> FileRecord:
        """Return a file of this owner's. Raises RequestError 404."""
        record = self.files.get(file_id)
        if record is None or record.owner != owner:
            raise _not_found(f"there is no file '{file_id[:80]}'", "file_id")
        return record

    def find_batch(self, batch_id: str, owner: str) -> BatchRecord:
        """Return a batch of this owner's. Raises RequestError 404."""
        record = self.batches.get(batch_id)
        if record is None or record.owner != owner:
            raise _not_found(f"there is no batch '{batch_id[:80]}'", "batch_id")
        return record

    @contextmanager
    def receive_file(self) -> Iterator[Receiving]:
        """Yield what takes a file's bytes. They are gone in the end unless it was kept. Raises RequestError."""
        self.expire()
        if len(self.files) >= self.limits.max_files:
            text = f"there are {len(self.files)} files, as many as may be (batches.max_files); delete some"
            raise RequestError(text, code="files_full")
        file_id = f"file-{secrets.token_hex(_ID_BYTES)}"
        path = self._directory / f"{file_id}.jsonl.new"
        with _refusing():
            self._make_directory()
            with open(path, "xb", opener=_open_private) as file:
                try:
                    yield Receiving(self, file_id, file)
                finally:
                    path.unlink(missing_ok=True)

    def add_file(self, file_id: str, owner: str, filename: str, purpose: str, fresh: Path) -> FileRecord:
        """Keep bytes that are on the disk at `fresh`, under their own name. Idempotent."""
        now = int(self._clock.wall_s())
        if fresh.exists():
            fresh.replace(self.path_of(file_id))
        size = self.path_of(file_id).stat().st_size
        record = FileRecord(file_id, owner, filename[:_MAX_NAME], purpose, size, now, now + int(self.limits.keep_s))
        self.save(record)
        self.files[file_id] = record
        return record

    def delete_file(self, file_id: str, owner: str) -> None:
        """Forget a file. Raises RequestError 404, or 409 where a batch reads it."""
        self.find_file(file_id, owner)
        if any(batch.live and batch.input_file_id == file_id for batch in self.batches.values()):
            text = f"'{file_id}' is the input of a batch that runs; cancel that first"
            raise RequestError(text, status=HTTPStatus.CONFLICT, code="file_in_use", param="file_id")
        self._forget(self.files, file_id)

    def add_batch(self, batch: BatchRecord) -> None:
        """Keep a new batch. Raises RequestError 429 where there are too many that run."""
        self.expire()
        while len(self.batches) >= self.limits.max_batches:
            ended = next((batch.id for batch in self.batches.values() if not batch.live), None)
            if ended is None:
                text = f"{len(self.batches)} batches run or wait, as many as may be (batches.max_batches)"
                raise RequestError(text, status=429, code="batches_full", retry_after_s=60)
            self._forget(self.batches, ended)
        with _refusing():
            self.save(batch)
        self.batches[batch.id] = batch

    def expire(self) -> None:
        now = self._clock.wall_s()
        reads = {batch.input_file_id for batch in self.batches.values() if batch.live}
        for file in list(self.files.values()):
            if file.expires_at < now and file.id not in reads:
                self._forget(self.files, file.id)
        for batch in list(self.batches.values()):
            if not batch.live and batch.created_at + self.limits.keep_s < now:
                self._forget(self.batches, batch.id)

    def _forget(self, records: dict[str, Any], name: str) -> None:
        """Remove the record first: bytes without one belong to nobody."""
        del records[name]
        (self._directory / f"{name}.json").unlink(missing_ok=True)
        self.path_of(name).unlink(missing_ok=True)
        self.path_of(name).with_suffix(".jsonl.lock").unlink(missing_ok=True)

    def save(self, record: FileRecord | BatchRecord) -> None:
        """Write a record. Raises OSError."""
        with replace_file(self._directory / f"{record.id}.json", 0o600, sync=True) as file:
            file.write(msgspec.json.encode(record))
        sync_directory(self._directory)


class Receiving:
    def __init__(self, store: BatchStore, file_id: str, file: BinaryIO) -> None:
        self._store = store
        self._id = file_id
        self._file = file
        self._size = 0

    def take(self, data: bytes) -> None:
        """Write more of it. Raises RequestError 413 where it gets too large, 400 where there is no room."""
        limits = self._store.limits
        self._size += len(data)
        if self._size > limits.max_file:
            text = f"the file is larger than {limits.max_file} bytes (batches.max_file)"
            raise RequestError(text, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE, code="file_too_large", param="file")
        if self._store.used_bytes + self._size > limits.max_storage:
            text = f"files would take more than {limits.max_storage} bytes (batches.max_storage); delete some"
            raise RequestError(text, code="storage_full", param="file")
        with _refusing():
            self._file.write(data)

    def keep(self, owner: str, filename: str, purpose: str) -> FileRecord:
        """Force it to the disk and keep it. Blocks."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._store.add_file(self._id, owner, filename, purpose, Path(self._file.name))


def build_batch(body: CreateBatch, owner: str, now: int, window_s: int) -> BatchRecord:
    output, error = (f"file-{secrets.token_hex(_ID_BYTES)}" for _ in range(2))
    return BatchRecord(
        f"batch_{secrets.token_hex(_ID_BYTES)}",
        owner,
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        now,
        now + window_s,
        output,
        error,
        metadata=body.metadata,
    )


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse what cannot be written. Raises RequestError: 507 where the disk is full, which a client may try again."""
    try:
        yield
    except OSError as error:
        status = HTTPStatus.INSUFFICIENT_STORAGE if is_full(error) else HTTPStatus.INTERNAL_SERVER_ERROR
        code = "storage_full" if is_full(error) else None
        text = f"the server cannot keep it: {error.strerror}"
        raise RequestError(text, status=status, code=code) from error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _read_records(directory: Path, pattern: str, kind: type[_Record]) -> dict[str, _Record]:
    records = []
    for path in directory.glob(pattern):
        with suppress(FileNotFoundError):
            try:
                records.append(msgspec.json.decode(path.read_bytes(), type=kind))
            except (msgspec.MsgspecError, OSError) as error:
                _log.warning("a record of batches cannot be read", file=str(path), reason=str(error))
    return {record.id: record for record in sorted(records, key=lambda record: (record.created_at, record.id))}


def _not_found(message: str, param: str) -> RequestError:
    return RequestError(message, status=HTTPStatus.NOT_FOUND, code="not_found", param=param)
