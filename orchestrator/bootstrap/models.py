"""Loads models: finds or downloads the source, prepares it once, and puts it on its device."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adapters import registry
from adapters.contract import Exactness, LoadedModel, LoadOptions, ModelRefused, Precision
from adapters.invariance import measure_row_invariance
from adapters.model_source import resolve
from adapters.model_store import ModelStore
from adapters.tokenizer import Tokenizer
from adapters.tokenizer_recipe import TokenizerRecipe
from orchestrator.bootstrap.options import EngineOptions, ModelOptions

SIMULATED_PREFIX = "simulated:toy"

OnProgress = Callable[[str, float], None]


def silent(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model. `source` is where it came from, with the commit for a model of the hub; `tokenizer_dir` is ""
    for the simulated model's built-in tokenizer, and for a draft."""

    model: LoadedModel
    name: str
    source: str
    tokenizer_dir: str


@dataclass(frozen=True, slots=True)
class Target(Loaded):
    """A loaded target."""

    row_invariant: bool
    load_s: float


def load_target(options: EngineOptions, progress: OnProgress) -> Target:
    """Prepare (once) and load the target model. Raises what adapters raise."""
    started = time.perf_counter()
    loaded = load_model(options.model, options.max_running, progress, serves=True)
    progress("measure row invariance", -1.0)
    return Target(
        loaded.model,
        loaded.name,
        loaded.source,
        loaded.tokenizer_dir,
        row_invariant=measure_row_invariance(loaded.model),
        load_s=time.perf_counter() - started,
    )


def load_model(options: ModelOptions, slots: int, progress: OnProgress, *, serves: bool = False) -> Loaded:
    """Prepare (once) and load a model for so many sequences; `serves`: with its tokenizer, which a draft does not need
    and may not have. Raises what adapters raise."""
    adapter = registry.get_for(options.adapter, options.device, options.static)
    store = ModelStore(Path(options.store))
    if options.source.startswith(SIMULATED_PREFIX):
        name, source, file = options.name or "simulated-toy", options.source, None
        prepared = _simulated_source(options, store.root)
    else:
        file = resolve(options.source, Path(options.base), progress)
        name, source = options.name or file.name, file.source
        prepared = store.prepare(file, adapter, progress)
    model = adapter.load(
        prepared,
        LoadOptions(
            device="SIM" if options.adapter == "simulated" else options.device,
            exactness=Exactness(options.exactness),
            activations=None if options.activations == "auto" else Precision(options.activations),
            kv_cache_bytes=options.kv_cache_bytes,
            slots=slots,
            max_batch_rows=options.max_batch_rows,
            threads=options.threads,
            static=options.static,
        ),
        progress,
    )
    if not serves or file is None:
        return Loaded(model, name, source, "")
    _refuse_draft(model, source)
    return Loaded(model, name, source, str(store.prepare(file, TokenizerRecipe(), progress)))


def _refuse_draft(model: LoadedModel, source: str) -> None:
    spec = model.spec
    if spec.output_ids:
        model.close()
        raise ModelRefused(
            f"{source}: it is a draft, which can say {spec.outputs} of {spec.vocabulary_size} tokens only. "
            "Name it under `drafts`, and its target under `model`."
        )


def load_tokenizer(directory: str) -> Tokenizer:
    """Return the tokenizer of a loaded model."""
    return Tokenizer.load(Path(directory)) if directory else Tokenizer.bytes_only()


def device_name(adapter: str, device: str) -> str:
    """Return a device's full name, as its runtime tells it."""
    names = {found.name: found.full_name for found in registry.get(adapter).devices()}
    return names.get(device, device)


def _simulated_source(options: ModelOptions, root: Path) -> Path:
    """Write the script behind `simulated:toy?` where the adapter loads it from."""
    adapter = registry.get("simulated")
    script = options.source.removeprefix(SIMULATED_PREFIX).removeprefix("?")
    prepared = root / f"simulated-{zlib.crc32(script.encode()):08x}"
    prepared.mkdir(parents=True, exist_ok=True)
    source = prepared / "source.txt"
    source.write_text(script, encoding="utf-8")
    adapter.prepare(source, prepared, lambda stage, fraction: None)
    return prepared
