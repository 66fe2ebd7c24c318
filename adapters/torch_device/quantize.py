"""Quantises matrices with torchao, one at a time, into formats that torch and torchao multiply by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from adapters.contract import AdapterUnavailable, ModelRefused, Precision
from adapters.decoder.lattice import GROUP_SIZE
from adapters.decoder.pieces import make_by_rows
from adapters.decoder.spec import Grouped, Weights
from adapters.torch_device.failures import quieten
from adapters.torch_device.weights import Affine, Float8Rows, Quantised, Stored

INSTALL = "outrider extras install torch quantize"
LEAST_FP8 = (8, 9)
"""The compute capability of CUDA devices from which FP8 weights are offered."""
_OUTER = ("embedding", "head")


class QuantizedTorchWeights:
    """`weights`, which hold every matrix in full, with matrices of 4 or 8 bits, or in FP8.

    With 4 bits, embedding and output layer get 8, because small models lose most by these two.
    """

    def __init__(self, weights: Weights, precision: Precision) -> None:
        """Raises AdapterUnavailable when a library is missing."""
        self.spec = weights.spec
        self._weights, self._precision = weights, precision
        try:
            import torch

            quieten()
            import torchao.quantization
        except ImportError as error:
            raise AdapterUnavailable(f"{precision} weights need {error.name}: {INSTALL}") from None
        self._torch, self._library = torch, torchao.quantization

    def tensor(self, name: str) -> Stored:
        """Return the tensor of a canonical name. Raises ModelRefused."""
        tensor = self._weights.tensor(name)
        if isinstance(tensor, Grouped) or tensor.values.ndim == 1:
            return tensor
        columns = tensor.values.shape[1]
        quantise: Callable[[Any], Quantised] = self._groups_of_4_bits
        if self._precision is Precision.FP8:
            quantise = self._rows_of_float8
        elif self._precision is Precision.INT8 or name in _OUTER:
            quantise = self._rows_of_8_bits
        elif columns % GROUP_SIZE:
            raise ModelRefused(f"{name} has rows of {columns}, no multiple of {GROUP_SIZE}: ask for int8 instead")
        return make_by_rows(
            lambda rows: quantise(self._torch.from_numpy(replace(tensor, values=rows).float32())), tensor.values
        )

    def _rows_of_8_bits(self, matrix: Any) -> Affine:
        """Symmetric, a scale a row. The product takes scales in bfloat16, so values are rounded with such a scale."""
        quantise, by_row = self._library.Int8Tensor.from_hp, self._library.PerRow()
        scale = quantise(matrix, by_row).scale.bfloat16().float()
        made = quantise(matrix, by_row, scale=scale)
        return Affine(made.qdata.numpy(), made.scale.numpy(), None)

    def _rows_of_float8(self, matrix: Any) -> Float8Rows:
        """The format of torch's FP8 products, e4m3 with a scale a row."""
        made = self._library.Float8Tensor.from_hp(matrix.bfloat16(), granularity=self._library.PerRow())
        patterns = made.qdata.view(self._torch.uint8).numpy()
        return Float8Rows(patterns, made.scale.float().numpy())

    def _groups_of_4_bits(self, matrix: Any) -> Affine:
        """Asymmetric by groups, with offsets that are no whole steps (Q4_1's neither): (value - 8) * scale + offset."""
        from torchao.quantization.utils import (
            get_groupwise_affine_qparams,
            groupwise_affine_quantize_tensor_from_qparams,
        )

        scales, offsets = get_groupwise_affine_qparams(matrix, 4, GROUP_SIZE, dtype=self._torch.bfloat16)
        scales, offsets = scales.float(), offsets.float()
        values = groupwise_affine_quantize_tensor_from_qparams(matrix, scales, offsets, 4, GROUP_SIZE)
        return Affine(values.numpy().astype(np.uint8), scales.numpy(), offsets.numpy())
