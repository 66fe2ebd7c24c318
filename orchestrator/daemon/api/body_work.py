"""Work on bodies off the event loop, and bodies that ended the daemon meanwhile.

Tokenising and compiling give up the GIL; parsing and templates do not, so their size is bounded before (body_bounds).

Each body is noted in a file of the state directory while it is parsed, rendered and tokenised, and crossed out behind
that. The file is mapped into memory: a note costs no system call, and outlives the process. A daemon that finds notes
counts a death for each. From then on such a body is read alone, until that has gone well once. A second death is proof.

A body is known by its digest, whoever sends it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from adapters.boot_id import read_boot_id
from device_profiles.whole_file import replace_file
from orchestrator.clock import Clock
from orchestrator.daemon.control.health.blame import NO_RETRY
from orchestrator.daemon.control.port import QuarantinedView
from orchestrator.errors import RequestError
from orchestrator.side_lane import SideLane
from orchestrator.telemetry import get_logger

# ADR 0047: what is parsed and tokenised within some milliseconds is small.
LARGE_BYTES = 32 * 1024
# ADR 0099: a small body that takes a second lets those behind it go on.
PATIENCE_S = 1.0
BODY_TURN = "the body's turn to be translated"
_T = TypeVar("_T")
PROOF: Final = 2
"""So many deaths in a row, the last of them alone. ADR 0099."""
CAUSE: Final = "the daemon itself ended while it read this request"
_FORGET_S: Final = 3600.0  # as in control.health.blame: an hour. Not tuned.
_SLOTS: Final = 64  # as many as there may be threads that read bodies, and more
_SLOT_BYTES: Final = 256  # two digests and a request's id. Any that holds them does.
_DIGEST_BYTES: Final = 8
_FREE: Final = b"\0" * (2 * _DIGEST_BYTES)  # no digest
_MOST_ID_BYTES: Final = _SLOT_BYTES - len(_FREE)
_log = get_logger(__name__)


class WorkLanes:
    """Runs work for at most `timeout_s`, the wait for its turn included. Small bodies do not wait behind large ones."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._small = SideLane("small bodies", gives_way=False)
        self._large = SideLane("large bodies", gives_way=True)

    async def do(self, size_bytes: int, work: Callable[..., _T], *arguments: object) -> _T:
        """Return the result of work on so many bytes. Raises RequestError 429 where its turn does not come in time,
        400 where it takes too long, and whatever the work raises. Work that nobody waits for never begins."""
        lane = self._large if size_bytes > LARGE_BYTES else self._small
        task = lane.submit(work, *arguments)
        # What is small and takes long is no reason for others to wait.
        going_on = lane.going_on(task, PATIENCE_S) if lane is self._small else nullcontext()
        try:
            with going_on:
                async with asyncio.timeout(self.timeout_s):
                    return await asyncio.wrap_future(task)
        except TimeoutError:
            if not task.cancelled():
                lane.leave_behind(task)
                raise RequestError(
                    f"this body takes longer than {self.timeout_s:g} s to translate; send a smaller one",
                    code="body_too_slow",
                ) from None
            raise miss_turn(BODY_TURN, self.timeout_s, self.timeout_s / 2) from None


def miss_turn(what: str, waited_s: float, retry_after_s: float) -> RequestError:
    """Return what a request is told whose turn did not come in time: that it may be sent again."""
    return RequestError(
        f"{what} did not come within {waited_s:.3g} s; send it again",
        status=HTTPStatus.TOO_MANY_REQUESTS,
        code="translation_timeout",
        retry_after_s=max(1, math.ceil(retry_after_s)),
    )


class _Suspect(msgspec.Struct):
    """A body that was in hand when the daemon died, so many times in a row. Time: since 1970."""

    deaths: int
    request_id: str
    last_s: float


class _Convict(msgspec.Struct, frozen=True):
    """A body that is refused. Times: since 1970."""

    request_id: str
    deaths: int
    since_s: float
    until_s: float


