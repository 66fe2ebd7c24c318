"""Products over quantised weights off the CPU, by torchao's own configurations (docs/adr/0023-torchao.md).

A matrix is widened, given to torchao on the device, and quantised there to the same values again: a format's grid holds
its own values. With 4 bits and in FP8 scales and offsets may move by the rounding of bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adapters.contract import AdapterUnavailable, Precision
from adapters.torch_device.failures import quieten
from adapters.torch_device.quantize import INSTALL, LEAST_FP8
from adapters.torch_device.weights import Affine, Float8Rows, Quantised

LEAST_INT4 = (8, 0)
"""The compute capability of torch's 4-bit kernel, which takes activations in bfloat16 alone."""
_FP8_MULTIPLE = 16
"""FP8 products take numbers of inputs and outputs that are multiples of this."""


def choose_config(weight: Quantised, activations: Precision, capability: tuple[int, int]) -> Any | None:
    """Return torchao's configuration for a matrix on a device of that compute capability, None where torchao has no
    product that is fit for use. Raises AdapterUnavailable without torchao."""
    library = _torchao()
    if isinstance(weight, Float8Rows):
        fits = not any(size % _FP8_MULTIPLE for size in weight.patterns.shape)
        if activations is not Precision.BF16 or capability < LEAST_FP8 or not fits:
            return None
        return library.Float8DynamicActivationFloat8WeightConfig(granularity=library.PerRow())
    if weight.offsets is None:
        return library.Int8WeightOnlyConfig()
    if activations is not Precision.BF16 or capability < LEAST_INT4:
        return None
    group = weight.values.shape[1] // weight.scales.shape[1]
    return library.Int4WeightOnlyConfig(group_size=group, int4_packing_format="tile_packed_to_4d")


def make_torchao_linear(weight: Quantised, bias: Any, config: Any, device: Any) -> nn.Module:
    """Return the product over a quantised matrix, as torchao makes it by a configuration."""
    library = _torchao()
    whole = torch.from_numpy(weight.float32()).to(device=device)
    linear = nn.Linear(whole.shape[1], whole.shape[0], bias=bias is not None, device="meta")
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    if isinstance(config, library.Int8WeightOnlyConfig) and isinstance(weight, Affine):
        # The configuration would find other scales: these were rounded to bfloat16. Its tensor takes them as they are.
        scales = torch.from_numpy(weight.scales).to(device=device)
        made = library.Int8Tensor.from_hp(whole, config.granularity, scale=scales)
        linear.weight = nn.Parameter(made, requires_grad=False)
        return linear
    linear.weight = nn.Parameter(whole.bfloat16(), requires_grad=False)
    library.quantize_(linear, config)
    return linear


def _torchao() -> Any:
    try:
        quieten()
        import torchao.quantization
    except ImportError as error:
        raise AdapterUnavailable(f"quantised weights on CUDA need {error.name}: {INSTALL}") from None
    return torchao.quantization
