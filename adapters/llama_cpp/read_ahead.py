"""Weights that are read while a model is still being prepared: its file is digested and its tokenizer made meanwhile.

Whoever loads the model takes them where the file is still the one that was read, by all that changes with a write.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from adapters.content_digest import full_identity
from adapters.contract import Progress
from adapters.llama_cpp.native import CPU, NativeLibrary

_TELL_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Weights:
    """A file as it is now, and how it is read. `identity`: what changes with any write, () where it is not there."""

    library: NativeLibrary
    file: Path = field(compare=False)  # a link to it is as good
    place: Path
    device: str
    layers: int
    repack: bool
    identity: tuple[int, ...]

    @classmethod
    def of(cls, library: NativeLibrary, file: Path, device: str, layers: int, *, repack: bool) -> Weights:
        """Return those of a file, or of what a link leads to."""
        identity: tuple[int, ...] = ()
        with suppress(OSError):
            identity = tuple(full_identity(file))
        return cls(library, file, file.resolve(), device, layers, repack, identity)

    @property
    def are_there(self) -> bool:
        """Whether the file is still as it was."""
        now = Weights.of(self.library, self.file, self.device, self.layers, repack=self.repack)
        return bool(self.identity) and now == self

    def read(self, tell: Callable[[float], bool]) -> int:
        return self.library.load_model(self.file, self.device, self.layers, tell, repack=self.repack)


class ReadAhead:
    """Weights that a thread of its own reads onto their device."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._fraction, self._is_wanted = 0.0, True
        thread = ThreadPoolExecutor(1, "read weights ahead")
        self._model: Future[int] = thread.submit(weights.read, self._go_on)
        thread.shutdown(wait=False)

    def _go_on(self, fraction: float) -> bool:
        self._fraction = fraction
        return self._is_wanted

    @property
    def held_bytes(self) -> int:
        """How much of this process's memory has what was read and nobody took: on other devices none."""
        is_here = self._is_wanted and self._weights.device == CPU and bool(self._weights.identity)
        return int(self._fraction * self._weights.identity[0]) if is_here else 0

    def take(self, wanted: Weights, progress: Progress) -> int | None:
        """Return what reading the same weights gave, once they are read; None where others are wanted, or the file was
        changed since. Raises what `progress` raises."""
        while wanted == self._weights and wanted.are_there:
            progress("load", self._fraction)
            if wait([self._model], _TELL_EVERY_S).done and wanted.are_there:
                self._is_wanted = False
                return self._model.result()
        return None

    def close(self) -> None:
        """Give back what nobody took. Idempotent."""
        if self._is_wanted:
            self._is_wanted = False
            if model := self._model.result():
                self._weights.library.close_model(model)
