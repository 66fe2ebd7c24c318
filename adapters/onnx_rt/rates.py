"""What ONNX Runtime multiplies on a device (see adapters/rates.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from adapters.onnx_rt.providers import choose_provider
from adapters.rates import Product, measure_rates
from device_profiles.measured import DeviceRates
from device_profiles.profile import Precision

_OPSET = 17
_FATAL = 4


def measure_onnx_rates(runtime: Any, device: str, threads: int) -> DeviceRates:
    """Measure a device in float32, the format of our graphs' activations. Raises Unsupported."""
    choice = choose_provider(device, runtime.get_available_providers())
    provider = (choice.provider, choice.options)
    return measure_rates([Precision.FP32], lambda *shape: _product(runtime, provider, threads, *shape[:3]))


def _product(runtime: Any, provider: Any, threads: int, rows: int, inner: int, columns: int) -> Product:
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(1)
    weights = numpy_helper.from_array(rng.standard_normal((inner, columns), np.float32), "weights")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["left", "weights"], ["out"])],
        "product",
        [helper.make_tensor_value_info("left", TensorProto.FLOAT, [rows, inner])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [rows, columns])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    settings = runtime.SessionOptions()
    settings.log_severity_level = _FATAL
    settings.intra_op_num_threads = threads
    session = runtime.InferenceSession(model.SerializeToString(), settings, providers=[provider])
    inputs = {"left": rng.standard_normal((rows, inner), np.float32)}

    def run() -> None:
        session.run(["out"], inputs)

    return run
