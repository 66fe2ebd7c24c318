"""Where a Ray of our own keeps its sockets and logs: a directory of this user alone, removed behind it.

What a daemon left that was killed, the next one removes: whoever uses a directory holds the lock in it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from orchestrator.errors import WorkerError

_PREFIX = "outrider-ray-"
_LOCK = "lock"
_YOUNG_S = 60.0  # made, and perhaps not locked yet
_MOST_SOCKET_BYTES = 107  # of the path of a Unix socket, on Linux
_LONGEST_BELOW = "/outrider-ray-12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1"


class SessionDirectory:
    """A new directory below the first base that will do; locked until `remove`."""

    def __init__(self, bases: Iterable[Path] | None = None) -> None:
        base = _choose_base(usual_bases() if bases is None else bases)
        _remove_deserted(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = FileLock(self.path / _LOCK, thread_local=False)
        self._lock.acquire()

    def remove(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def usual_bases() -> list[Path]:
    """Return the runtime directory of the service or the user, then the temporary one, then the one of the system."""
    named = (os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0], os.environ.get("XDG_RUNTIME_DIR"))
    return [*(Path(name) for name in named if name), Path(tempfile.gettempdir()), Path("/tmp")]  # noqa: S108 -- mkdtemp


def _choose_base(bases: Iterable[Path]) -> Path:
    tried = list(bases)
    for base in tried:
        if len(os.fsencode(base)) + len(_LONGEST_BELOW) <= _MOST_SOCKET_BYTES and os.access(base, os.W_OK | os.X_OK):
            return base
    longest = _MOST_SOCKET_BYTES - len(_LONGEST_BELOW)
    raise WorkerError(
        f"no directory for Ray's sockets: {', '.join(map(str, tried))} cannot be written to, or are longer than "
        f"{longest} bytes; set XDG_RUNTIME_DIR or TMPDIR to one that is shorter"
    )


def _remove_deserted(base: Path) -> None:
    for left in base.glob(f"{_PREFIX}*"):
        with suppress(OSError, Timeout):
            if left.stat().st_uid != os.getuid() or time.time() - left.stat().st_mtime < _YOUNG_S:
                continue
            with FileLock(left / _LOCK, timeout=0):
                shutil.rmtree(left, ignore_errors=True)
