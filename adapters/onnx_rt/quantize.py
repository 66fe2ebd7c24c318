"""Quantises matrices with ONNX Runtime's own block quantiser, one at a time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from adapters.contract import AdapterUnavailable, ModelRefused
from adapters.decoder.lattice import GROUP_SIZE
from adapters.decoder.pieces import make_by_rows
from adapters.decoder.spec import Dense, Grouped, Tensor, Weights

_OUTER = ("embedding", "head")


class QuantizedOnnxWeights:
    """`weights` with the matrices that it holds in full in groups of 4 or 8 bits.

    With 4 bits, embedding and output layer get 8, because small models lose most by these two.
    """

    def __init__(self, weights: Weights, bits: Literal[4, 8]) -> None:
        """Raises AdapterUnavailable when a library is missing."""
        self._weights, self._bits = weights, bits
        self.spec, self.label, self.output_ids = weights.spec, weights.label, weights.output_ids
        self._quantizers = {4: _quantizer(4), 8: _quantizer(8)}

    def tensor(self, name: str) -> Tensor:
        tensor = self._weights.tensor(name)
        if isinstance(tensor, Grouped) or tensor.values.ndim == 1:
            return tensor
        columns = tensor.values.shape[1]
        if columns % GROUP_SIZE:
            raise ModelRefused(
                f"{name} has rows of {columns}, no multiple of {GROUP_SIZE}: it cannot be quantised here"
            )
        bits: Literal[4, 8] = 8 if name in _OUTER else self._bits
        return make_by_rows(lambda rows: self._quantise(replace(tensor, values=rows), bits), tensor.values)

    def _quantise(self, matrix: Dense, bits: Literal[4, 8]) -> Grouped:
        rows, columns = matrix.values.shape
        # The quantiser computes scales in the format of its input, and ours are float16.
        half = np.ascontiguousarray(matrix.float32().T.astype(np.float16))
        values, scales, zeros = self._quantizers[bits].qbits_block_quant(half)
        if bits == 4:
            values, zeros = (np.stack([part & 15, part >> 4], axis=-1) for part in (values, zeros))
        groups = columns // GROUP_SIZE
        return Grouped(
            values.reshape(rows, columns), scales, zeros.reshape(rows, -1)[:, :groups].copy(), bits, GROUP_SIZE
        )


def _quantizer(bits: int) -> Any:
    before = list(logging.root.handlers), logging.root.level
    try:
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            DefaultWeightOnlyQuantizer,
        )
    except ImportError as error:
        raise AdapterUnavailable(f"int4 and int8 weights need {error.name}: outrider extras install quantize") from None
    finally:  # importing it sets up logging for the whole process
        logging.root.handlers[:], logging.root.level = before
    return DefaultWeightOnlyQuantizer(DefaultWeightOnlyQuantConfig(block_size=GROUP_SIZE, bits=bits))
