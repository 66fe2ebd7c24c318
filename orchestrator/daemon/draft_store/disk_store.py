"""Answers in a file: SQLite in WAL mode, in a thread of its own. Daemons of one host may share it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from orchestrator.clock import Clock
from orchestrator.config.draft_store import DraftStoreOptions
from orchestrator.daemon.draft_store.port import Entry, StoreFailed
from orchestrator.side_lane import SideLane

_BUSY_S = 1.0  # another daemon's write takes milliseconds. Not tuned.
_FILES = ("", "-wal", "-shm")
_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS answers (id TEXT PRIMARY KEY, at REAL NOT NULL, size INTEGER NOT NULL,
    value BLOB NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS by_time ON answers (at, size);
CREATE TABLE IF NOT EXISTS blocks (block TEXT NOT NULL, id TEXT NOT NULL REFERENCES answers ON DELETE CASCADE,
    PRIMARY KEY (block, id)) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_answer ON blocks (id);
"""
_FORGET_OLDEST = """
DELETE FROM answers WHERE id IN (
    SELECT id FROM (SELECT id, row_number() OVER latest AS place, sum(size) OVER latest AS taken FROM answers
        WINDOW latest AS (ORDER BY at DESC, rowid DESC))
    WHERE place > ? OR taken > ?)
"""
_T = TypeVar("_T")


def read_values(path: Path, since_s: float) -> list[bytes]:
    """Return the values of all answers that were kept after a time (s since the epoch), the oldest first. The file is
    only read. Raises StoreFailed."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", timeout=_BUSY_S, uri=True)) as base:
            return [
                value for (value,) in base.execute("SELECT value FROM answers WHERE at > ? ORDER BY at", (since_s,))
            ]
    except sqlite3.Error as error:
        raise StoreFailed(f"{path}: {error}") from error


class DiskDraftStore:
    """See `port.DraftStore`. A file that is no database is put aside, and a new one begun."""

    def __init__(self, path: Path, bounds: DraftStoreOptions, clock: Clock) -> None:
        self._path, self._bounds, self._clock = path, bounds, clock
        self._lane = SideLane("draft store", gives_way=False)
        self._open: sqlite3.Connection | None = None

    async def find_answers(self, blocks: Sequence[str], least: int, most: int) -> list[bytes]:
        return await self._do(lambda base: self._find(base, blocks, least, most))

    async def keep(self, entry: Entry) -> None:
        await self._do(lambda base: self._keep(base, entry))

    async def close(self) -> None:
        with suppress(StoreFailed):
            await asyncio.wrap_future(self._lane.submit(self._close))

    async def _do(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return await asyncio.wrap_future(self._lane.submit(self._work, work))

    def _work(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Do a piece of work on the open file, in the lane's thread. Raises StoreFailed."""
        try:
            return work(self._connect())
        except sqlite3.OperationalError as error:  # busy, full, or not to be opened: the file may be good
            self._close()
            raise StoreFailed(f"{self._path.name}: {error}") from error
        except sqlite3.DatabaseError as error:
            self._close()
            self._put_aside()
            raise StoreFailed(f"{self._path.name}: {error}; it was put aside") from error
        except OSError as error:
            raise StoreFailed(f"{self._path.name}: {error.strerror}") from error

    def _connect(self) -> sqlite3.Connection:
        if self._open is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite's other files take its mode
            base = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                base.executescript(_TABLES)
            except sqlite3.Error:
                base.close()
                raise
            self._open = base
        return self._open

    def _close(self) -> None:
        base, self._open = self._open, None
        if base is not None:
            with suppress(sqlite3.Error):
                base.close()

    def _put_aside(self) -> None:
        for end in _FILES:
            with suppress(OSError):
                os.replace(f"{self._path}{end}", f"{self._path}.damaged{end}")

    def _find(self, base: sqlite3.Connection, blocks: Sequence[str], least: int, most: int) -> list[bytes]:
        marks = ",".join("?" * len(blocks))
        query = (
            "SELECT value FROM answers JOIN (SELECT id, count(*) AS shared FROM blocks "  # noqa: S608 -- only marks
            f"WHERE block IN ({marks}) GROUP BY id) USING (id) WHERE at > ? AND shared >= ? "
            "ORDER BY shared DESC, at DESC LIMIT ?"
        )
        oldest_s = self._clock.wall_s() - self._bounds.expire_s
        with closing(base.execute(query, (*blocks, oldest_s, least, most))) as rows:
            return [value for (value,) in rows]

    def _keep(self, base: sqlite3.Connection, entry: Entry) -> None:
        now_s, bounds = self._clock.wall_s(), self._bounds
        base.execute("BEGIN IMMEDIATE")
        try:
            base.execute("DELETE FROM answers WHERE id = ? OR at <= ?", (entry.entry_id, now_s - bounds.expire_s))
            base.execute(
                "INSERT INTO answers VALUES (?, ?, ?, ?)", (entry.entry_id, now_s, len(entry.value), entry.value)
            )
            rows = [(block, entry.entry_id) for block in entry.blocks]
            base.executemany("INSERT OR IGNORE INTO blocks VALUES (?, ?)", rows)
            count, size_bytes = base.execute("SELECT count(*), sum(size) FROM answers").fetchone()
            if count > bounds.max_entries or size_bytes > bounds.max_size:
                base.execute(_FORGET_OLDEST, (bounds.max_entries, bounds.max_size))
            base.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                base.execute("ROLLBACK")
            raise
