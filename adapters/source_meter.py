"""How much of a model's source a conversion has read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from adapters.content_digest import file_identity
from adapters.contract import Progress
from adapters.gguf_splits import list_beside
from adapters.hf_directory import model_files
from device_profiles.units import human_bytes

_SAID_EVERY_S: Final = 0.5  # until progress is told again. Not tuned.


class SourceMeter:
    """Counts the bytes that were read, each once however often it is read. `on_bytes` hears, twice a second at most,
    how many of how many there are."""

    def __init__(self, source: Path, on_bytes: Callable[[int, int], None]) -> None:
        """Raises OSError."""
        self._files = model_files(source) if source.is_dir() else list_beside(source)
        self.identity = self.read_identity()
        self.total_bytes = sum(size for size, *_ in self.identity)
        self._on_bytes = on_bytes
        self._read: dict[str, int] = {}
        self._said_s = 0.0

    def read_identity(self) -> list[list[int]]:
        """Return what is another one once a file of the source is written or replaced. Raises OSError."""
        return [file_identity(file) for file in self._files]

    @property
    def done_bytes(self) -> int:
        """How many bytes have been read."""
        return min(self.total_bytes, sum(self._read.values()))

    def note(self, name: str, count: int) -> None:
        """So many bytes of this have been read."""
        self._read[name] = max(count, self._read.get(name, 0))
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAID_EVERY_S:
            self._said_s = now_s
            self._on_bytes(self.done_bytes, self.total_bytes)


def say_bytes(progress: Progress, stage: str) -> Callable[[int, int], None]:
    """Return what tells `progress` that so many bytes of all are done."""

    def on_bytes(done: int, total: int) -> None:
        progress(f"{stage}: {human_bytes(done)} of {human_bytes(total)}", done / max(1, total))

    return on_bytes
