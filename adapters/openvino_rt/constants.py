"""Weights as constants of a graph, in the form in which the CPU plugin keeps them compressed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.eight_bits import eight_bits
from adapters.decoder.spec import Dense, Grouped, Tensor, pack_pairs


class Constants:
    """Makes constants that lie over numpy memory (mapped files among it) instead of copying it.

    OpenVINO does not hold that memory: a graph may be used only as long as this object lives. Values around the middle
    of their range become signed ones without zeros: the form that NPUs compute with, and CPUs are faster with.
    """

    def __init__(self) -> None:
        self._held: list[NDArray[Any]] = []

    def weight(self, tensors: Sequence[Tensor]) -> Any:
        """Return a node that gives the tensors, stacked along their first axis, as float32.

        A 16-bit or quantised constant stays as it is in memory; the conversion behind it is recognised and folded
        into the matrix product. Matrices of 4 and of 8 bits are stacked in 8, vectors of different formats in float32.
        Raises ValueError for other tensors of different formats: `stacks` says which go together.
        """
        dense = [tensor for tensor in tensors if isinstance(tensor, Dense)]
        grouped = [tensor for tensor in tensors if isinstance(tensor, Grouped)]
        if not stacks(tensors):
            raise ValueError("tensors of different formats cannot be stacked")
        if grouped:
            if len({tensor.bits for tensor in grouped}) > 1:
                grouped = [one for one in map(eight_bits, grouped) if isinstance(one, Grouped)]
            return self._build_grouped(grouped)
        if len({_format(tensor) for tensor in dense}) > 1:
            dense = [Dense(tensor.float32()) for tensor in dense]
        return self._dense(dense)

    def _dense(self, tensors: Sequence[Dense]) -> Any:
        import openvino as ov
        from openvino import opset13 as ops

        values = _stack([tensor.values for tensor in tensors])
        kind = ov.Type.bf16 if tensors[0].bfloat16 else ov.Type(values.dtype)
        made = self._constant(values, kind, values.shape)
        return made if kind == ov.Type.f32 else ops.convert(made, "f32")

    def _build_grouped(self, tensors: Sequence[Grouped]) -> Any:
        import openvino as ov
        from openvino import opset13 as ops

        first = tensors[0]
        values, zeros = _stack([tensor.values for tensor in tensors]), _stack([tensor.zeros for tensor in tensors])
        scales = _stack([tensor.scales for tensor in tensors])
        (rows, columns), groups = values.shape, zeros.shape[1]
        shape = (rows, groups, first.group_size)
        middle = np.uint8(1 << (first.bits - 1))
        signed = bool((zeros == middle).all())
        made = self._integers(np.bitwise_xor(values, middle) if signed else values, first.bits, shape, signed=signed)
        offset = ops.convert(made, "f16")
        if not signed:
            shift = self._integers(zeros, first.bits, (rows, groups, 1), signed=False)
            offset = ops.subtract(offset, ops.convert(shift, "f16"))
        plain = ops.multiply(offset, self._constant(scales, ov.Type.f16, (rows, groups, 1)))
        return ops.convert(ops.reshape(plain, ops.constant(np.array([rows, columns], np.int64)), False), "f32")

    def _integers(self, values: NDArray[np.uint8], bits: int, shape: Sequence[int], *, signed: bool) -> Any:
        """Return a constant of integers; `values` are their bit patterns, one in each byte."""
        import openvino as ov

        if bits == 4:
            return self._constant(_pack_values(values), ov.Type.i4 if signed else ov.Type.u4, shape)
        return self._constant(values.view(np.int8) if signed else values, ov.Type.i8 if signed else ov.Type.u8, shape)

    def _constant(self, values: NDArray[Any], kind: Any, shape: Sequence[int]) -> Any:
        import openvino as ov

        whole = np.ascontiguousarray(values)
        self._held.append(whole)
        return ov.op.Constant(ov.Tensor(whole, ov.Shape(list(shape)), kind), shared_memory=True)


def stacks(tensors: Sequence[Tensor]) -> bool:
    """Return whether `Constants.weight` can stack the tensors: of one format, quantised to 4 and to 8 bits in groups of
    one size, or vectors."""
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


def _pack_values(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    flat = values.reshape(-1)
    return pack_pairs(np.pad(flat, (0, flat.size % 2)))


def keep_compressed(path: Path) -> None:
    """Mark in a saved IR that 16-bit matrices are stored weights, as OpenVINO's own compression marks them.

    Without the mark, loading first widens every one of them to float32: four times the file in memory at once. The
    mark can be written in the file only: Python has no way to set it on a node. Raises OSError.
    """
    tree = ElementTree.parse(path)  # noqa: S314  # we have just written it
    layers = {layer.get("id"): layer for layer in tree.iter("layer")}
    for edge in tree.iter("edge"):
        source, target = layers[edge.get("from-layer")], layers[edge.get("to-layer")]
        if source.get("type") != "Const" or target.get("type") != "Convert":
            continue
        port = target.find("input/port")
        if port is not None and port.get("precision") in ("BF16", "FP16") and len(port.findall("dim")) > 1:
            marks = ElementTree.Element("rt_info")
            ElementTree.SubElement(marks, "attribute", name="decompression", version="0")
            target.insert(1, marks)
    tree.write(path)
