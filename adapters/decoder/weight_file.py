"""A file of weights that is written part by part: memory never holds more of them than one product needs.

    NAME.bin     the parts, one behind the other
    NAME.kept    a line of JSON for each part that is written, with its digest: what a conversion that was ended goes on
                 from; the first line says what the source was

Parts come in the same order each time. So a conversion that goes on ends with the file that an undisturbed one writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from adapters.artefact import KEPT_SUFFIX
from adapters.decoder.spec import Tensor
from adapters.source_meter import SourceMeter
from device_profiles.units import MIB
from device_profiles.whole_file import replace_file

_CHUNK_BYTES: Final = 4 * MIB  # of a digest. Not tuned.


@dataclass(frozen=True, slots=True)
class Array:
    """An array to be written: its name, its element type as its runtime calls it, its shape, and its values piece by
    piece."""

    name: str
    kind: str
    shape: Sequence[int]
    pieces: Iterable[NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Block:
    """An array in the file. `offset` and `size` in bytes; for the others see `Array`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Part:
    """What is written at once: the arrays of a tensor, or of several that are stacked. `read_bytes`: what was read of
    the source for it. `digest`: of what lies in the file up to its end, and of all that is said of it here."""

    key: str
    blocks: tuple[Block, ...]
    read_bytes: int
    digest: str = ""


class WeightFile:
    """Writes `path`, or goes on with what an earlier process wrote of it: the parts up to the first that is not as it
    was written. Use as a context manager.

    Arrays begin at multiples of `align_bytes`. In front of the first is room for a head of `head_bytes`.
    """

    def __init__(self, path: Path, meter: SourceMeter, *, align_bytes: int = 64, head_bytes: int = 0) -> None:
        """Raises OSError."""
        self._meter, self._align_bytes = meter, align_bytes
        self._end = head_bytes
        self._parts: dict[str, Part] = {}
        self._data = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        journal = path.with_suffix(KEPT_SUFFIX)
        for part in _read_journal(journal, meter.identity):
            if not self._is_whole(part):
                break
            self._parts[part.key] = part
            self._end = part.blocks[-1].offset + part.blocks[-1].size
            meter.note(f"{path.name}: {part.key}", part.read_bytes)
        os.ftruncate(self._data, self._end)
        self._counted = meter.done_bytes
        _write_journal(journal, meter.identity, self._parts.values())
        self._journal = journal.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._journal.close()
        os.close(self._data)

    def find(self, key: str) -> Part | None:
        """Return a part that is written already, None where it is not."""
        return self._parts.get(key)

    def keep(self, key: str, describe: Callable[[], Iterable[Array]]) -> Part:
        """Return a part; `describe` is called for its arrays where it is not written yet. Raises as `write`."""
        return self._parts.get(key) or self.write(key, describe())

    def write(self, key: str, arrays: Iterable[Array]) -> Part:
        """Write a part behind the others. Raises OSError, and what the arrays raise."""
        digest, blocks = blake2b(digest_size=16), []
        for array in arrays:
            offset = self._align(self._end)
            digest.update(bytes(offset - self._end))
            self._end = offset
            for piece in array.pieces:
                data = np.ascontiguousarray(piece).data.cast("B")
                digest.update(data)
                self._put(data)
            blocks.append(Block(array.name, array.kind, tuple(array.shape), offset, self._end - offset))
        read_bytes, self._counted = self._meter.done_bytes - self._counted, self._meter.done_bytes
        part = _seal(Part(key, tuple(blocks), read_bytes), digest)
        self._parts[key] = part
        if self._meter.read_identity() == self._meter.identity:  # else it may be of other files than the rest
            self._journal.write(f"{json.dumps(asdict(part))}\n")
            self._journal.flush()
        return part

    def append(self, data: memoryview) -> int:
        """Write what is no part, behind all of them; returns its place in bytes. Raises OSError."""
        offset = self._end = self._align(self._end)
        self._put(data)
        return offset

    def write_head(self, data: bytes) -> None:
        """Write the head, which has room in front of the parts. Raises OSError."""
        os.pwrite(self._data, data, 0)

    def _align(self, offset: int) -> int:
        return -(-offset // self._align_bytes) * self._align_bytes

    def _put(self, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._data, data, self._end)
            self._end += written
            data = data[written:]

    def _is_whole(self, part: Part) -> bool:
        """Return whether a part lies behind those that were found, as it was written."""
        digest, end = blake2b(digest_size=16), self._end
        for block in part.blocks:
            if block.offset != self._align(end) or block.size < 0:
                return False
            end = block.offset + block.size
        if not part.blocks or end > os.fstat(self._data).st_size:
            return False
        for first in range(self._end, end, _CHUNK_BYTES):
            digest.update(os.pread(self._data, min(_CHUNK_BYTES, end - first), first))
        return _seal(replace(part, digest=""), digest) == part


class Matrices:
    """A decoder's matrices as parts of a file. What reads the same input is stacked where `stacks` says that its
    formats go together. `describe`: the arrays of a part of this key over these tensors, stacked."""

    def __init__(
        self,
        file: WeightFile,
        read: Callable[[str], Tensor],
        stacks: Callable[[Sequence[Tensor]], bool],
        describe: Callable[[str, Sequence[Tensor]], Iterable[Array]],
    ) -> None:
        self._file, self._read, self._stacks, self._describe = file, read, stacks, describe

    def keep(self, key: str, names: Sequence[str]) -> list[Part]:
        """Return one part where the tensors are stacked, else one for each, by its name. Only what is not written yet
        is read. Raises what `read` and a full disk do."""
        part = self._file.find(key)
        if part is not None:
            return [part]
        if any(map(self._file.find, names)):  # they were not stacked
            return [self._file.find(name) or self._write(name, [self._read(name)]) for name in names]
        tensors = list(map(self._read, names))
        if self._stacks(tensors):
            return [self._write(key, tensors)]
        return [self._write(name, [tensor]) for name, tensor in zip(names, tensors, strict=True)]

    def _write(self, key: str, tensors: Sequence[Tensor]) -> Part:
        return self._file.write(key, self._describe(key, tensors))


def _seal(part: Part, digest: blake2b) -> Part:
    """Return a part with its digest; the one that is given is of what lies in the file."""
    digest.update(json.dumps(asdict(part)).encode())
    return replace(part, digest=digest.hexdigest())


def _read_journal(path: Path, identity: object) -> Iterator[Part]:
    """Yield the parts of which a journal tells, where it is of this source; what is behind a line that was not written
    to its end is not believed."""
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or json.loads(lines[0]) != identity:
            return
        for line in lines[1:]:
            note = json.loads(line)
            blocks = tuple(
                Block(block["name"], block["kind"], tuple(block["shape"]), int(block["offset"]), int(block["size"]))
                for block in note["blocks"]
            )
            yield Part(str(note["key"]), blocks, int(note["read_bytes"]), note["digest"])


def _write_journal(path: Path, identity: object, parts: Iterable[Part]) -> None:
    lines = [json.dumps(identity), *(json.dumps(asdict(part)) for part in parts)]
    with replace_file(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
