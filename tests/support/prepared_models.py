"""Small models, prepared and loaded by one adapter without a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapters.contract import Adapter, LoadOptions, silent


def prepare_beside(adapter: Adapter, source: Path) -> Path:
    """Prepare a model in a new directory beside its file, and return that."""
    target = source.parent / "prepared"
    target.mkdir()
    adapter.prepare(source, target, silent)
    return target


def load_small(adapter: Any, prepared: Path, **options: Any) -> Any:
    """Load a prepared model with four slots and 8 MiB of KV cache on a thread, but for these options."""
    small = {"slots": 4, "kv_cache_bytes": 8 << 20, "threads": 1}
    return adapter.load(prepared, LoadOptions(**(small | options)), silent)
