"""A context's KV caches as mainline's functions for states write them, and as rows of bytes for each position.

What is read is a whole context (llama_state_get_data): what is written of one sequence lacks positions that a sliding
window has left behind. It is taken back as a sequence (llama_state_seq_set_data): behind a whole context the library
would write what follows over such positions. Both have a head of their own; behind it they are alike, little-endian.
For each cache that the model has (two where some layers have a sliding window):

    streams     uint32 1
    cells       uint32 count, then for each: int32 position, uint32 1, with M-RoPE three int32 more, int32 0
    transposed  uint32: 1 where values lie transposed
    layers      uint32 count, and in some builds two words more, which are alike in all states of a model
    keys        for each layer: int32 type, uint64 bytes of a position, then count positions
    values      the same; transposed: int32 type, uint32 bytes of an element, uint32 elements, then for each element
                count of them. A layer whose values are a part of its keys has none
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adapters.contract import RuntimeFailed
from adapters.llama_cpp.state import CacheFormat, Rows

_COUNT: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<iQ")
_TRANSPOSED_HEAD: Final = struct.Struct("<iII")
_CELL_INTS, _LONGER_CELL_INTS = 3, 6  # numbers of a cell in the two layouts of the library's states
_MORE_TYPE: Final = -1
"""What `types` has for the part of a cell that is its own with M-RoPE."""


@dataclass(frozen=True, slots=True)
class _Build:
    """What differs between builds and models: integers of a cell, words behind the count of layers, and whether layers
    have values beside their keys."""

    cell_ints: int
    words: int
    has_values: bool


_BUILDS: Final = tuple(starmap(_Build, product((_CELL_INTS, _LONGER_CELL_INTS), (0, 2), (True, False))))


@dataclass(frozen=True, slots=True)
class _Cache:
    """How one KV cache is written. `element`: bytes of an element of values that lie transposed, 0: there are none."""

    transposed: int
    element: int
    words: bytes
    types: tuple[int, ...]
    row_bytes: tuple[int, ...]
    keys: int


@dataclass(frozen=True, slots=True)
class MainlineFormat(CacheFormat):
    """See CacheFormat and the module. `head`: what a sequence's state begins with."""

    head: bytes
    build: _Build
    caches: tuple[_Cache, ...]

    @property
    def name(self) -> str:
        words = {cache.words.hex() for cache in self.caches if any(cache.words)}
        return "-".join([*map(str, sorted(set(self.types))), *sorted(words)])

    @property
    def types(self) -> tuple[int, ...]:  # type: ignore[override]  # it follows from `caches`
        return tuple(kind for cache in self.caches for kind in cache.types)

    @property
    def row_bytes(self) -> tuple[int, ...]:  # type: ignore[override]  # it follows from `caches`
        return tuple(size for cache in self.caches for size in cache.row_bytes)

    def split(self, state: NDArray[np.uint8]) -> Rows:
        caches, rows = _walk(state, self.build)
        if caches != self.caches:
            raise RuntimeFailed("a sequence's state is of another format than the model's others")
        return rows

    def join(self, rows: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        count, left = len(rows[0]), iter(rows)
        parts: list[bytes | memoryview] = [self.head]
        for cache in self.caches:
            cells = np.zeros((count, self.build.cell_ints), np.int32)
            cells[:, 0], cells[:, 1] = np.arange(count), 1
            own = list(zip(cache.types, cache.row_bytes, left, strict=False))
            if self.build.cell_ints == _LONGER_CELL_INTS:
                cells[:, 2:5] = np.ascontiguousarray(own.pop(0)[2]).view(np.int32)
            parts += [struct.pack("<II", 1, count), cells.tobytes()]
            parts += [struct.pack("<II", cache.transposed, cache.keys), cache.words]
            for place, (kind, size, values) in enumerate(own):
                if place < cache.keys or not cache.transposed:
                    parts += [_HEAD.pack(kind, size), np.ascontiguousarray(values).reshape(-1).data]
                else:
                    turned = values.reshape(count, -1, cache.element).transpose(1, 0, 2)
                    parts.append(_TRANSPOSED_HEAD.pack(kind, cache.element, size // cache.element))
                    parts.append(np.ascontiguousarray(turned).reshape(-1).data)
        return np.frombuffer(b"".join(parts), np.uint8)


def without_head(state: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return what stands behind the architecture's name, a view. Raises RuntimeFailed where nothing does."""
    behind = _COUNT.size + (int(_COUNT.unpack_from(state.data)[0]) if len(state) >= _COUNT.size else 0)
    if behind >= len(state):
        raise RuntimeFailed("a context's state holds no KV cache")
    return state[behind:]


def read_format(state: NDArray[np.uint8], sequence: NDArray[np.uint8]) -> MainlineFormat:
    """Return the format of a context's state, learnt from one without its head, and that of its short sequence. Raises
    RuntimeFailed where it is not of those that are known."""
    head = len(sequence) - len(state)
    if head < 0 or not np.array_equal(sequence[head:], state):
        raise RuntimeFailed("a sequence's state is not that of its context")
    errors: list[RuntimeFailed] = []
    for build in _BUILDS:
        try:
            return MainlineFormat(sequence[:head].tobytes(), build, _walk(state, build)[0])
        except RuntimeFailed as error:
            errors.append(error)
    raise errors[0]


def _walk(state: NDArray[np.uint8], build: _Build) -> tuple[tuple[_Cache, ...], Rows]:
    caches: list[_Cache] = []
    rows: Rows = []
    at = 0
    try:
        while at < len(state):
            cache, own, at = _walk_cache(state, at, build)
            if rows and len(own[0]) != len(rows[0]):
                raise RuntimeFailed("the KV caches of a context's state hold different positions")
            caches.append(cache)
            rows += own
    except struct.error as error:
        raise RuntimeFailed(f"a context's state ends too early ({error})") from error
    return tuple(caches), rows


def _walk_cache(state: NDArray[np.uint8], at: int, build: _Build) -> tuple[_Cache, Rows, int]:
    raw = state.data
    streams, count = struct.unpack_from("<II", raw, at)
    at += 2 * _COUNT.size
    if streams != 1 or not 0 < count <= len(state):
        raise RuntimeFailed(f"a context's state is of an unknown kind ({streams} streams of {count} positions)")
    cells = _take(state, at, count, 4 * build.cell_ints)
    at += cells.size
    numbers = np.ascontiguousarray(cells).view(np.int32)
    known = (numbers[:, 0] == np.arange(count)) & (numbers[:, 1] == 1) & (numbers[:, -1] == 0)
    if not known.all():
        raise RuntimeFailed("positions of a context's state do not follow one another")
    transposed, layers = struct.unpack_from("<II", raw, at)
    at += 2 * _COUNT.size
    words = bytes(raw[at : at + build.words * _COUNT.size])
    at += len(words)
    if transposed > 1 or not 0 < layers <= len(state):
        raise RuntimeFailed(f"a context's state is of an unknown kind ({layers} layers)")
    types: list[int] = []
    rows: Rows = []
    element = 0
    if build.cell_ints == _LONGER_CELL_INTS:
        types.append(_MORE_TYPE)
        rows.append(np.ascontiguousarray(numbers[:, 2:5]).view(np.uint8))
    for place in range(2 * layers if build.has_values else layers):
        if place < layers or not transposed:
            kind, size = _HEAD.unpack_from(raw, at)
            at += _HEAD.size
            own = _take(state, at, count, size)
        else:
            kind, element, width = _TRANSPOSED_HEAD.unpack_from(raw, at)
            at += _TRANSPOSED_HEAD.size
            turned = _take(state, at, width, count * element).reshape(width, count, element)
            own = turned.transpose(1, 0, 2).reshape(count, width * element)
        if kind < 0:
            raise RuntimeFailed("a layer has no plain KV cache")
        types.append(kind)
        rows.append(own)
        at += own.size
    return _Cache(transposed, element, words, tuple(types), tuple(row.shape[1] for row in rows), layers), rows, at


def _take(state: NDArray[np.uint8], at: int, count: int, size: int) -> NDArray[np.uint8]:
    """Return so many rows of so many bytes. Raises RuntimeFailed where there are fewer."""
    end = at + count * size
    if count <= 0 or size <= 0 or end > len(state):
        raise RuntimeFailed("a context's state ends too early")
    return state[at:end].reshape(count, size)
