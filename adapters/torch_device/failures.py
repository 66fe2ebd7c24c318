"""torch's errors as the contract's."""

from __future__ import annotations

from typing import Any

from adapters.contract import DeviceLost, OutOfMemory

_OUT_OF_MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "alloc_failed")


def classify_torch_failure(error: BaseException) -> DeviceLost:
    """Return what a failure of a forward or of a load means: OutOfMemory, or DeviceLost for anything else."""
    import torch

    text = (str(error).strip().splitlines() or ["no reason given"])[0]
    kinds: tuple[Any, ...] = (MemoryError, torch.OutOfMemoryError)
    if isinstance(error, kinds) or any(word in str(error).lower() for word in _OUT_OF_MEMORY_WORDS):
        return OutOfMemory(f"torch ran out of memory: {text}")
    return DeviceLost(f"torch failed: {text}")
