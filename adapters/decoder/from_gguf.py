"""Reads a GGUF file of a Llama, Qwen2, Qwen3 or Gemma 3 model as `Weights`. Formats: adapters/decoder/gguf_blocks.py;
what the head says: adapters/decoder/gguf_spec.py.

Llama files store query and key rows interleaved, for llama.cpp's rope; they are put back in rotate-half order. Norms
are stored as the factor that is multiplied with.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ModelRefused
from adapters.decoder.draft_outputs import describe_copy
from adapters.decoder.finite import demand_finite_tensor
from adapters.decoder.gguf_blocks import (
    KEPT,
    ROUNDED,
    exact_matrix,
    is_dense,
    label_of,
    matrix,
    matrix_in_4_bits,
    matrix_in_8_bits,
    matrix_with_whole_zeros,
    type_name,
    vector,
)
from adapters.decoder.gguf_spec import ROPE_FACTORS, read_gguf_spec, tensor_name
from adapters.decoder.pieces import decode_in_pieces
from adapters.decoder.spec import DecoderSpec, Dense, Grouped, OnRead, Rope, Tensor, ignore_read
from adapters.gguf_header import GgufHeader, GgufTensor
from adapters.gguf_splits import read_model_header

_INTERLEAVED = ("query", "key", "query_bias", "key_bias")


Values = Literal["kept", "whole zeros", "8 bits", "4 bits", "exact"]
_READERS = {
    "kept": matrix,
    "whole zeros": matrix_with_whole_zeros,
    "8 bits": matrix_in_8_bits,
    "4 bits": matrix_in_4_bits,
    "exact": exact_matrix,
}


class GgufWeights:
    """The weights of a file, or of all files of a split model, of which `path` is the first. A tensor is read when
    asked for.

    `values`: "kept" as the file has them, 4-bit formats in 4 bits with "whole zeros", all quantised matrices in
    "8 bits", all matrices in "4 bits", or all "exact", in full.
    """

    def __init__(self, path: Path, values: Values = "kept", on_read: OnRead = ignore_read) -> None:
        """Read the heads. `on_read` hears of what is read. Raises ModelRefused for a damaged file, or a model that the
        spec cannot describe."""
        self._on_read = on_read
        self._matrix = _READERS[values]
        self._header = read_model_header(path)
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}
        self._data: dict[Path, np.memmap[Any, np.dtype[np.uint8]]] = {
            file: np.memmap(file, np.uint8, "r") for file in {tensor.path for tensor in self._header.tensors}
        }
        self.spec = self._with_rope_factors(read_gguf_spec(self._header))
        self.stored = find_largest_kind(self._header)
        self.label = label_of(self.stored, self._list_rounded_kinds() if values == "whole zeros" else ())
        if values == "4 bits":
            self.label = describe_copy(type_name(self.stored))
        self.output_ids: tuple[int, ...] = ()

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a canonical name. Raises ModelRefused, by its name, when it is not there, or holds what
        is no number."""
        rest, stored = name.rpartition(".")[2], self._tensors.get(tensor_name(name))
        if stored is None:
            raise self._build_refusal(f"it lacks the tensor {tensor_name(name)}")
        tensor = self._decode_tensor(stored)
        if self.spec.family == "llama" and rest in _INTERLEAVED:
            return _rotate_half(tensor, self.spec.heads if "query" in rest else self.spec.kv_heads)
        return tensor

    def _list_rounded_kinds(self) -> list[int]:
        return sorted({tensor.kind for tensor in self._header.tensors if tensor.kind in ROUNDED})

    @property
    def held_bytes(self) -> int:
        """Return what the tensors take as "kept": more than in the file where 8 bits hold fewer."""
        return sum(_count_held_bytes(tensor) for tensor in self._header.tensors)

    def _decode_tensor(self, stored: GgufTensor) -> Tensor:
        raw = self._data[stored.path][stored.offset : stored.offset + stored.size]
        try:
            tensor: Tensor
            if len(stored.shape) == 1:
                tensor = demand_finite_tensor(Dense(vector(stored.kind, raw)))
            else:
                tensor = self._decode_matrix(stored, raw)
            self._on_read(stored.name, stored.size)
        except ModelRefused as error:
            raise self._build_refusal(f"the tensor {stored.name}: {error}") from error
        return tensor

    def _decode_matrix(self, stored: GgufTensor, raw: NDArray[np.uint8]) -> Tensor:
        columns, rows = stored.shape
        if is_dense(stored.kind):
            return demand_finite_tensor(self._matrix(stored.kind, raw, rows))
        by_row = raw.reshape(rows, -1)

        def decode(part: slice) -> Tensor:
            tensor = demand_finite_tensor(self._matrix(stored.kind, by_row[part], part.stop - part.start))
            self._forget(stored.path, stored.offset + part.start * by_row.shape[1], by_row[part].nbytes)
            return tensor

        def on_rows(done: int) -> None:
            self._on_read(stored.name, done * by_row.shape[1])

        return decode_in_pieces(decode, (rows, columns), on_rows)

    def _forget(self, file: Path, start: int, size: int) -> None:
        """Let go of the memory in which a piece of a file was mapped: nothing that was decoded lies over it."""
        mapped: mmap.mmap = self._data[file]._mmap  # type: ignore[attr-defined]
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if whole > 0 and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, first, whole)

    def _build_refusal(self, reason: str) -> ModelRefused:
        return ModelRefused(f"{self._header.path.name}: {reason}. Convert the model again, or choose another one.")

    def _with_rope_factors(self, spec: DecoderSpec) -> DecoderSpec:
        stored = self._tensors.get(ROPE_FACTORS)
        if stored is None:
            return spec
        factors = self._decode_tensor(stored)
        assert isinstance(factors, Dense)  # noqa: S101  # one axis is never grouped
        if not (factors.values > 0).all():
            raise self._build_refusal(f"the tensor {ROPE_FACTORS} holds a number that is not positive")
        divided = {rope: _divide(rope, factors.values) for rope in set(spec.ropes)}
        return replace(spec, ropes=tuple(divided[rope] for rope in spec.ropes))


