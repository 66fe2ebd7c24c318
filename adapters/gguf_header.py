"""The head of a GGUF file: metadata and the list of tensors, read in milliseconds and checked for damage.

The `gguf` library's own reader takes seconds for a vocabulary (numpy objects for every element) and answers
damage with all kinds of errors, or with views of the wrong length. This one walks arrays, decodes them when
asked, and answers damage with ModelRefused. The sizes of tensor types come from the library.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from adapters.content_digest import full_identity
from adapters.contract import ModelRefused
from device_profiles.units import MIB

SUPPORTED_VERSIONS = (2, 3)  # GGUF's; 1 had other lengths
DEFAULT_ALIGNMENT_BYTES = 32  # GGUF's, where the file names none
# Holds the whole head of a vocabulary of 262,144 tokens, which takes 12 MiB.
FIRST_READ_BYTES = 16 * MIB
LARGEST_HEAD_BYTES = 256 * MIB  # a 262k-token vocabulary takes 12 MiB: more than this is a damaged length
MOST_DIMENSIONS = 4  # GGML's

PREAMBLE = struct.Struct("<4sIQQ")  # the mark, the version, and how many tensors and pairs there are
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9  # GGUF's numbers of kinds of values
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}

Scalar = int | float | bool | str
_T = TypeVar("_T")


class _Short(Exception):
    """The bytes at hand end before the head does."""


class _Damaged(Exception):
    """The head contradicts itself; the message says how."""


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array that was walked but not decoded: `count` elements of GGUF type `kind` from byte `offset`."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file `path`: `offset` is where it begins there, `size` its length, both in bytes."""

    name: str
    kind: int
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself, or the first of a model's files about the model, with the tensors of all.
    `data_offset` is where the tensor data of `path` begins, in bytes."""

    path: Path
    metadata: dict[str, Scalar | GgufArray]
    tensors: tuple[GgufTensor, ...]
    data_offset: int
    raw: bytes

    def text(self, key: str) -> str | None:
        """Return a string value, or None when the key is absent. Raises ModelRefused for another type."""
        return self._read_typed(key, str, "a text")

    def integer(self, key: str) -> int | None:
        """Return an integer value, or None when the key is absent. Raises ModelRefused for another type."""
        return self._read_typed(key, int, "an integer")

    def flag(self, key: str) -> bool | None:
        """Return a boolean value, or None when the key is absent. Raises ModelRefused for another type."""
        return self._read_typed(key, bool, "a boolean")

    def length(self, key: str) -> int | None:
        """Return how many elements an array has, or None when the key is absent or is no array."""
        value = self.metadata.get(key)
        return value.count if isinstance(value, GgufArray) else None

    def texts(self, key: str) -> list[str] | None:
        """Decode an array of strings; None when the key is absent. Raises ModelRefused for another type."""
        array = self._read_typed(key, GgufArray, "a list")
        if array is None:
            return None
        if array.kind != _STRING:
            raise _build_refusal(self.path, f"{key} is not a list of texts")
        raw, at, unpack, texts = self.raw, array.offset, _U64.unpack_from, []
        try:
            for _ in range(array.count):
                start = at + 8
                at = start + unpack(raw, at)[0]
                texts.append(raw[start:at].decode())
        except UnicodeDecodeError:
            raise _build_refusal(self.path, f"element {len(texts)} of {key} is not UTF-8") from None
        return texts

    def integers(self, key: str) -> list[int] | None:
        """Decode an array of integers; None when the key is absent. Raises ModelRefused for another type."""
        return self._read_numbers(key, "bBhHiIqQ", "integers")

    def flags(self, key: str) -> list[bool] | None:
        """Decode an array of booleans; None when the key is absent. Raises ModelRefused for another type."""
        return self._read_numbers(key, "?", "booleans")

    def floats(self, key: str) -> list[float] | None:
        """Decode an array of float32; None when the key is absent. Raises ModelRefused for another type."""
        return self._read_numbers(key, "f", "numbers")

    def _read_numbers(self, key: str, forms: str, what: str) -> list[Any] | None:
        """Decode an array whose elements have one of these forms, as `struct` calls them."""
        array = self._read_typed(key, GgufArray, "a list")
        if array is None:
            return None
        scalar = _SCALARS.get(array.kind)
        if scalar is None or scalar.format[-1] not in forms:
            raise _build_refusal(self.path, f"{key} is not a list of {what}")
        return list(struct.unpack_from(f"<{array.count}{scalar.format[-1]}", self.raw, array.offset))

    def _read_typed(self, key: str, kind: type[_T], what: str) -> _T | None:
        value = self.metadata.get(key)
        if value is None or type(value) is kind:  # not isinstance: a boolean is no integer here
            return value
        raise _build_refusal(self.path, f"{key} is not {what}")


def read_header(path: Path, file_bytes: int | None = None, first_bytes: int = FIRST_READ_BYTES) -> GgufHeader:
    """Read the head of a GGUF file and check it against itself and the file's length; `file_bytes` is that of a file
    of which `path` is the first part. `first_bytes`: see `parse_header`.

    Raises ModelRefused when the file cannot be read, is not GGUF, of another version, truncated or damaged.
    """
    try:
        return _read_once(path, tuple(full_identity(path)), file_bytes, first_bytes)
    except OSError as error:
        raise ModelRefused(f"{path.name}: cannot be read ({error.strerror or error})") from error


@functools.lru_cache(maxsize=2)  # a start reads a model's head some six times, at 0.1 s each
def _read_once(path: Path, identity: tuple[int, ...], file_bytes: int | None, first_bytes: int) -> GgufHeader:
    """Return the head of a file. `identity` is of the key alone. Raises as `parse_header`, and OSError."""
    with path.open("rb") as file:
        here = file.seek(0, 2)

        def read(count: int) -> bytes:
            file.seek(0)
            return file.read(count)

        return parse_header(path, read, here if file_bytes is None else file_bytes, first_bytes)


def parse_header(path: Path, read: Callable[[int], bytes], file_bytes: int, first_bytes: int) -> GgufHeader:
    """Return the head of a file of `file_bytes` of which `read(count)` gives the first bytes, fewer where it ends.

    More and more are read until the head is whole, `first_bytes` at first. Raises ModelRefused as `read_header` does.
    """
    limit = first_bytes
    try:
        while True:
            raw = read(limit)
            try:
                return _parse(path, raw, file_bytes)
            except _Short:
                if len(raw) < limit or limit >= LARGEST_HEAD_BYTES:
                    raise _build_refusal(path, "its metadata is cut short (truncated or damaged)") from None
                limit *= 4
    except _Damaged as damage:
        raise _build_refusal(path, str(damage)) from None


def _build_refusal(path: Path, reason: str) -> ModelRefused:
    return ModelRefused(f"{path.name}: {reason}. Fetch the file again, or choose another one.")


def list_pairs(header: GgufHeader) -> Iterator[tuple[str, bytes]]:
    """Yield each key of a file's metadata with all bytes of its pair: key, type and value."""
    cursor = _Cursor(header.raw)
    cursor.skip(PREAMBLE.size)
    for _ in range(len(header.metadata)):
        begin = cursor.at
        key = cursor.text()
        _read_value(cursor, key)
        yield key, header.raw[begin : cursor.at]


