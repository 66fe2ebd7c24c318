"""Memory that the daemon and its workers on one host share, for KV pages that move from one worker to another.

The daemon makes it, without a name in any directory, and workers open it through the daemon's descriptors in /proc. So
it is gone as soon as nobody has it open any more, whoever has died. Linux only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

from orchestrator.errors import OutriderError
from orchestrator.protocol.commands import SharedMemory

_NUMBERS = count()


class SharedMemoryFailed(OutriderError):
    """Shared memory could not be made, opened, written or read; the message says why."""


class SharedMemories:
    """The daemon's: what is kept for workers, by a key."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._files)

    def create(self, key: str, most_bytes: int) -> SharedMemory:
        """Make some. Where the system gives none, no worker can open what is returned."""
        name = f"outrider-kv-{os.getpid()}-{next(_NUMBERS)}"
        try:
            file = os.memfd_create(name, os.MFD_CLOEXEC)
        except OSError as error:
            return SharedMemory("", error.strerror or str(error), most_bytes)
        self.remove(key)
        self._files[key] = file
        return SharedMemory(f"/proc/{os.getpid()}/fd/{file}", name, most_bytes)

    def remove(self, key: str) -> None:
        """Keep it no longer. Unknown keys are ignored."""
        file = self._files.pop(key, None)
        if file is not None:
            os.close(file)

    def close(self) -> None:
        for key in list(self._files):
            self.remove(key)


@contextmanager
def open_memory(memory: SharedMemory, *, writing: bool = False) -> Iterator[int]:
    """Yield a descriptor. Raises SharedMemoryFailed, also for what the system says while it is used."""
    file = -1
    try:
        if not memory.path:
            raise SharedMemoryFailed(f"no shared memory: {memory.name}")
        file = os.open(memory.path, (os.O_RDWR if writing else os.O_RDONLY) | os.O_CLOEXEC)
        # The daemon may have closed it, and have another file there now.
        if os.readlink(f"/proc/self/fd/{file}") != f"/memfd:{memory.name} (deleted)":
            raise SharedMemoryFailed("the shared memory is not kept any more")
        yield file
    except OSError as error:
        raise SharedMemoryFailed(f"the shared memory cannot be used: {error.strerror or error}") from error
    finally:
        if file >= 0:
            with suppress(OSError):
                os.close(file)


def write_all(file: int, data: memoryview) -> None:
    """Write behind what is there. Raises OSError."""
    while data:
        data = data[os.write(file, data) :]


def read_all(file: int, into: memoryview) -> int:
    """Fill a buffer from where the last read ended; returns how much there was. Raises OSError."""
    have = 0
    while have < len(into) and (count := os.readv(file, [into[have:]])):
        have += count
    return have
