"""Which prepared artefacts processes use now, and when each was used last.

    root/<digest>/<recipe>-<hash>.used     locked by whoever uses that artefact; its date is that of the last use

The lock is the kernel's: it ends with the process that has it, however that dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_held: Final[dict[Path, int]] = {}
"""The open files of what this process uses, by their paths."""


def hold_use(artefact: Path) -> None:
    """Use an artefact from now on, until this process ends. Where it is being removed, wait until it is gone. Without
    effect where nothing can be written: there nothing is removed either."""
    path = _name_note(artefact)
    with suppress(OSError):
        if path not in _held:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            _held[path] = descriptor
        os.utime(path)


@contextmanager
def claim_unused(artefact: Path) -> Iterator[bool]:
    """Keep others from using an artefact for a moment; false where a process uses it. Raises OSError."""
    descriptor = os.open(_name_note(artefact), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def is_used(artefact: Path) -> bool:
    """Return whether a process uses an artefact now. Raises OSError."""
    if not _name_note(artefact).exists():
        return False
    with claim_unused(artefact) as is_unused:
        return not is_unused


def find_used_s(artefact: Path) -> float:
    """Return when an artefact was used last, in seconds since the epoch; where that is not known, when it was made."""
    for path in (_name_note(artefact), artefact):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _name_note(artefact: Path) -> Path:
    return artefact.with_name(f"{artefact.name}.used")
