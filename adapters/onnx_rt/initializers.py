"""Weights as ONNX initializers in a file beside the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.pieces import cut_rows
from adapters.decoder.spec import Dense, Grouped, Tensor, Weights, pack_pairs
from adapters.decoder.weight_file import Array, Matrices, Part, WeightFile

ALIGNMENT_BYTES = 4096  # a page: the runtime maps the file
_TURNED_VALUES: Final = 1 << 23
"""Of a matrix that is turned so many are read at once: each time, all of its rows are passed over. 32 MiB of float32
(ADR 0107). Bounds memory."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix among the initializers: the names of its arrays, and its format. One in full has no `bits`, and neither
    scales nor zeros; zeros that are MatMulNBits' default are left out, too."""

    rows: int
    columns: int
    values: str
    scales: str = ""
    zeros: str = ""
    bits: int = 0
    group_size: int = 0


class Initializers:
    """A decoder's tensors by name, in `file`. Only what is not written there yet is read; `protos` describe all of them
    to the graph."""

    def __init__(self, weights: Weights, file: WeightFile, location: str) -> None:
        self.protos: list[Any] = []
        self._weights, self._file, self._location = weights, file, location
        self._matrices = Matrices(file, weights.tensor, stacks, _list_turned)

    def add_table(self, name: str, compute: Callable[[], NDArray[Any]]) -> None:
        """Add an array that is computed where it is not there yet. Raises OSError."""
        self._add(self._file.keep(name, lambda: _list_whole(name, compute())))

    def add_vector(self, name: str, *names: str) -> str:
        """Add the vector of this name, or those of `names` one behind the other, in float32. Returns the name."""
        read = self._weights.tensor
        self.add_table(name, lambda: np.concatenate([read(tensor).float32() for tensor in names or (name,)]))
        return name

    def add_matrices(self, name: str, names: Sequence[str]) -> list[Matrix]:
        """Add matrices that read the same input, as one where their formats allow it, else each by its own name."""
        return [self._add_matrix(part, names[0]) for part in self._matrices.keep(name, names)]

    def add_embedding(self) -> Matrix:
        part = self._file.keep("embedding", lambda: _list_rows("embedding", self._weights.tensor("embedding")))
        return self._add_matrix(part, "embedding")

    def add_head(self, embedding: Matrix) -> Matrix:
        """Add the output layer; a tied one in groups reads the embedding's values."""
        if not self._weights.spec.tied_embeddings:
            return self.add_matrices("head", ["head"])[0]
        part = self._file.keep("head", lambda: _list_tied("head", self._weights.tensor("embedding")))
        if not embedding.bits:
            return self._add_matrix(part, "embedding")
        scales, zeros, *_ = *self._add(part), ""
        return replace(embedding, scales=scales, zeros=zeros)

    def _add_matrix(self, part: Part, name: str) -> Matrix:
        columns, (values, *others) = self._weights.spec.shape_of(name)[1], self._add(part)
        block = part.blocks[0]
        if not others:
            return Matrix(block.size // 4 // columns, columns, values)
        scales, zeros, *_ = *others, ""
        rows, groups, group_bytes = block.shape
        group_size = columns // groups
        return Matrix(rows, columns, values, scales, zeros, 8 * group_bytes // group_size, group_size)

    def _add(self, part: Part) -> list[str]:
        """Describe what a part holds to the graph; returns the arrays' names."""
        from onnx import TensorProto, helper

        for block in part.blocks:
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(block.kind))
            proto = TensorProto(name=block.name, data_type=kind, dims=block.shape)
            proto.data_location = TensorProto.EXTERNAL
            for key, value in (("location", self._location), ("offset", block.offset), ("length", block.size)):
                proto.external_data.add(key=key, value=str(value))
            self.protos.append(proto)
        return [block.name for block in part.blocks]


def stacks(tensors: Sequence[Tensor]) -> bool:
    """Return whether matrices can be stacked: all in full, or quantised in one way."""
    return len({(tensor.bits, tensor.group_size) if isinstance(tensor, Grouped) else None for tensor in tensors}) == 1


def _list_whole(name: str, values: NDArray[Any]) -> Iterator[Array]:
    yield Array(name, values.dtype.name, values.shape, [values])


def _list_rows(name: str, tensor: Tensor) -> Iterator[Array]:
    """Yield the arrays of a table as Gather and GatherBlockQuantized take them."""
    if isinstance(tensor, Dense):
        rows = cut_rows(tensor.values)
        yield Array(name, "float32", tensor.values.shape, (replace(tensor, values=part).float32() for part in rows))
        return
    yield _describe_values(name, [tensor])
    yield from _list_whole(f"{name}.scales", tensor.scales.astype(np.float32)[:, :, None])
    if _has_zeros([tensor]):
        zeros = tensor.zeros if tensor.bits == 8 else tensor.zeros | (tensor.zeros << 4)
        yield from _list_whole(f"{name}.zeros", zeros[:, :, None])


def _list_turned(name: str, tensors: Sequence[Tensor]) -> Iterator[Array]:
    """Yield the arrays of stacked matrices as MatMul, which takes them turned, and MatMulNBits take them."""
    grouped = [tensor for tensor in tensors if isinstance(tensor, Grouped)]
    if grouped:
        yield _describe_values(name, grouped)
        yield from _list_scales(name, grouped)
        return
    dense = [tensor for tensor in tensors if isinstance(tensor, Dense)]
    rows, columns = sum(len(tensor.values) for tensor in dense), dense[0].values.shape[1]
    yield Array(name, "float32", (columns, rows), _turn(dense, columns, max(1, _TURNED_VALUES // rows)))


def _list_tied(name: str, tensor: Tensor) -> Iterator[Array]:
    """Yield what a head needs beside the embedding that it is tied to."""
    return _list_scales(name, [tensor]) if isinstance(tensor, Grouped) else _list_turned(name, [tensor])


def _turn(tensors: Sequence[Dense], columns: int, step: int) -> Iterator[NDArray[np.float32]]:
    for first in range(0, columns, step):
        parts = [replace(tensor, values=tensor.values[:, first : first + step]).float32() for tensor in tensors]
        yield (parts[0] if len(parts) == 1 else np.concatenate(parts)).T


def _describe_values(name: str, tensors: Sequence[Grouped]) -> Array:
    """Return the values as uint8, (rows, groups, bytes of a group), low halves first."""
    first = tensors[0]
    rows, groups = sum(len(tensor.values) for tensor in tensors), first.scales.shape[1]
    pieces = (part if first.bits == 8 else pack_pairs(part) for tensor in tensors for part in cut_rows(tensor.values))
    return Array(name, "uint8", (rows, groups, first.group_size * first.bits // 8), pieces)


def _list_scales(name: str, tensors: Sequence[Grouped]) -> Iterator[Array]:
    """Yield scales (rows, groups), and zeros (rows, bytes of a row) where they are not the default."""
    yield from _list_whole(f"{name}.scales", np.concatenate([tensor.scales for tensor in tensors]).astype(np.float32))
    if _has_zeros(tensors):
        zeros = np.concatenate([tensor.zeros for tensor in tensors])
        if tensors[0].bits == 4:
            zeros = pack_pairs(np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2))))
        yield from _list_whole(f"{name}.zeros", zeros)


def _has_zeros(tensors: Iterable[Grouped]) -> bool:
    return any(bool((tensor.zeros != 1 << (tensor.bits - 1)).any()) for tensor in tensors)
