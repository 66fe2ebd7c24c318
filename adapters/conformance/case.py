"""What the suite runs over: an adapter, a device, a model that it prepares, and how rows are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from filelock import FileLock
from numpy.typing import NDArray

from adapters.contract import (
    Adapter,
    AdapterError,
    AdapterUnavailable,
    Exactness,
    LoadedModel,
    LoadOptions,
    NumericalClass,
    Segment,
    StaticShapes,
    list_classes,
    silent,
)
from adapters.gguf_splits import list_beside
from adapters.hardware import runtime_version
from adapters.hf_directory import model_files
from adapters.invariance import find_variance
from adapters.model_source import ModelSource
from adapters.model_store import ModelStore
from adapters.variant import Variant
from device_profiles.profile import Precision

SLOTS = 18  # two more than the largest batch of the suite
# Prompts of the suite come in chunks of so many. Any number above its 128 does.
ROWS = 160
# Room for 8,192 positions of the default model in float32: 360 MiB.
_CONTEXT_BYTES = 400 << 20
_NOT_GGUF = b"GGUF" + b"\x03\0\0\0" * 20


def leave_clean(model: LoadedModel, slot: int) -> bool:
    """Poison nothing: it takes the adapter's own knowledge to write garbage into its KV cache."""
    return False


@dataclass(frozen=True)
class Case:
    """What is tested. `source`: a model file, or a Hugging Face directory; `weights`: in another format than its own,
    as a precision's name. `damaged` is written into a file `damaged.gguf` that `prepare` is to refuse in words that
    `damage_told` (a regular expression) finds. `poison` fills the KV blocks of a slot with NaN and returns True, where
    the adapter's author can: then what is discarded must reach nobody. `kv_cache_bytes` hold a whole context, and
    `small_blocks` are a small KV cache. `tier`: the first tier of numerical classes that counts. `static`: see
    StaticShapes."""

    adapter: str
    device: str
    source: str | Path
    weights: str = ""
    damaged: bytes = _NOT_GGUF
    damage_told: str = r"damaged\.gguf"
    poison: Callable[[LoadedModel, int], bool] = leave_clean
    kv_cache_bytes: int = _CONTEXT_BYTES
    small_blocks: int = 12
    tier: int = 0
    static: StaticShapes = field(default_factory=StaticShapes)


@dataclass(frozen=True)
class Prepared:
    """A case, its adapter, and the model as that has prepared it."""

    case: Case
    adapter: Adapter
    path: Path


def prepare_case(case: Case, adapter: Adapter, store: Path) -> Prepared:
    """Prepare a case's model in a store."""
    source = Path(case.source)
    files = model_files(source) if source.is_dir() else list_beside(source)
    file = ModelSource(path=source, name="conformance", source=str(source), files=files)
    recipe = Variant(adapter, Precision(case.weights) if case.weights else None)
    return Prepared(case, adapter, ModelStore(store).prepare(file, recipe, silent))


def load(prepared: Prepared, **options: Any) -> LoadedModel:
    """Load a prepared model, in the first class that keeps its bits where it is to keep them."""
    case = prepared.case
    chosen: dict[str, Any] = {
        "device": case.device,
        "static": case.static,
        "slots": SLOTS,
        "max_batch_rows": ROWS,
        "kv_cache_bytes": case.kv_cache_bytes,
    }
    wanted = LoadOptions(**(chosen | options))
    if wanted.exactness is Exactness.BIT and wanted.device == case.device:
        search = LoadOptions(**chosen)
        exact = exact_class(prepared.adapter, prepared.path, search, case.tier)
        wanted = replace(wanted, numerical_class=exact)
    return prepared.adapter.load(prepared.path, wanted, silent)


_EXACT: dict[tuple[str, ...], NumericalClass] = {}
_shared_classes: list[Path] = []


