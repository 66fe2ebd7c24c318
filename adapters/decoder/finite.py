"""Refuses weights that are no numbers: a model with one of them says nothing, and no measurement would say why."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ModelRefused
from adapters.decoder.spec import Dense, Grouped, Tensor

_BFLOAT16_EXPONENT, _BFLOAT16_FRACTION = np.uint16(0x7F80), np.uint16(0x007F)  # bits of a bfloat16
# A tensor of gigabytes is looked through in pieces. 16 MiB of float32. Bounds memory.
_CHUNK_ELEMENTS = 1 << 22
_Numbers = TypeVar("_Numbers", bound=NDArray[Any])
_Held = TypeVar("_Held", Dense, Grouped, Tensor)


def demand_finite_tensor(tensor: _Held) -> _Held:
    """Return a tensor. Raises ModelRefused where a value of it is NaN or an infinity."""
    if isinstance(tensor, Grouped):
        demand_finite(tensor.scales)
    else:
        demand_finite(tensor.values, bfloat16=tensor.bfloat16)
    return tensor


def demand_finite(values: _Numbers, *, bfloat16: bool = False) -> _Numbers:
    """Return numbers, which may be `bfloat16` as uint16. Raises ModelRefused where one is NaN or an infinity."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        if bfloat16:
            odd = (part & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT
            is_nan = (part[odd] & _BFLOAT16_FRACTION) != 0
        else:
            odd = ~np.isfinite(part)
            is_nan = np.isnan(part[odd])
        if odd.any():
            raise ModelRefused(f"it holds {'NaN' if is_nan.any() else 'an infinity'}")
    return values
