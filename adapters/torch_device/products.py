"""Which product a weight gets: by device, number formats and tiles (measured: docs/adr/0015-torch.md, 0023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adapters.contract import Precision
from adapters.torch_device.linear import EightBitLinear, FourBitLinear, PackedLinear, PlainLinear, TiledLinear, packs
from adapters.torch_device.model import DTYPES
from adapters.torch_device.weights import Affine, Float8Rows, Quantised

_TILE_OUTPUTS = 16
"""torch's 4-bit kernel works in tiles of so many outputs."""


class Products:
    """Makes the products of one model, in tiles of `tile` rows each; 0: of as many as come."""

    def __init__(self, device: Any, activations: Precision, tile: int) -> None:
        self._device, self._activations, self._tile = device, activations, tile
        self._narrowed = self._widened = False

    def describe_storage(self, stored: str) -> str:
        """Return how weights that are stored in a format are held: its name, and the other format where they are."""
        other = self._widened or not (self._narrowed or stored == self._activations)
        return f"{stored}, held in {self._activations}" if other else stored

    def make(self, weight: Any, bias: Any) -> nn.Module:
        """Return the product over a weight: a tensor on the device, or a quantised matrix."""
        product = self._product(weight, bias)
        return TiledLinear(product, self._tile) if self._tile else product

    def _product(self, weight: Any, bias: Any) -> nn.Module:
        dtype = DTYPES[self._activations]
        if isinstance(weight, (Affine, Float8Rows)):
            narrow = self._narrow(weight, bias)
            if narrow is not None:
                self._narrowed = True
                return narrow
            self._widened = True
            weight = torch.from_numpy(weight.float32()).to(device=self._device, dtype=dtype)
        if self._device.type == "cpu" and packs(dtype):
            return PackedLinear(weight, bias)
        return PlainLinear(weight, bias)

    def _narrow(self, weight: Quantised, bias: Any) -> nn.Module | None:
        """Return the product over quantised weights as they are, None where there is none that is fit for use. In
        float32 torch's kernels for the CPU take ten times as long as the product over float32 weights."""
        if self._device.type == "cuda":
            from adapters.torch_device.torchao_linear import choose_config, make_torchao_linear

            config = choose_config(weight, self._activations, torch.cuda.get_device_capability(self._device))
            return None if config is None else make_torchao_linear(weight, bias, config, self._device)
        if isinstance(weight, Float8Rows) or self._activations is not Precision.BF16:
            return None
        values, scales = torch.from_numpy(weight.values), torch.from_numpy(weight.scales)
        if weight.offsets is None:
            return EightBitLinear(values, scales, bias)
        if len(values) % _TILE_OUTPUTS:
            return None
        return FourBitLinear(values, scales, torch.from_numpy(weight.offsets), bias)
