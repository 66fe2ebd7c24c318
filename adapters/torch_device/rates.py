"""What torch multiplies on a device (see adapters/rates.py)."""

from __future__ import annotations

import torch

from adapters.rates import Product, measure_rates
from adapters.torch_device.model import DTYPES
from device_profiles.measured import DeviceRates
from device_profiles.profile import DeviceProfile, Precision


def measure_torch_rates(profile: DeviceProfile, threads: int) -> DeviceRates:
    device = torch.device(profile.name.lower())
    if threads and device.type == "cpu":
        torch.set_num_threads(threads)
    return measure_rates(profile.precisions, lambda *shape: _product(device, *shape))


def _product(device: torch.device, rows: int, inner: int, columns: int, precision: Precision) -> Product:
    dtype = DTYPES[precision]
    left = torch.randn(rows, inner, device=device).to(dtype)
    # A linear layer's weights, as models have them: (columns, inner).
    weights = torch.randn(columns, inner, device=device).to(dtype)

    def run() -> None:
        with torch.inference_mode():
            torch.nn.functional.linear(left, weights)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    return run
