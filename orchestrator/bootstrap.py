"""The only place that names concrete classes: turns a configuration into an engine, a cluster and a worker."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from adapters import registry
from adapters.contract import Exactness, LoadedModel, LoadOptions, Precision
from adapters.grammar import GrammarCompiler
from adapters.invariance import measure_row_invariance
from adapters.model_source import pinned, resolve
from adapters.model_store import ModelStore
from adapters.tokenizer import Tokenizer
from adapters.tokenizer_recipe import TokenizerRecipe
from orchestrator.clock import SystemClock
from orchestrator.cluster.port import Cluster, Event, Progress, Ready, WorkerSpec
from orchestrator.config.load import store_directory
from orchestrator.config.model import ClusterConfig
from orchestrator.decoding.engine import DecodeEngine, Loaded
from orchestrator.decoding.grammar import Grammars
from orchestrator.decoding.loop import DecodeLoop
from orchestrator.drafting.port import Drafter
from orchestrator.drafting.suffix import SuffixDrafter

SIMULATED_PREFIX = "simulated:toy"
ENGINE_ENTRY = "orchestrator.bootstrap:build_engine"

Emit = Callable[[Event], None]


class DraftOptions(msgspec.Struct, frozen=True):
    """One drafter of the worker. `memory_bytes` bounds its store of earlier outputs."""

    method: str
    max_match: int
    memory_bytes: int


class EngineOptions(msgspec.Struct, frozen=True):
    """All that a worker must know; plain values, because they cross a process boundary."""

    source: str
    base: str
    store: str
    name: str
    adapter: str
    device: str
    exactness: str
    activations: str
    threads: int
    kv_cache_bytes: int
    max_running: int
    max_batch_rows: int
    max_itl_ms: float
    prefix_reuse: bool
    max_depth: int
    drafters: list[DraftOptions]


def engine_options(config: ClusterConfig, base: Path) -> EngineOptions:
    """Return what the target's worker needs; `base` is the directory that relative sources start from.

    A model of the hub is pinned to a commit here, so that a worker that starts again loads the same one. Raises
    ModelRefused or DownloadFailed when that is not possible.
    """
    off = config.speculation.method == "off" or config.speculation.num_speculative_tokens == 0
    return EngineOptions(
        source=pinned(config.model.source),
        base=str(base),
        store=str(store_directory(config)),
        name=config.model.name,
        adapter=config.model.adapter,
        device=config.model.device,
        exactness=config.model.exactness.value,
        activations=config.model.activations,
        threads=config.devices.threads,
        kv_cache_bytes=int(config.limits.kv_cache),
        max_running=config.limits.max_running,
        max_batch_rows=config.limits.max_batch_rows,
        max_itl_ms=config.limits.max_itl_ms,
        prefix_reuse=config.limits.prefix_reuse,
        max_depth=0 if off else config.speculation.num_speculative_tokens,
        drafters=[]
        if off
        else [
            DraftOptions(method=draft.method, max_match=draft.max_match, memory_bytes=int(draft.memory))
            for draft in config.drafts
        ],
    )


def worker_spec(options: EngineOptions) -> WorkerSpec:
    """Return how the target's worker is started."""
    return WorkerSpec(name="target", entry=ENGINE_ENTRY, options=msgspec.to_builtins(options))


def build_cluster(config: ClusterConfig) -> Cluster:
    """Return the cluster that the configuration asks for, not yet opened."""
    if config.cluster.runtime == "ray":
        from orchestrator.cluster.on_ray import RayCluster

        return RayCluster(config.cluster.address)
    from orchestrator.cluster.local import LocalCluster

    return LocalCluster()


def build_engine(options: dict[str, Any]) -> DecodeEngine:
    """Return the engine of a target worker. Called inside the worker process."""
    settings = msgspec.convert(options, EngineOptions)
    return DecodeEngine(lambda emit: _load_engine(settings, emit), SystemClock())


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded target. `source` is where it came from, with the commit for a model of the hub; `tokenizer_dir` is ""
    for the simulated model's built-in tokenizer."""

    model: LoadedModel
    name: str
    source: str
    tokenizer_dir: str
    row_invariant: bool
    load_s: float


