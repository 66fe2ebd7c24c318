"""The lease of a state directory: one daemon at a time has it. The kernel takes it back when that one dies."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.durable import is_full
from orchestrator.errors import DaemonError

_FILE = "lease"

_log = logging.getLogger(__name__)


@contextmanager
def hold_lease(directory: Path) -> Iterator[Path]:
    """Hold the directory, made for this user alone; yields it. Raises DaemonError where another daemon has it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not inherited: a worker that outlives this daemon does not keep the next one out.
        lease = os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        way_out = "make room on that disk" if is_full(error) else "set state.directory to one that this user owns"
        raise DaemonError(f"{directory}: {error.strerror}; {way_out}") from error
    try:
        _lock(lease, directory)
        _write_holder(lease, directory)
        yield directory
    finally:
        os.close(lease)


def _write_holder(lease: int, directory: Path) -> None:
    """Say who has it, for whoever comes second. Written over what was there: a full disk gives nothing back."""
    holder = f"{os.getpid()}\n".encode()
    try:
        os.ftruncate(lease, os.pwrite(lease, holder, 0))
    except OSError as error:
        _log.warning("%s/%s cannot say who holds it: %s", directory, _FILE, error.strerror)


def _lock(lease: int, directory: Path) -> None:
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = ""
        with suppress(OSError, ValueError):
            holder = f" (pid {int(os.pread(lease, 32, 0))})"
        way_out = "stop that one, or set state.directory"
        raise DaemonError(f"another daemon{holder} serves with the state in {directory}; {way_out}") from None
    except OSError as error:
        raise DaemonError(f"{directory}/{_FILE} cannot be locked: {error.strerror}; set state.directory") from error
