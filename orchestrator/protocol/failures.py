"""What ends a worker, as control is told."""

from __future__ import annotations

from adapters.contract import (
    AdapterError,
    AdapterUnavailable,
    CapacityError,
    DeviceLost,
    GrammarFailed,
    MemoryCorrupt,
    ModelRefused,
    NoKernel,
    OutOfMemory,
    Overheated,
    RuntimeFailed,
    Unsupported,
)
from adapters.hf_hub import DownloadFailed
from adapters.model_store import ModelChanged, ModelReplaced, StoreFull, StoreUnwritable
from orchestrator.protocol.events import Failed, FailureKind

_KINDS: tuple[tuple[type[AdapterError], FailureKind], ...] = (
    (OutOfMemory, "out_of_memory"),
    (MemoryCorrupt, "ecc"),
    (Overheated, "thermal"),
    (NoKernel, "configuration"),
    (RuntimeFailed, "unknown"),
    (DeviceLost, "device_lost"),
)
_LOADING_KINDS: tuple[tuple[type[AdapterError], FailureKind], ...] = (
    *_KINDS,
    (StoreFull, "storage"),
    (StoreUnwritable, "storage"),
    (DownloadFailed, "network"),
    (CapacityError, "unknown"),
    (AdapterUnavailable, "not_installed"),
    (ModelReplaced, "model_replaced"),
    (ModelChanged, "unknown"),
    (ModelRefused, "configuration"),
    (Unsupported, "configuration"),
    (GrammarFailed, "configuration"),
)
_LASTING = ("configuration", "not_installed", "model_replaced")


def describe_loading_failure(error: AdapterError) -> Failed:
    """Return what became of a worker that could not load. What was asked for and can never work is not tried again."""
    kind = _find_kind(error, _LOADING_KINDS)
    return Failed(str(error), restartable=kind not in _LASTING, kind=kind)


def describe_failure(error: AdapterError | MemoryError) -> Failed:
    """Return what became of a worker that had loaded: whatever it was, it served, and a new one may."""
    if isinstance(error, MemoryError):
        return Failed(f"the process ran out of memory: {error}", restartable=True, kind="out_of_memory")
    return Failed(str(error), restartable=True, kind=_find_kind(error, _KINDS))


def _find_kind(error: AdapterError, kinds: tuple[tuple[type[AdapterError], FailureKind], ...]) -> FailureKind:
    return next((kind for known, kind in kinds if isinstance(error, known)), "unknown")
