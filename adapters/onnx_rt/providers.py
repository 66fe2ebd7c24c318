"""Execution providers of ONNX Runtime: which of them this adapter runs on, and what to do for the devices of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from adapters.contract import Unsupported
from device_profiles.device_names import CUDA_KIND, is_processor, split_device

PROVIDER: Final = "CPUExecutionProvider"
"""The only one that a session gets, so that nothing runs anywhere else unseen."""
# Log severity: failures reach us as exceptions, and a copy on standard error only confuses.
FATAL: Final = 4
_NPUS: Final = ("npu", "qnn", "vitisai")


def check_device_name(device: str, available: Sequence[str]) -> None:
    """Check a device against the providers that ONNX Runtime calls `available`. Raises Unsupported with the adapter to
    take, as keys and values lie in the host's memory here and the graph is in float32."""
    kind, which = split_device(device)
    if not is_processor(device):
        way_out = "set adapter: llama_cpp with a library for it (docs/gpus.md)"
        if kind == CUDA_KIND:
            way_out = "set adapter: torch_device, or llama_cpp with a library for CUDA (docs/gpus.md)"
        elif kind in _NPUS:
            way_out = "an Intel NPU is adapter openvino_rt's"
        raise Unsupported(f"{device}: onnx_rt runs on processors alone: {way_out}")
    if which:
        raise Unsupported(f"{device!r}: CPU has one device; write CPU")
    if PROVIDER not in available:
        raise Unsupported(f"this ONNX Runtime has no {PROVIDER}: pip install onnxruntime")
