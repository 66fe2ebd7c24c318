"""A tiny hybrid on llama.cpp, whose slots cannot be rolled back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapters.contract import AdapterUnavailable, LoadedModel, LoadOptions, list_classes, silent
from adapters.registry import get, list_devices
from tests.support.tiny_llama_files import write_llama_file

HYBRID = "qwen35"
"""That the library which is installed without a word runs."""


def write_hybrid(directory: Path) -> Path:
    """Return the file; skip the test where llama.cpp is not installed."""
    try:
        list_devices("llama_cpp")
    except AdapterUnavailable as error:
        pytest.skip(str(error))
    return write_llama_file(directory, HYBRID)


def prepare_hybrid(directory: Path) -> Path:
    """Return where it is prepared."""
    target = directory / "prepared"
    target.mkdir()
    get("llama_cpp").prepare(write_hybrid(directory), target, silent)
    return target


def load_hybrid(prepared: Path, kv_cache_bytes: int = 16 << 20) -> LoadedModel:
    """Load it in the class of single rows, whose bits depend on nothing on any processor."""
    adapter = get("llama_cpp")
    asked = LoadOptions(slots=6, kv_cache_bytes=kv_cache_bytes, threads=1, max_batch_rows=64)
    chosen = list_classes(adapter, prepared, asked)[-1][0]
    return adapter.load(prepared, replace(asked, numerical_class=chosen), silent)
