"""Which product a weight gets: by device, number formats and tiles (measured: docs/adr/0015-torch.md, 0023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adapters.contract import Precision
from adapters.decoder.pieces import cut_tensor
from adapters.decoder.spec import Dense
from adapters.torch_device.model import DTYPES
from adapters.torch_device.weights import Affine, Float8Rows, Quantised, Stored
from device_profiles.units import ceil_div

_TILE_OUTPUTS = 16
"""torch's 4-bit kernel works in tiles of so many outputs."""


class PackedLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product by oneDNN, its weights packed once for the processor.

    It gives the same bits for any number of rows but one, on any number of threads; in bfloat16 with AMX only in tiles.
    The product that torch chooses itself has classes by rows and threads.
    """

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def forward(self, rows: Any) -> Any:
        """(..., inputs) to (..., outputs)."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")


class EightBitLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product over 8-bit weights, `values` (outputs, inputs) and `scales` (outputs, 1), in bfloat16.

    It is torch's own kernel for the CPU. A row gets the same bits however many rows there are, on any number of
    threads.
    """

    def __init__(self, values: Any, scales: Any, bias: Any) -> None:
        super().__init__()
        self._values, self._bias = values.contiguous(), bias
        self._scales = scales.flatten().to(torch.bfloat16)

    def forward(self, rows: Any) -> Any:
        """(..., inputs) to (..., outputs), bfloat16."""
        flat = rows.reshape(-1, rows.shape[-1]).contiguous()
        made = torch._weight_int8pack_mm(flat, self._values, self._scales)
        made = made.view(*rows.shape[:-1], -1)
        return made if self._bias is None else made + self._bias


class FourBitLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The same over 4-bit weights in groups: `values` (outputs, inputs), `scales` and `offsets` (outputs, groups)."""

    def __init__(self, values: Any, scales: Any, offsets: Any, bias: Any) -> None:
        super().__init__()
        self._group, self._bias = values.shape[1] // scales.shape[1], bias
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 1)
        both = torch.stack([scales, offsets], dim=2).transpose(0, 1)  # (groups, outputs, 2)
        self._scales = both.to(torch.bfloat16).contiguous()

    def forward(self, rows: Any) -> Any:
        """(..., inputs) to (..., outputs), bfloat16."""
        flat = rows.reshape(-1, rows.shape[-1]).contiguous()
        made = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self._packed, self._group, self._scales)
        made = made.view(*rows.shape[:-1], -1)
        return made if self._bias is None else made + self._bias


class PlainLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self._weight, self._bias = weight, bias

    def forward(self, rows: Any) -> Any:
        """(..., inputs) to (..., outputs)."""
        return nn.functional.linear(rows, self._weight, self._bias)


class TiledLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Another product in tiles of `tile` rows: a library that picks its kernel by the shape then sees one shape. Rows
    are filled up to whole tiles, with no tile (0) to `least` of them."""

    def __init__(self, product: nn.Module, tile: int, least: int = 1) -> None:
        super().__init__()
        self.product, self._tile, self._least = product, tile, least

    def forward(self, rows: Any) -> Any:
        """(..., inputs) to (..., outputs)."""
        flat = rows.reshape(1, -1, rows.shape[-1])
        count = flat.shape[1]
        wanted = ceil_div(count, self._tile) * self._tile if self._tile else max(count, self._least)
        if wanted > count:
            flat = nn.functional.pad(flat, (0, 0, 0, wanted - count))
        parts = flat.split(self._tile, dim=1) if self._tile else (flat,)
        made = [self.product(part) for part in parts]
        joined = made[0] if len(made) == 1 else torch.cat(made, dim=1)
        return joined[:, :count].reshape(*rows.shape[:-1], joined.shape[-1])


def packs(dtype: Any) -> bool:
    """Whether this build of torch packs weights of that type for oneDNN on this processor."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widen(tensor: Stored, dtype: Any, device: Any) -> Any:
    """Return a tensor's values. Stored bfloat16 goes through no other format, and of a matrix few rows are in float32
    at a time: all of a vocabulary's take as much as the rest of a model."""
    if isinstance(tensor, Dense) and tensor.bfloat16:
        return torch.from_numpy(tensor.values).view(torch.bfloat16).to(device=device, dtype=dtype)
    if isinstance(tensor, Dense) and tensor.values.ndim != 2:
        return torch.from_numpy(tensor.float32()).to(device=device, dtype=dtype)
    shape = tensor.patterns.shape if isinstance(tensor, Float8Rows) else tensor.values.shape
    values = torch.empty(shape, dtype=dtype, device=device)
    for rows, part in cut_tensor(tensor):
        values[rows] = torch.from_numpy(part.float32()).to(dtype)
    return values


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
            weight = widen(weight, dtype, self._device)
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
