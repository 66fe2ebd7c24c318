"""Safetensors files: checked for damage by the library, their tensors mapped into memory and not read before use.

The library's numpy reader does not know bfloat16, so tensors are mapped here by the offsets of the file's own
header (https://github.com/huggingface/safetensors#format); bfloat16 comes as uint16 bit patterns.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ModelRefused

KINDS: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_ID_KINDS: dict[str, type[np.generic]] = {"I64": np.int64, "I32": np.int32}
_LENGTH = struct.Struct("<Q")
_CHUNK_ELEMENTS = 1 << 22  # of two tensors that are compared. Bounds memory.


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, by the file's `name` of it: `kind` is the format's name of its elements, `offset` where it
    begins, in bytes."""

    name: str
    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int

    def integers(self) -> NDArray[np.int64]:
        """Read a table of ids. Raises ModelRefused for other elements than 32- or 64-bit integers."""
        if self.kind not in _ID_KINDS:
            raise ModelRefused(f"{self.path.name}: its ids are {self.kind}; supported are {', '.join(_ID_KINDS)}.")
        count = int(np.prod(self.shape))
        ids: NDArray[Any] = np.fromfile(self.path, _ID_KINDS[self.kind], count, offset=self.offset)
        return ids.astype(np.int64).reshape(self.shape)

    def values(self) -> NDArray[Any]:
        """Map the tensor read-only; bfloat16 as uint16. Raises ModelRefused for another kind of elements."""
        try:
            dtype = KINDS[self.kind]
        except KeyError:
            raise ModelRefused(
                f"{self.path.name}: its elements are {self.kind}; supported are {', '.join(KINDS)}. "
                "Choose the model's bf16, f16 or f32 weights."
            ) from None
        if 0 in self.shape or not self.shape:
            return np.zeros(self.shape, dtype)
        return np.memmap(self.path, dtype=dtype, mode="r", offset=self.offset, shape=self.shape)

    def find_difference(self, other: Stored) -> int | None:
        """Return the first element at which another tensor of the same kind and shape differs; None where it is equal.
        What is no number differs from itself."""
        mine, theirs = self.values().reshape(-1), other.values().reshape(-1)
        for at in range(0, mine.size, _CHUNK_ELEMENTS):
            differ = mine[at : at + _CHUNK_ELEMENTS] != theirs[at : at + _CHUNK_ELEMENTS]
            if differ.any():
                return at + int(differ.argmax())
        return None

    def locate(self, first: int = 0, count: int | None = None) -> tuple[Path, int, int]:
        """Return the file of `count` elements from the `first` on (None: of all), and their place and length there, in
        bytes."""
        size = np.dtype(KINDS.get(self.kind) or _ID_KINDS[self.kind]).itemsize
        return self.path, self.offset + first * size, (math.prod(self.shape) if count is None else count) * size


def count_head_bytes(path: Path) -> int:
    """Return where the tensors of a file begin, in bytes. Raises OSError."""
    with path.open("rb") as file:
        return min(_LENGTH.size + int(_LENGTH.unpack(file.read(_LENGTH.size))[0]), path.stat().st_size)


def read_tensors(path: Path) -> dict[str, Stored]:
    """Return a file's tensors by name. Raises ModelRefused, by name, when it is damaged, truncated or unreadable."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np"), path.open("rb") as file:  # opening it checks header, offsets and length
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header = json.loads(file.read(length))
    except SafetensorError as error:
        raise ModelRefused(f"{path.name}: it is no whole safetensors file ({error}). Download it again.") from error
    except OSError as error:
        raise ModelRefused(f"{path.name}: cannot be read ({error.strerror or error})") from error
    start = _LENGTH.size + length
    return {
        name: Stored(name, path, facts["dtype"], tuple(facts["shape"]), start + facts["data_offsets"][0])
        for name, facts in header.items()
        if name != "__metadata__"
    }
