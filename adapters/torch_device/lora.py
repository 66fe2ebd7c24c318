"""LoRA adapters on torch: beside a product stand those of each adapter, for the rows of its sequences alone.

All rows of a forward go through an adapter's products, by the same kernels as through the model's, so that a row's bits
follow from itself. What is no row of the adapter's keeps the model's own values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from adapters.contract import LoraFile, ModelRefused
from adapters.peft import read_floats, read_peft
from adapters.torch_device.flex import send_array
from adapters.torch_device.plan import Indices

_ELSEWHERE = ("expert", "lm_head")
"""Parts of names of modules that are given other rows than a forward has: chosen ones, or those whose logits are
wanted."""


class LoraRows:
    """Which rows of the forward that runs are whose. `masks`: of each adapter that has some, (rows, 1), by its
    number."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.masks: dict[int, Any] = {}

    def set_numbers(self, numbers: Indices) -> None:
        """Let rows have the adapters of these numbers from 1 on, 0 is none; shape (rows,)."""
        self.masks = {
            int(number): send_array(numbers == number, self._device)[:, None]
            for number in np.unique(numbers[numbers > 0])
        }


class LoraLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A product, and behind it the two of each adapter that changes it, by the adapters' numbers."""

    def __init__(self, product: nn.Module, rows: LoraRows) -> None:
        super().__init__()
        self.product, self._rows = product, rows
        self.weight = getattr(product, "weight", None)  # classes look at its type
        self.pairs = nn.ModuleDict()

    def forward(self, rows: Any) -> Any:
        """(..., inputs) to (..., outputs)."""
        made = self.product(rows)
        for number, mask in self._rows.masks.items():
            if str(number) in self.pairs:
                added = made + self.pairs[str(number)](rows)
                made = torch.where(mask.view(*made.shape[:-1], 1), added, made)
        return made


def place_loras(
    network: Any, loras: Sequence[LoraFile], make: Callable[[Any, Any], nn.Module], dtype: Any, device: Any
) -> LoraRows:
    """Put adapters beside the products of a network, numbered from 1 on, and return what says which rows have them.
    `make(weight, bias)` makes products. Raises ModelRefused, and torch's errors when memory runs out."""
    rows = LoraRows(device)
    for number, lora in enumerate(loras, 1):
        directory = Path(lora.path)
        peft = read_peft(directory)
        for module, pair in peft.pairs.items():
            place, _, name = module.rpartition(".")
            try:
                parent = network.get_submodule(place)
                product = getattr(parent, name)
            except AttributeError:
                lacks = f"it changes {module}, which {type(network).__name__} does not have"
                raise ModelRefused(f"{directory.name}: {lacks}") from None
            if any(part in module for part in _ELSEWHERE):
                raise ModelRefused(f"{directory.name}: adapters of {module} are not served on torch")
            if not isinstance(product, LoraLinear):
                product = LoraLinear(product, rows)
                setattr(parent, name, product)
            scaled = read_floats(pair.wide) * np.float32(peft.alpha / peft.rank)
            weights = [torch.from_numpy(values.copy()) for values in (read_floats(pair.narrow), scaled)]
            moved = [weight.to(device=device, dtype=dtype) for weight in weights]
            product.pairs[str(number)] = nn.Sequential(*(make(weight, None) for weight in moved))
    return rows
