"""What OpenVINO multiplies on a device (see adapters/rates.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adapters.openvino_rt.classes import HINTS
from adapters.rates import Product, measure_rates
from device_profiles.measured import DeviceRates
from device_profiles.profile import Precision


def measure_openvino_rates(core: Any, device: str, threads: int, precisions: Sequence[Precision]) -> DeviceRates:
    """Measure a device in those of its native `precisions` that are floating-point formats."""
    formats = [precision for precision in precisions if precision in HINTS]
    return measure_rates(formats, lambda *shape: _product(core, device, threads, *shape))


def _product(
    core: Any, device: str, threads: int, rows: int, inner: int, columns: int, precision: Precision
) -> Product:
    import openvino as ov
    from openvino import opset13

    rng = np.random.default_rng(1)
    weights = opset13.constant(rng.standard_normal((inner, columns), np.float32))
    left = opset13.parameter([rows, inner], np.float32)
    model = ov.Model([opset13.matmul(left, weights, False, False)], [left])
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": HINTS[precision], "PERFORMANCE_HINT": "LATENCY"}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    request = core.compile_model(model, device, settings).create_infer_request()
    request.set_input_tensor(ov.Tensor(rng.standard_normal((rows, inner), np.float32)))

    def run() -> None:
        request.infer()

    return run
