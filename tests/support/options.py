"""What a worker is told of a small model that a test has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.protocol.load_options import ModelOptions


def build_options(directory: Path, source: str, adapter: str = "openvino_rt", **changed: Any) -> ModelOptions:
    """Return options for a model in a directory, with a store beside it; `changed` fields are other than usual."""
    usual: dict[str, Any] = {
        "name": "",
        "device": "CPU",
        "exactness": "kernel",
        "weights": "auto",
        "activations": "auto",
        "kv_cache_precision": "auto",
        "threads": 1,
        "kv_cache_bytes": 1 << 24,
        "max_batch_rows": 64,
    }
    place = {"source": source, "base": str(directory), "store": str(directory / "store"), "adapter": adapter}
    return ModelOptions(**(usual | place | changed))
