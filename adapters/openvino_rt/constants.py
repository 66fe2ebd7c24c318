"""Weights as constants of a graph, in the form in which the CPU plugin keeps them compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.eight_bits import eight_bits
from adapters.decoder.pieces import cut_rows
from adapters.decoder.spec import Dense, Grouped, Tensor, pack_pairs
from adapters.decoder.weight_file import Array, Matrices, Part
from adapters.openvino_rt.ir_file import IrFile

_SIGNED: Final = ("i4", "i8")


class Constants:
    """Makes constants of the tensors that `read` gives by name: matrices lie in `file`, and are read where they do not
    yet.

    Values around the middle of their range become signed ones without zeros: the form that NPUs compute with, and CPUs
    are faster with. The graph may be used only to be saved to `file`.
    """

    def __init__(self, read: Callable[[str], Tensor], file: IrFile) -> None:
        self._read, self._file = read, file
        self._matrices = Matrices(file, read, stacks, _list_arrays)

    def weight(self, names: Sequence[str]) -> Any:
        """Return a node that gives the tensors, stacked along their first axis, as float32.

        A 16-bit or quantised constant stays as it is in the file; the conversion behind it is recognised and folded
        into the matrix product. Matrices of 4 and of 8 bits are stacked in 8, vectors of different formats in float32.
        Raises ValueError for other tensors of different formats, and what `read` and a full disk do.
        """
        key = _join(names)
        part = self._file.find(key)
        if part is not None:
            return self._build(part)
        tensors = list(map(self._read, names))
        if not stacks(tensors):
            raise ValueError("tensors of different formats cannot be stacked")
        vectors = [tensor for tensor in tensors if isinstance(tensor, Dense) and tensor.values.ndim == 1]
        return _build_vector(vectors) if vectors else self._build(self._file.write(key, _list_arrays(key, tensors)))

    def weights(self, names: Sequence[str]) -> list[Any]:
        """Return one node for matrices that can be stacked, else one for each. Raises what `read` and a full disk
        do."""
        return [self._build(part) for part in self._matrices.keep(_join(names), names)]

    def _build(self, part: Part) -> Any:
        from openvino import opset13 as ops

        blocks = part.blocks
        made = list(map(self._file.build_constant, blocks))
        if len(blocks) == 1:
            return made[0] if blocks[0].kind == "f32" else ops.convert(made[0], "f32")
        offset = ops.convert(made[0], "f16")
        if blocks[0].kind not in _SIGNED:
            offset = ops.subtract(offset, ops.convert(made[1], "f16"))
        rows, groups, size = blocks[0].shape
        plain = ops.reshape(ops.multiply(offset, made[-1]), ops.constant(np.array([rows, groups * size])), False)
        return ops.convert(plain, "f32")


def _join(names: Sequence[str]) -> str:
    return "+".join(names)


def _list_arrays(key: str, tensors: Sequence[Tensor]) -> Iterator[Array]:
    """Yield the arrays of matrices that are stacked: of one in full its values, of a quantised one its values, its
    zeros where the values are not signed, and its scales."""
    dense = [tensor for tensor in tensors if isinstance(tensor, Dense)]
    if dense:
        yield _describe_dense(f"{key}/0", dense)
        return
    yield from _list_grouped(key, _even_bits([tensor for tensor in tensors if isinstance(tensor, Grouped)]))


def _even_bits(tensors: Sequence[Grouped]) -> Sequence[Grouped]:
    """Return tensors of one number of bits: 8 where there are several."""
    if len({tensor.bits for tensor in tensors}) == 1:
        return tensors
    return [tensor for tensor in map(eight_bits, tensors) if isinstance(tensor, Grouped)]


def _list_grouped(key: str, tensors: Sequence[Grouped]) -> Iterator[Array]:
    first, bits = tensors[0], tensors[0].bits
    rows, groups = sum(len(tensor.values) for tensor in tensors), first.zeros.shape[1]
    middle = np.uint8(1 << (bits - 1))
    signed = all(bool((tensor.zeros == middle).all()) for tensor in tensors)
    values = chain.from_iterable(cut_rows(tensor.values) for tensor in tensors)
    flipped = (np.bitwise_xor(piece, middle) for piece in values) if signed else values
    kind = f"{'i' if signed else 'u'}{bits}"
    yield Array(f"{key}/0", kind, (rows, groups, first.group_size), (_pack(tensor, bits) for tensor in flipped))
    if not signed:
        zeros = _stack([tensor.zeros for tensor in tensors])
        yield Array(f"{key}/1", kind, (rows, groups, 1), [_pack(zeros, bits)])
    yield Array(f"{key}/{1 if signed else 2}", "f16", (rows, groups, 1), (tensor.scales for tensor in tensors))


def _describe_dense(name: str, tensors: Sequence[Dense]) -> Array:
    first = tensors[0]
    kind = "bf16" if first.bfloat16 else f"f{8 * first.values.dtype.itemsize}"
    rows = sum(len(tensor.values) for tensor in tensors)
    pieces = chain.from_iterable(cut_rows(tensor.values) for tensor in tensors)
    return Array(name, kind, (rows, first.values.shape[1]), pieces)


def _build_vector(tensors: Sequence[Dense]) -> Any:
    import openvino as ov
    from openvino import opset13 as ops

    if len({_format(tensor) for tensor in tensors}) > 1:
        tensors = [Dense(tensor.float32()) for tensor in tensors]
    values = np.ascontiguousarray(_stack([tensor.values for tensor in tensors]))
    if not tensors[0].bfloat16:
        made = ops.constant(values)
        return made if values.dtype == np.float32 else ops.convert(made, "f32")
    tensor = ov.Tensor(values, ov.Shape(list(values.shape)), ov.Type.bf16)
    return ops.convert(ov.op.Constant(tensor, shared_memory=False), "f32")


def stacks(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors can be stacked: of one format, quantised to 4 and to 8 bits in groups of one size, or
    vectors."""
    if all(isinstance(tensor, Dense) and tensor.values.ndim == 1 for tensor in tensors):
        return True
    formats = {_format(tensor) for tensor in tensors}
    if all(isinstance(tensor, Grouped) for tensor in tensors):
        return len({size for _, size in formats}) == 1
    return len(formats) == 1


def _format(tensor: Tensor) -> tuple[object, ...]:
    if isinstance(tensor, Grouped):
        return (tensor.bits, tensor.group_size)
    return (tensor.values.dtype, tensor.bfloat16)


def _stack(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return the bytes of integers, of which each is in a byte of its own."""
    if bits == 8:
        return values
    flat = values.reshape(-1)
    return pack_pairs(np.pad(flat, (0, flat.size % 2)))