class _Cursor:
    """Reads on through the bytes at hand. Every method raises _Short at their end."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0

    def number(self, kind: struct.Struct) -> int:
        return int(self.scalar(kind))

    def scalar(self, kind: struct.Struct) -> int | float | bool:
        if self.at + kind.size > len(self.raw):
            raise _Short
        value: int | float | bool = kind.unpack_from(self.raw, self.at)[0]
        self.at += kind.size
        return value

    def text(self) -> str:
        size = self.number(_U64)
        start = self.at
        self.skip(size)
        try:
            return self.raw[start : self.at].decode()
        except UnicodeDecodeError:
            raise _Damaged(f"a name or text at byte {start} is not UTF-8 (damaged)") from None

    def skip(self, size: int) -> None:
        """Step over `size` bytes."""
        if self.at + size > len(self.raw):
            raise _Short
        self.at += size

    def array(self) -> GgufArray:
        kind, count = self.number(_U32), self.number(_U64)
        offset = self.at
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            self.skip(count * scalar.size)
        elif kind == _STRING:
            self._skip_texts(count)
        else:
            raise _Damaged(f"a list at byte {offset} has the unknown element type {kind}")
        return GgufArray(kind, count, offset)

    def _skip_texts(self, count: int) -> None:
        raw, at, end, unpack = self.raw, self.at, len(self.raw) - 8, _U64.unpack_from
        for _ in range(count):
            if at > end:
                raise _Short
            at += 8 + unpack(raw, at)[0]
        self.at = at
        self.skip(0)


def _parse(path: Path, raw: bytes, file_bytes: int) -> GgufHeader:
    tensor_count, pair_count = _parse_preamble(raw)
    cursor = _Cursor(raw)
    cursor.skip(PREAMBLE.size)
    metadata = _parse_metadata(cursor, pair_count)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Damaged("general.alignment is not a power of two (damaged)")
    placed = _parse_tensors(cursor, path, tensor_count, alignment)
    data_offset = -(-cursor.at // alignment) * alignment
    tensors = tuple(replace(tensor, offset=data_offset + tensor.offset) for tensor in placed)
    ends = [tensor.offset + tensor.size for tensor in tensors]
    needed = max(ends, default=cursor.at)  # a file without tensors need not be padded up to where they would be
    if needed > file_bytes:
        raise _Damaged(f"it is truncated: {file_bytes} bytes of at least {needed}")
    return GgufHeader(path, metadata, tensors, data_offset, raw)


def _parse_preamble(raw: bytes) -> tuple[int, int]:
    if raw[:4] != b"GGUF":
        raise _Damaged("it is not a GGUF file (it does not begin with 'GGUF')")
    if len(raw) < PREAMBLE.size:
        raise _Short
    _, version, tensor_count, pair_count = PREAMBLE.unpack_from(raw)
    if version and version & 0xFFFF == 0:
        raise _Damaged("it is a big-endian GGUF file; only little-endian ones are supported")
    if version not in SUPPORTED_VERSIONS:
        raise _Damaged(f"it has GGUF version {version}; supported are {SUPPORTED_VERSIONS}")
    return tensor_count, pair_count


def _parse_metadata(cursor: _Cursor, count: int) -> dict[str, Scalar | GgufArray]:
    metadata: dict[str, Scalar | GgufArray] = {}
    for _ in range(count):
        key = cursor.text()
        if key in metadata:
            raise _Damaged(f"the metadata key {key!r} appears twice (damaged)")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Scalar | GgufArray:
    kind = cursor.number(_U32)
    if kind == _STRING:
        return cursor.text()
    if kind == _ARRAY:
        return cursor.array()
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind])
    raise _Damaged(f"the metadata key {key!r} has the unknown type {kind}")


def _parse_tensors(cursor: _Cursor, path: Path, count: int, alignment: int) -> tuple[GgufTensor, ...]:
    """Return the tensors, by their offsets from where tensor data begins, as files have them."""
    from gguf.constants import GGML_QUANT_SIZES  # here: it takes 0.1 s to import

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    tensors: dict[str, GgufTensor] = {}
    expected = 0
    for _ in range(count):
        tensor = _parse_tensor(cursor, path, sizes)
        # llama.cpp writes and demands tensors one behind the other: anything else is damage.
        if tensor.offset != expected or tensor.name in tensors:
            raise _Damaged(f"the tensor {tensor.name!r} is listed twice or out of place (damaged)")
        tensors[tensor.name] = tensor
        expected += -(-tensor.size // alignment) * alignment
    return tuple(tensors.values())


def _parse_tensor(cursor: _Cursor, path: Path, sizes: dict[int, tuple[int, int]]) -> GgufTensor:
    name, dimensions = cursor.text(), cursor.number(_U32)
    if dimensions > MOST_DIMENSIONS:
        raise _Damaged(f"the tensor {name!r} has {dimensions} dimensions (damaged)")
    shape = tuple(cursor.number(_U64) for _ in range(dimensions))
    kind, offset = cursor.number(_U32), cursor.number(_U64)
    if kind not in sizes:
        raise _Damaged(f"the tensor {name!r} has the type {kind}, unknown to the installed gguf library")
    block_elements, block_bytes = sizes[kind]
    if not shape or shape[0] % block_elements:
        raise _Damaged(f"the tensor {name!r} does not divide into blocks of {block_elements} (damaged)")
    return GgufTensor(name, kind, shape, path, offset, math.prod(shape) // block_elements * block_bytes)
