"""Files that workers map: a mark, a header in JSON, and arrays from an aligned place on. A file is replaced whole: one
that shrinks under a mapping would kill its worker."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from numpy.typing import NDArray

from device_profiles.whole_file import replace_file

_LENGTH = struct.Struct("<I")
_ALIGN = 64  # a cache line; mapped arrays begin on one
_MOST_HEADER = 1 << 20  # a longer header is damage


class FileHeader(msgspec.Struct, frozen=True):
    """What a file says of itself. `vocabulary`: the fingerprint of the vocabulary whose tokens it holds."""

    vocabulary: str


_Header = TypeVar("_Header", bound=FileHeader)


class MappedFileUnusable(Exception):
    """A file that cannot be used. The message says which one, why, and what to do."""


def write_mapped_file(path: Path, mark: bytes, header: msgspec.Struct, arrays: Iterable[NDArray[Any]]) -> None:
    """Write a file in place of what stands there, readable for its owner alone. Raises OSError."""
    body = msgspec.json.encode(header)
    begin = mark + _LENGTH.pack(len(body)) + body
    with replace_file(path, 0o600, sync=True) as file:
        file.write(begin + bytes(-len(begin) % _ALIGN))
        for array in arrays:
            file.write(array.tobytes())


@dataclass(frozen=True, slots=True)
class FileKind(Generic[_Header]):
    """Files of one kind: they begin with `mark`, and hold as many entries as `count` takes from the header. One of
    another kind `is_other`; `command` makes one."""

    mark: bytes
    header: type[_Header]
    count: Callable[[_Header], int]
    entry_bytes: int
    is_other: str
    command: str

    def map_file(self, path: Path, vocabulary: str) -> MappedFile[_Header]:
        """Map a file whose tokens are those of a vocabulary, by its fingerprint. Raises MappedFileUnusable."""
        again = f"make it with `{self.command}`"
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                begin = file.read(len(self.mark) + _LENGTH.size)
                whole = len(begin) == len(self.mark) + _LENGTH.size
                length = _LENGTH.unpack_from(begin, len(self.mark))[0] if whole else 0
                if not begin.startswith(self.mark) or length > _MOST_HEADER:
                    raise MappedFileUnusable(f"{path}: {self.is_other}; {again}")
                header = msgspec.json.decode(file.read(length), type=self.header)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise MappedFileUnusable(f"{path}: {error.strerror or error}; {again}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MappedFileUnusable(f"{path}: is damaged ({error}); {again}") from error
        start = len(begin) + length
        start += -start % _ALIGN
        size_bytes = self.count(header) * self.entry_bytes
        if size_bytes < 0 or status.st_size != start + size_bytes:
            raise MappedFileUnusable(f"{path}: is damaged: it has {status.st_size} bytes; {again}")
        if header.vocabulary != vocabulary:
            raise MappedFileUnusable(
                f"{path}: has tokens of another vocabulary ({header.vocabulary}, the model's is {vocabulary}); "
                f"make it anew with `{self.command}`"
            )
        return MappedFile(header, mapped, memoryview(mapped)[start:], size_bytes, _identify(status))


@dataclass(frozen=True, slots=True)
class MappedFile(Generic[_Header]):
    """A mapped file. `data`: its arrays; `identity`: of the file that is mapped."""

    header: _Header
    mapping: mmap.mmap
    data: memoryview
    size_bytes: int
    identity: tuple[int, int, int]

    def is_replaced(self, path: Path) -> bool:
        """Return whether another file stands at a path now; one that is gone replaces nothing."""
        try:
            return _identify(path.stat()) != self.identity
        except OSError:
            return False

    def close(self, *views: memoryview) -> None:
        """Give the mapping back, and views of it. Idempotent."""
        for view in (*views, self.data):
            view.release()
        self.mapping.close()


def _identify(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns
