"""Matrix products whose rows do not depend on how many rows there are (measured: docs/adr/0015-torch.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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
    """The product that torch chooses itself."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self._weight, self._bias = weight, bias

    def forward(self, rows: Any) -> Any:
        """(..., inputs) to (..., outputs)."""
        return nn.functional.linear(rows, self._weight, self._bias)


class TiledLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Another product in tiles of `tile` rows: a library that picks its kernel by the shape then sees one shape."""

    def __init__(self, product: nn.Module, tile: int) -> None:
        super().__init__()
        self.product, self._tile = product, tile

    def forward(self, rows: Any) -> Any:
        """(1, a multiple of the tile, inputs) to (1, the same, outputs)."""
        if rows.shape[1] == self._tile:
            return self.product(rows)
        return torch.cat([self.product(part) for part in rows.split(self._tile, dim=1)], dim=1)


def packs(dtype: Any) -> bool:
    """Whether this build of torch packs weights of that type for oneDNN on this processor."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
