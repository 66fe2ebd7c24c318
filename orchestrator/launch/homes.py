"""Where a local worker is found again by the next daemon: a directory with its socket, its output and its record.

The directory of all homes belongs to one daemon at a time, which holds the lease of its state directory. Some spare
homes are made ahead, each with the block of its record: on a full disk nobody could make one.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path

import msgspec

from adapters.boot_id import read_boot_id

_SOCKET, _OUTPUT, _RECORD, _GUARD = "socket", "output", "record", "guard"
_SPARE = "spare."
_SPARES, _MOST_SPARES = 2, 8  # that are made ahead, and that are kept when workers end
# ADR 0106: a block, which the home has before it is needed.
_RECORD_BYTES = 4096
_BACKLOG = 4  # daemons that knock at a time: there is one
_STATE_FIELD, _START_FIELD = 0, 19  # of /proc/PID/stat, behind the command's name
# What an orphan may print before it waits, or loses the rest. ADR 0050. Linux's most without privileges.
_PIPE_BYTES = 1024 * 1024


class HomeRecord(msgspec.Struct, frozen=True):
    name: str
    pid: int
    birth: str
    """See `read_birth`."""
    digest: str
    """See code_version.digest_worker."""


@dataclass(frozen=True, slots=True)
class WorkerHome:
    path: Path

    def write_record(self, record: HomeRecord) -> None:
        """Say who lives here; until then nobody is looked for here. Raises OSError."""
        _write_over(self.path / _RECORD, msgspec.msgpack.encode(record))

    def read_record(self) -> HomeRecord | None:
        """Return who lives here; None where nobody does, or it cannot be read."""
        try:
            return msgspec.msgpack.decode((self.path / _RECORD).read_bytes().rstrip(b"\0"), type=HomeRecord)
        except (OSError, msgspec.MsgspecError):
            return None

    def listen(self) -> socket.socket:
        """Return a socket that listens here, for the worker to inherit. Raises OSError."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_path(self.path) as path:
                listening.bind(f"{path}/{_SOCKET}")
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
        return listening

    def connect(self) -> socket.socket:
        """Return a socket to the worker that lives here. Raises OSError: nobody does any more."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.setblocking(False)
            with _short_path(self.path) as path:
                link.connect(f"{path}/{_SOCKET}")
        except BaseException:
            link.close()
            raise
        return link

    def make_output(self) -> tuple[int, int]:
        """Return where the worker's output is read, and where it prints. Raises OSError.

        The worker can read what it prints itself: so printing goes on working while nobody else reads.
        """
        os.mkfifo(self.path / _OUTPUT, 0o600)
        reading = self.open_output()
        try:
            return reading, os.open(self.path / _OUTPUT, os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            os.close(reading)
            raise

    def open_output(self) -> int:
        """Return where the worker's output is read. Raises OSError."""
        reading = os.open(self.path / _OUTPUT, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # the user has many large pipes already
            fcntl(reading, F_SETPIPE_SZ, _PIPE_BYTES)
        return reading

    def remove(self) -> None:
        """Nobody lives here any more: it becomes a spare one, or is removed. Idempotent."""
        try:
            if len(_list_spares(self.path.parent)) < _MOST_SPARES:
                self.empty()
                self.path.rename(self.path.with_name(f"{_SPARE}{secrets.token_hex(6)}"))
                return
        except OSError:
            pass
        shutil.rmtree(self.path, ignore_errors=True)

    def empty(self) -> None:
        """Leave nothing but the block of a record. Raises OSError."""
        for name in (_SOCKET, _OUTPUT):
            (self.path / name).unlink(missing_ok=True)
        _write_over(self.path / _RECORD, b"")


def stock_spares(directory: Path) -> None:
    """Make spare homes ahead, where some are missing. Raises OSError."""
    for _ in range(_SPARES - len(_list_spares(directory))):
        spare = WorkerHome(directory / f"{_SPARE}{secrets.token_hex(6)}")
        spare.path.mkdir(mode=0o700)
        spare.empty()


def make_home(directory: Path, name: str) -> WorkerHome:
    """Make a home in the directory of all, of a spare one where there is one. Raises OSError."""
    home = WorkerHome(directory / f"{re.sub(r'[^A-Za-z0-9-]', '_', name)[:40]}.{secrets.token_hex(6)}")
    for spare in _list_spares(directory):
        with suppress(OSError):
            spare.rename(home.path)
            return home
    home.path.mkdir(mode=0o700)
    return home


def list_homes(directory: Path) -> list[WorkerHome]:
    """Return the homes in the directory of all, which is made where it is missing. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.scandir(directory) as entries:
        paths = sorted(entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(_SPARE))
        return [WorkerHome(Path(path)) for path in paths]


def read_birth(pid: int) -> str:
    """Return what no other process with this number has: the boot, and the tick in which it began. Raises OSError."""
    return f"{read_boot_id()} {_read_stat(pid)[_START_FIELD]}"


def is_alive(pid: int, birth: str) -> bool:
    """Whether the process with this number is the one that was born then, and runs."""
    try:
        return _read_stat(pid)[_STATE_FIELD] not in ("Z", "X") and read_birth(pid) == birth
    except OSError:
        return False


def kill(pid: int, birth: str) -> None:
    """Kill the process with this number, if it is the one that was born then."""
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)  # from here on the number is nobody else's
        try:
            if is_alive(pid, birth):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def kill_all(directory: Path) -> None:
    """Kill whoever lives in the directory of all homes."""
    for home in list_homes(directory):
        record = home.read_record()
        if record is not None:
            kill(record.pid, record.birth)
            home.remove()


def sum_orphans_bytes(directory: Path) -> int:
    resident_bytes = 0
    for home in list_homes(directory):
        record = home.read_record()
        if record is not None and is_alive(record.pid, record.birth):
            with suppress(OSError):
                pages = int(Path(f"/proc/{record.pid}/statm").read_text().split()[1])
                resident_bytes += pages * os.sysconf("SC_PAGE_SIZE")
    return resident_bytes


def write_guard(directory: Path, pid: int) -> None:
    """Say who guards the homes. Raises OSError."""
    _write_over(directory / _GUARD, msgspec.msgpack.encode((pid, read_birth(pid))))


def read_guard(directory: Path) -> tuple[int, str] | None:
    """Return the number and the birth of whoever guards the homes."""
    try:
        return msgspec.msgpack.decode((directory / _GUARD).read_bytes().rstrip(b"\0"), type=tuple[int, str])
    except (OSError, msgspec.MsgspecError):
        return None


def remove_guard(directory: Path) -> None:
    """Nobody guards the homes any more."""
    with suppress(OSError):
        _write_over(directory / _GUARD, b"")


def _list_spares(directory: Path) -> list[Path]:
    with os.scandir(directory) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir() and entry.name.startswith(_SPARE)]


def _write_over(path: Path, data: bytes) -> None:
    """Write a file with one system call over what was in it: its block is there already, and a full disk has no other.
    Zeros behind it do not count. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.pwrite(descriptor, data.ljust(_RECORD_BYTES, b"\0"), 0)
    finally:
        os.close(descriptor)


def _read_stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    """Name a directory so briefly that a socket in it can be named: the kernel takes 107 bytes, and directories of
    state may be longer."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)