def load_target(options: EngineOptions, progress: Callable[[str, float], None]) -> Target:
    """Prepare (once) and load the target model. Raises what adapters raise."""
    started = time.perf_counter()
    adapter = registry.get(options.adapter)
    store = ModelStore(Path(options.store))
    if options.source.startswith(SIMULATED_PREFIX):
        name, source, tokenizer_dir = options.name or "simulated-toy", options.source, ""
        prepared = _simulated_source(options, store.root)
    else:
        file = resolve(options.source, Path(options.base), progress)
        name, source = options.name or file.name, file.source
        tokenizer_dir = str(store.prepare(file, TokenizerRecipe(), progress))
        prepared = store.prepare(file, adapter, progress)
    model = adapter.load(
        prepared,
        LoadOptions(
            device="SIM" if options.adapter == "simulated" else options.device,
            exactness=Exactness(options.exactness),
            activations=None if options.activations == "auto" else Precision(options.activations),
            kv_cache_bytes=options.kv_cache_bytes,
            slots=options.max_running,
            max_batch_rows=options.max_batch_rows,
            threads=options.threads,
        ),
        progress,
    )
    progress("measure row invariance", -1.0)
    invariant = measure_row_invariance(model)
    return Target(model, name, source, tokenizer_dir, invariant, time.perf_counter() - started)


def load_tokenizer(directory: str) -> Tokenizer:
    """Return the tokenizer of a loaded target."""
    return Tokenizer.load(Path(directory)) if directory else Tokenizer.bytes_only()


def build_drafter(options: EngineOptions) -> Drafter | None:
    """Return the drafter, with an empty store of earlier outputs; None where speculation is off."""
    for draft in options.drafters:
        return SuffixDrafter(max_match=draft.max_match, memory_bytes=draft.memory_bytes)
    return None


def build_loop(target: Target, options: EngineOptions, drafter: Drafter | None) -> DecodeLoop:
    """Return a decode loop over a loaded target."""
    return DecodeLoop(
        target.model,
        drafter,
        SystemClock(),
        max_running=options.max_running,
        max_depth=options.max_depth,
        max_itl_ms=options.max_itl_ms,
        prefix_reuse=options.prefix_reuse,
        grammars=build_grammars(target),
    )


def build_grammars(target: Target) -> Grammars:
    """Return grammars over the target's tokens; its tokenizer is loaded for the first one."""
    return GrammarCompiler(lambda: load_tokenizer(target.tokenizer_dir), target.model.spec.vocabulary_size)


def _load_engine(options: EngineOptions, emit: Emit) -> Loaded:
    target = load_target(options, lambda stage, fraction: emit(Progress(stage, fraction)))
    drafter = build_drafter(options)
    loop = build_loop(target, options, drafter)

    def close() -> None:
        if drafter is not None:
            drafter.close()
        target.model.close()

    return Loaded(loop, _ready(target, options, loop.max_running), close)


def _ready(target: Target, options: EngineOptions, slots: int) -> Ready:
    caps, spec = target.model.capabilities, target.model.spec
    adapter = registry.get(options.adapter)
    names = {device.name: device.full_name for device in adapter.devices()}
    return Ready(
        model=target.name,
        vocabulary_size=spec.vocabulary_size,
        vocabulary_fingerprint=spec.vocabulary_fingerprint,
        context_tokens=caps.max_context_tokens,
        adapter=options.adapter,
        device=caps.device,
        device_name=names.get(caps.device, caps.device),
        weights=caps.weights,
        activations=caps.activations.value,
        kv_cache=caps.kv_cache.value,
        exactness=caps.exactness.value,
        row_invariant=target.row_invariant,
        slots=slots,
        kv_blocks=caps.total_blocks,
        block_tokens=caps.block_tokens,
        drafters=[draft.method for draft in options.drafters],
        max_depth=options.max_depth,
        tokenizer_dir=target.tokenizer_dir,
        pid=os.getpid(),
        load_s=target.load_s,
        # The store keeps what is prepared from a file in a directory that is named after the file's content.
        model_digest=Path(target.tokenizer_dir).parent.name or options.source,
        source=target.source,
    )


def _simulated_source(options: EngineOptions, root: Path) -> Path:
    """Write the script behind `simulated:toy?` where the adapter loads it from."""
    adapter = registry.get("simulated")
    script = options.source.removeprefix(SIMULATED_PREFIX).removeprefix("?")
    prepared = root / f"simulated-{zlib.crc32(script.encode()):08x}"
    prepared.mkdir(parents=True, exist_ok=True)
    source = prepared / "source.txt"
    source.write_text(script, encoding="utf-8")
    adapter.prepare(source, prepared, lambda stage, fraction: None)
    return prepared
