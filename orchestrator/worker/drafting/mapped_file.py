"""Files that workers map: a mark, a header in JSON, and arrays from an aligned place on. A file is replaced whole: one
that shrinks under a mapping would kill its worker."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import msgspec
from numpy.typing import NDArray

_LENGTH = struct.Struct("<I")
_ALIGN = 64
_MOST_HEADER = 1 << 20
_Header = TypeVar("_Header", bound=msgspec.Struct)


class MappedFileUnusable(Exception):
    """A file that cannot be read; the message says why."""


class OtherMark(MappedFileUnusable):
    """A file of another kind."""


def write_mapped_file(path: Path, mark: bytes, header: msgspec.Struct, arrays: Iterable[NDArray[Any]]) -> None:
    """Write a file in place of what stands there, readable for its owner alone. Raises OSError."""
    body = msgspec.json.encode(header)
    begin = mark + _LENGTH.pack(len(body)) + body
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(begin + bytes(-len(begin) % _ALIGN))
            for array in arrays:
                file.write(array.tobytes())
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def read_mapped_header(path: Path, mark: bytes, kind: type[_Header]) -> tuple[_Header, int, int]:
    """Return the header, and where the arrays begin and end, in bytes. Raises MappedFileUnusable, OtherMark."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(len(mark) + _LENGTH.size)
            length = _LENGTH.unpack_from(begin, len(mark))[0] if len(begin) == len(mark) + _LENGTH.size else 0
            if not begin.startswith(mark) or length > _MOST_HEADER:
                raise OtherMark("its first bytes are another kind's")
            header = msgspec.json.decode(file.read(length), type=kind)
    except OSError as error:
        raise MappedFileUnusable(error.strerror or str(error)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MappedFileUnusable(f"is damaged ({error})") from error
    start = len(begin) + length
    return header, start + -start % _ALIGN, size