class _Record(msgspec.Struct):
    """What is kept in the file, by digest. `boot`: the boot that notes are of, as a loss of power is nobody's doing."""

    boot: str = ""
    suspects: dict[str, _Suspect] = {}
    convicts: dict[str, _Convict] = {}


@dataclass(slots=True, eq=False)
class _Turns:
    """How many bodies are being read, and whether one of them is read alone, or waits for that."""

    reading: int = 0
    alone: bool = False
    waiting_alone: int = 0


class DeadlyBodies:
    """What is known of such bodies. Threads may share it. Without a directory nothing is ever noted."""

    def __init__(self, directory: Path | None, clock: Clock, quarantine_s: float) -> None:
        self._directory = directory
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._record = _Record()
        self._notes: mmap.mmap | None = None
        self._free = list(range(_SLOTS))
        self._turns = _Turns()
        self._changing = threading.Condition()

    def open(self) -> None:
        """Count what the last daemon died of, and begin to take notes; where that is not possible, the log says so."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._record = self._read_record()
            self._count_deaths(self._read_notes())
            self._notes = self._map_notes()
        except OSError as error:
            _log.warning("a request that ends the daemon will not be found out", reason=error.strerror)

    def close(self) -> None:
        """Take no more notes: the daemon ends in order. Idempotent."""
        with self._changing:
            if self._notes is not None:
                self._notes.close()
                self._notes = None
                with suppress(OSError):
                    self._notes_path.unlink()

    @contextmanager
    def hold(self, route: str, raw: bytes, request_id: str, wait_s: float) -> Iterator[None]:
        """Have a note of a body while it is read, in this thread. Raises RequestError 422 for one that is refused, and
        429 where a body that is read alone leaves no turn within `wait_s`."""
        if self._directory is None:
            yield
            return
        digest = hashlib.blake2b(route.encode() + b"\0" + raw, digest_size=_DIGEST_BYTES).hexdigest()
        self._refuse(digest)
        alone = self._begin(digest, max(0.0, wait_s))
        slot = self._note(digest, request_id)
        try:
            yield
        finally:
            self._cross_out(slot)
            self._end(digest, alone=alone)

    def list_quarantined(self) -> list[QuarantinedView]:
        """Return the bodies that are refused now. Their number of tokens is not known."""
        with self._changing:
            known = list(self._record.convicts.items())
        now_s = self._clock.wall_s()
        return [
            QuarantinedView(
                digest, convict.request_id, 0, convict.deaths, CAUSE, since_s=convict.since_s, until_s=convict.until_s
            )
            for digest, convict in known
            if convict.until_s > now_s
        ]

    def release(self, digests: Iterable[str]) -> list[str]:
        with self._changing:
            released = [digest for digest in digests if self._record.convicts.pop(digest, None) is not None]
            if released:
                self._write_record()
        return released

    def _refuse(self, digest: str) -> None:
        convict = self._record.convicts.get(digest)
        now_s = self._clock.wall_s()
        if convict is None or convict.until_s <= now_s:
            return
        minutes = max(1, round((convict.until_s - now_s) / 60.0))
        raise RequestError(
            f"this request ended the server {convict.deaths} times while it was read; it is refused for {minutes} "
            f"minutes (`outrider quarantine release {digest}` lets it run again)",
            status=422,
            code="request_quarantined",
            headers=NO_RETRY,
        )

    def _begin(self, digest: str, wait_s: float) -> bool:
        """Wait for a body's turn; returns whether it is read alone. Raises RequestError 429."""
        turns = self._turns
        with self._changing:
            alone = digest in self._record.suspects
            if alone:
                turns.waiting_alone += 1
                try:
                    came = self._changing.wait_for(lambda: not turns.reading, wait_s)
                finally:
                    turns.waiting_alone -= 1
                turns.alone = turns.alone or came
            else:
                came = self._changing.wait_for(lambda: not (turns.alone or turns.waiting_alone), wait_s)
            if not came:
                self._changing.notify_all()  # those that let it go first need not any more
                raise miss_turn(BODY_TURN, wait_s, wait_s)
            turns.reading += 1
        return alone

    def _end(self, digest: str, *, alone: bool) -> None:
        """The daemon has outlived it: it is no cause of deaths."""
        with self._changing:
            self._turns.reading -= 1
            if alone:
                self._turns.alone = False
                self._record.suspects.pop(digest, None)
                self._write_record()
            self._changing.notify_all()

    def _note(self, digest: str, request_id: str) -> int | None:
        with self._changing:
            if self._notes is None or not self._free:
                return None
            slot = self._free.pop()
            begin = slot * _SLOT_BYTES
            named = request_id.encode("ascii", "replace")[:_MOST_ID_BYTES]
            self._notes[begin + len(_FREE) : begin + _SLOT_BYTES] = named.ljust(_MOST_ID_BYTES, b"\0")
            self._notes[begin : begin + len(_FREE)] = digest.encode()
            return slot

    def _cross_out(self, slot: int | None) -> None:
        if slot is None:
            return
        with self._changing:
            self._free.append(slot)
            if self._notes is not None:
                self._notes[slot * _SLOT_BYTES : slot * _SLOT_BYTES + len(_FREE)] = _FREE

    def _count_deaths(self, notes: Sequence[tuple[str, str]]) -> None:
        record, now_s = self._record, self._clock.wall_s()
        record.suspects = {
            name: suspect for name, suspect in record.suspects.items() if now_s - suspect.last_s < _FORGET_S
        }
        record.convicts = {name: convict for name, convict in record.convicts.items() if convict.until_s > now_s}
        for digest, request_id in notes:
            known = record.suspects.pop(digest, None)
            deaths = 1 + (known.deaths if known is not None else 0)
            if deaths < PROOF:
                record.suspects[digest] = _Suspect(deaths, request_id, now_s)
                _log.warning("the last daemon ended while it read a request", request=request_id, digest=digest)
            else:
                until_s = now_s + self._quarantine_s
                record.convicts[digest] = _Convict(request_id, deaths, now_s, until_s)
                text = "a request has ended the daemon while it was read, and is refused"
                _log.error(text, request=request_id, digest=digest, deaths=deaths)
        self._write_record()

    def _read_notes(self) -> list[tuple[str, str]]:
        if self._record.boot != read_boot_id():
            return []
        try:
            data = self._notes_path.read_bytes()
        except FileNotFoundError:
            return []
        slots = (data[begin : begin + _SLOT_BYTES] for begin in range(0, len(data), _SLOT_BYTES))
        notes = []
        for slot in slots:
            digest = slot[: len(_FREE)].decode("ascii", "replace")
            if slot[: len(_FREE)] != _FREE and all(digit in "0123456789abcdef" for digit in digest):
                notes.append((digest, slot[len(_FREE) :].rstrip(b"\0").decode("ascii", "replace")))
        return notes

    def _map_notes(self) -> mmap.mmap:
        """Return fresh notes, whose place on the disk is taken now: a full disk stops nothing later. Raises OSError."""
        size = _SLOTS * _SLOT_BYTES
        with suppress(FileNotFoundError):
            self._notes_path.unlink()
        descriptor = os.open(self._notes_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def _read_record(self) -> _Record:
        try:
            return msgspec.json.decode(self._record_path.read_bytes(), type=_Record)
        except FileNotFoundError:
            return _Record()
        except msgspec.MsgspecError as error:
            _log.warning("the record of requests that ended the daemon is lost", reason=str(error))
            return _Record()

    def _write_record(self) -> None:
        if self._directory is None:
            return
        self._record.boot = read_boot_id()
        try:
            with replace_file(self._record_path) as file:
                file.write(msgspec.json.encode(self._record))
        except OSError as error:
            _log.warning("the record of requests that ended the daemon cannot be written", reason=error.strerror)

    @property
    def _notes_path(self) -> Path:
        assert self._directory is not None  # noqa: S101 -- nothing is read or written without one
        return self._directory / "in-hand"

    @property
    def _record_path(self) -> Path:
        assert self._directory is not None  # noqa: S101
        return self._directory / "deaths.json"
