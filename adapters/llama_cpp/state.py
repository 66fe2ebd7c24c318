"""A sequence's KV cache as the library's functions for states write it, and as rows of bytes for each position.

The format (llama_state_seq_get_data of ik_llama.cpp, without flags), little-endian:

    cells       uint32 count, then for each: int32 position, uint32 0
    kind        uint32: 0 values lie as keys do, 2 there are none (they are a part of the keys)
    layers      uint32 count
    keys        for each layer: int32 type, uint64 bytes of a position, then count positions; type -1 and 0 bytes where
                a layer looks at another one's
    values      the same, where the kind is 0
    more        uint32 0, uint32 0: of what no plain KV cache has
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from adapters.contract import RuntimeFailed

Rows = list[NDArray[np.uint8]]
"""For each cache, keys of all layers and then values: an array of shape (positions, bytes of a position)."""

_COUNT: Final = struct.Struct("<I")
_CELL: Final = struct.Struct("<iI")
_HEAD: Final = struct.Struct("<iQ")
_PLAIN, _KEYS_ONLY = 0, 2  # the library's kinds of a layer's cache
_SHARED: Final = (-1, 0)  # the library's mark of a layer whose values are another one's


class CacheFormat(ABC):
    """What is alike in all states of a model. `types` and `row_bytes`: the element type, and the bytes of a position,
    of each cache."""

    types: tuple[int, ...]
    row_bytes: tuple[int, ...]

    @property
    def name(self) -> str:
        """What the bytes of a position are, in a word: equal names mean that equal bytes mean the same."""
        return "-".join(map(str, sorted(set(self.types))))

    @property
    def position_bytes(self) -> int:
        """Bytes of a position in all caches."""
        return sum(self.row_bytes)

    @abstractmethod
    def split(self, state: NDArray[np.uint8]) -> Rows:
        """Return the rows of a state, views of it where that can be. Raises RuntimeFailed where it is of another
        format."""

    @abstractmethod
    def join(self, rows: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """Return a state that holds these rows, from position 0 on."""


@dataclass(frozen=True, slots=True)
class StateFormat(CacheFormat):
    """See CacheFormat and the module. `shared`: which of all caches are another layer's; `tail`: what ends it."""

    kind: int
    layers: int
    types: tuple[int, ...]
    row_bytes: tuple[int, ...]
    shared: tuple[int, ...]
    tail: bytes

    def split(self, state: NDArray[np.uint8]) -> Rows:
        return _walk(state)[1]

    def join(self, rows: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        count = len(rows[0])
        cells = np.zeros((count, 2), np.int32)
        cells[:, 0] = np.arange(count)
        parts: list[bytes | memoryview] = [_COUNT.pack(count), cells.tobytes()]
        parts.append(struct.pack("<II", self.kind, self.layers))
        caches = zip(self.types, self.row_bytes, rows, strict=True)
        for place in range(len(rows) + len(self.shared)):
            if place in self.shared:
                parts.append(_HEAD.pack(*_SHARED))
                continue
            kind, size, own = next(caches)
            parts += [_HEAD.pack(kind, size), np.ascontiguousarray(own).reshape(-1).data]
        return np.frombuffer(b"".join([*parts, self.tail]), np.uint8)


def read_format(state: NDArray[np.uint8]) -> StateFormat:
    """Return the format of a state. Raises RuntimeFailed where it is not of those that are known."""
    return _walk(state)[0]


def _walk(state: NDArray[np.uint8]) -> tuple[StateFormat, Rows]:
    raw = state.data
    try:
        (count,) = _COUNT.unpack_from(raw, 0)
        at = _COUNT.size + count * _CELL.size
        if count and _CELL.unpack_from(raw, at - _CELL.size) != (count - 1, 0):
            raise RuntimeFailed("positions of a sequence's state do not follow one another")
        kind, layers = struct.unpack_from("<II", raw, at)
        at += 2 * _COUNT.size
        caches = {_PLAIN: 2 * layers, _KEYS_ONLY: layers}.get(kind)
        if caches is None or layers > len(state):
            raise RuntimeFailed(f"a sequence's state is of an unknown kind ({kind})")
        types, sizes, rows, shared = [], [], [], []
        for place in range(caches):
            element, size = _HEAD.unpack_from(raw, at)
            at += _HEAD.size
            if (element, size) == _SHARED:
                shared.append(place)
                continue
            end = at + count * max(0, size)
            if element < 0 or size == 0 or end > len(state):
                raise RuntimeFailed("a layer has no plain KV cache")
            types.append(element)
            sizes.append(size)
            rows.append(state[at:end].reshape(count, size))
            at = end
    except struct.error as error:
        raise RuntimeFailed(f"a sequence's state ends too early ({error})") from error
    tail = bytes(raw[at:])
    if not rows or any(tail) or len(tail) > 4 * _COUNT.size:
        raise RuntimeFailed("a sequence's state has more than a KV cache")
    return StateFormat(kind, layers, tuple(types), tuple(sizes), tuple(shared), tail), rows