def list_shape_values(header: GgufHeader) -> list[tuple[Path, int, int]]:
    """Return the values that are looked at when a model is opened: file, first byte and count of bytes."""
    return [(tensor.path, tensor.offset, tensor.size) for tensor in header.tensors if tensor.name == ROPE_FACTORS]


def _divide(rope: Rope, factors: NDArray[Any]) -> Rope:
    return replace(rope, inverse_frequencies=tuple((np.array(rope.inverse_frequencies) / factors).tolist()))


def _rotate_half(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from interleaved pairs (0, half, 1, half + 1, ...) to halves."""

    def reorder_rows(rows: NDArray[Any]) -> NDArray[Any]:
        split = rows.reshape(heads, -1, 2, *rows.shape[1:])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)

    if isinstance(tensor, Dense):
        return Dense(reorder_rows(tensor.values), tensor.bfloat16)
    values, scales, zeros = (reorder_rows(part) for part in (tensor.values, tensor.scales, tensor.zeros))
    return Grouped(values, scales, zeros, tensor.bits, tensor.group_size)


def _count_held_bytes(tensor: GgufTensor) -> int:
    if len(tensor.shape) == 1 or tensor.kind in KEPT:
        return tensor.size
    return math.prod(tensor.shape) * 9 // 8  # 8 bits, and a scale of 16 bits for 32 values, rounded up


def find_largest_kind(header: GgufHeader) -> int:
    """Return the tensor type that holds most of the matrices' elements."""
    sizes: dict[int, int] = {}
    for kind, elements in _matrices(header):
        sizes[kind] = sizes.get(kind, 0) + elements
    if not sizes:
        raise ModelRefused(f"{header.path.name}: it holds no matrices. Choose the model's file.")
    return max(sizes, key=sizes.__getitem__)


def _matrices(header: GgufHeader) -> Iterator[tuple[int, int]]:
    """Yield (type, elements) of the layers' matrices; of all matrices where there are no layers'."""
    for tensor in header.tensors:
        if len(tensor.shape) > 1 and tensor.name.startswith("blk."):  # experts have three axes
            yield tensor.kind, math.prod(tensor.shape)
