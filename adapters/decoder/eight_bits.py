"""A model's weights with every matrix in 8 bits around a zero of 128: what devices of fixed shape compute with.

4-bit groups keep their values exactly: (q - zero) is between -15 and 15, and the scale stays. Everything else is
quantised by groups of 32 (lattice.requantise).
"""

from __future__ import annotations

import numpy as np

from adapters.decoder.lattice import GROUP_SIZE, requantise
from adapters.decoder.spec import Dense, Grouped, Tensor, Weights

_MIDDLE = 128  # the zero of unsigned 8-bit values
# Of groups whose values move into 8 bits exactly (ADR 0021).
_NARROW_BITS = 4


class EightBitWeights:
    """`adapters.decoder.spec.Weights` over other weights. Vectors, and rows that no group divides, stay as they are."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.spec, self.output_ids = weights.spec, weights.output_ids
        self.label = f"int8 (from {weights.label})"

    def tensor(self, name: str) -> Tensor:
        return eight_bits(self._weights.tensor(name))


def eight_bits(tensor: Tensor) -> Tensor:
    """Return a matrix in signed 8 bits; what has one axis, or rows that 32 does not divide, is returned unchanged."""
    if isinstance(tensor, Dense):
        if tensor.values.ndim == 1 or tensor.values.shape[1] % GROUP_SIZE:
            return tensor
        return requantise(tensor.float32())
    if tensor.bits == _NARROW_BITS:
        centred = tensor.values + np.uint8(_MIDDLE) - np.repeat(tensor.zeros, tensor.group_size, axis=1)
        return Grouped(centred, tensor.scales, np.full_like(tensor.zeros, _MIDDLE), 8, tensor.group_size)
    return tensor if (tensor.zeros == _MIDDLE).all() else requantise(tensor.float32())
