"""Weights as ONNX initializers in a file beside the graph, written one by one so that memory holds one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.spec import Dense, Grouped, Tensor, pack_pairs

ALIGNMENT_BYTES = 4096  # a page: the runtime maps the file


class WeightFile:
    """Appends tensors to a file; `protos` describe them to the graph. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.protos: list[Any] = []
        self._name = path.name
        self._file = path.open("wb")

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *problem: object) -> None:
        self._file.close()

    def add(self, name: str, values: NDArray[Any]) -> str:
        """Write a tensor and return its name. Raises OSError."""
        from onnx import TensorProto, helper

        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT_BYTES))
        offset, raw = self._file.tell(), np.ascontiguousarray(values)
        self._file.write(raw.data)
        proto = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(raw.dtype), dims=raw.shape)
        proto.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self._name), ("offset", offset), ("length", raw.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        self.protos.append(proto)
        return name


def pack_values(tensor: Grouped) -> NDArray[np.uint8]:
    """Return the values as MatMulNBits takes them: uint8, (rows, groups, bytes of a group), low halves first."""
    groups = tensor.values.reshape(len(tensor.values), -1, tensor.group_size)
    return groups if tensor.bits == 8 else pack_pairs(groups)


def pack_zeros(tensor: Grouped) -> NDArray[np.uint8] | None:
    """Return the zeros as MatMulNBits takes them, (rows, bytes of a row); None where all are its default."""
    zeros = tensor.zeros
    if (zeros == 1 << (tensor.bits - 1)).all():
        return None
    if tensor.bits == 8:
        return zeros
    even = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
    return pack_pairs(even)


def stack_matrices(tensors: list[Tensor]) -> Tensor | None:
    """Stack matrices that read the same input into one; None where their formats differ."""
    first = tensors[0]
    if isinstance(first, Dense):
        parts = [tensor for tensor in tensors if isinstance(tensor, Dense)]
        return Dense(np.concatenate([part.float32() for part in parts])) if len(parts) == len(tensors) else None
    alike = [
        tensor
        for tensor in tensors
        if isinstance(tensor, Grouped) and (tensor.bits, tensor.group_size) == (first.bits, first.group_size)
    ]
    if len(alike) != len(tensors):
        return None
    values, scales, zeros = (
        np.concatenate([getattr(part, name) for part in alike]) for name in ("values", "scales", "zeros")
    )
    return Grouped(values, scales, zeros, first.bits, first.group_size)