def share_classes(directory: Path) -> None:
    """Let `exact_class` keep what it finds in a directory, where other processes of the same run find it."""
    directory.mkdir(parents=True, exist_ok=True)
    _shared_classes[:] = [directory]


def exact_class(adapter: Adapter, path: Path, options: LoadOptions, first_tier: int = 0) -> NumericalClass:
    """Return the first class that keeps its bits on this processor, as the product finds it, whatever it costs."""
    settings = (str(path), str(first_tier), str(options.threads), str(options.kv_cache))
    key = (*_name_library(adapter, options.device), adapter.recipe(), *settings)
    if key not in _EXACT:
        _EXACT[key] = _find_shared(key, adapter, path, options, first_tier)
    return _EXACT[key]


def _name_library(adapter: Adapter, device: str) -> tuple[str, ...]:
    """Return the adapter's name, and what tells its library and the library's version from others."""
    names = [profile.full_name for profile in adapter.devices() if profile.name == device]
    try:
        return (adapter.name, runtime_version(adapter.name), *names)
    except AdapterUnavailable:  # it is of nobody's distribution
        return (adapter.name, *names)


def _find_shared(
    key: tuple[str, ...], adapter: Adapter, path: Path, options: LoadOptions, first_tier: int
) -> NumericalClass:
    """Return what another process has found, or find it while others wait. The number of threads is part of the key: it
    decides which kernels run."""
    if not _shared_classes:
        return _find_exact(adapter, path, options, first_tier)
    known = _shared_classes[0] / f"{hashlib.sha256(' '.join(key).encode()).hexdigest()[:16]}.json"
    with FileLock(known.with_suffix(".lock")):
        if known.exists():
            return msgspec.json.decode(known.read_bytes(), type=NumericalClass)
        exact = _find_exact(adapter, path, options, first_tier)
        known.write_bytes(msgspec.json.encode(exact))
        return exact


def _find_exact(adapter: Adapter, path: Path, options: LoadOptions, first_tier: int) -> NumericalClass:
    tiers = list_classes(adapter, path, options)
    candidates = [candidate for tier in tiers[min(first_tier, len(tiers) - 1) % len(tiers) :] for candidate in tier]
    passing = (
        candidate for candidate in candidates if _keeps_bits(adapter, path, replace(options, numerical_class=candidate))
    )
    exact = next(passing, None)
    if exact is None:
        pytest.fail(f"{adapter.name}: in none of its {len(candidates)} numerical classes a row keeps its bits")
    return exact


def _keeps_bits(adapter: Adapter, path: Path, options: LoadOptions) -> bool:
    try:
        model = adapter.load(path, options, silent)
    except AdapterError:
        return False
    held = not find_variance(model)
    model.close()
    return held


def text(model: LoadedModel, count: int, seed: int = 0) -> list[int]:
    """Return so many tokens, the same ones for the same seed."""
    most = min(256, model.spec.vocabulary_size)
    return [int(token) for token in np.random.default_rng(seed).integers(3, most, count)]


def bits(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows as the integers that their bits are: NaN equals itself then."""
    return np.ascontiguousarray(rows).view(np.uint32)


def run(model: LoadedModel, slot: int, tokens: list[int], chunks: list[int], start: int = 0) -> NDArray[Any]:
    """All rows of `tokens`, fed in chunks; a chunk of more rows than a forward may have takes several."""
    rows = []
    most = model.capabilities.max_batch_rows
    for chunk in chunks:
        for count in [most] * (chunk // most) + [chunk % most] * (chunk % most > 0):
            segment = Segment(slot, start, tokens[start : start + count], (0, count))
            rows.append(model.forward([segment]).logits.copy())
            start += count
    if start != len(tokens):
        raise ValueError(f"chunks of {start} tokens in all, for {len(tokens)}")
    return np.concatenate(rows)


def pieces(rows: int) -> list[int]:
    """Rows in as few forwards as they fit in."""
    return [ROWS] * (rows // ROWS) + [rows % ROWS] * (rows % ROWS > 0)
