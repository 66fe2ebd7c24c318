"""Matrix products whose rows do not depend on how many rows there are (measured: docs/adr/0015-torch.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PackedLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product by oneDNN, its weights packed once for the processor: the same bits for any number of rows but one,
    on any number of threads, where the product that torch chooses itself has classes by rows and threads."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def forward(self, rows: Any) -> Any:
        """(..., inputs) to (..., outputs)."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")


class TiledLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product in tiles of `tile` rows, 0 for all at once: a library that picks its kernel by the shape then sees
    only one shape."""

    def __init__(self, weight: Any, bias: Any, tile: int) -> None:
        super().__init__()
        self.weight, self._bias, self._tile = weight, bias, tile

    def forward(self, rows: Any) -> Any:
        """(1, a multiple of the tile, inputs) to (1, the same, outputs)."""
        if self._tile in (0, rows.shape[1]):
            return nn.functional.linear(rows, self.weight, self._bias)
        parts = [nn.functional.linear(part, self.weight, self._bias) for part in rows.split(self._tile, dim=1)]
        return torch.cat(parts, dim=1)


def packs(dtype: Any) -> bool:
    """Whether this build of torch packs weights of that type for oneDNN on this processor."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
