"""Makes models ready to be loaded: finds or downloads the source, and prepares it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from adapters import own_tokenizer, registry
from adapters.contract import (
    Adapter,
    FilesInPlace,
    LayerRange,
    LoadOptions,
    ModelRefused,
    Precision,
    TensorParallelAdapter,
    Unsupported,
    cut_layers,
    silent,
)
from adapters.decoder.facts import FileFacts
from adapters.device_check import check_device
from adapters.device_memory import read_host_memory
from adapters.model_checks import check_use
from adapters.model_digests import digest_simulated_model, parse_simulated_script
from adapters.model_identity import ModelIdentity
from adapters.model_source import ModelSource, check_model
from adapters.model_store import ModelChanged, ModelStore, StoreUnwritable, explain_errors
from adapters.own_tokenizer import TokenizerRecipe
from adapters.served_model import find_whole, keep_head
from adapters.simulated.script import Script
from adapters.store_bound import bound_store
from adapters.tokenizer import Tokenizer, load_tokenizer
from adapters.variant import Variant
from device_profiles.profile import DRAFT
from orchestrator.fitting.precision import choose_model_precision
from orchestrator.machine.devices import (
    class_mark_of,
    device_name,
    effective_device,
    find_device,
    threads_on,
)
from orchestrator.protocol.load_options import ModelOptions, ShardOptions
from orchestrator.worker.loading.pipeline import PipelineLoader, PlacedLayers, check_whole_runtime
from orchestrator.worker.shards.remote import RemoteRuntime
from policies.models.quantization import PrecisionChoice

SIMULATED_PREFIX = "simulated:toy"
_TRIES = 3
"""Of preparing a model whose files are replaced meanwhile. ADR 0103. Not tuned."""

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model's files, ready to be loaded. The fields are those of LoadedSource; `file` is None for the simulated
    model. `store`: which has read the files, so that it knows them."""

    adapter: Adapter | PipelineLoader
    name: str
    source: str
    file: ModelSource | None
    prepared: Path
    choice: PrecisionChoice | None
    split: str = ""
    store: ModelStore | None = None
    tokenizer_dir: str = ""
    identity: ModelIdentity | None = None


def prepare_alike(options: ModelOptions, progress: OnProgress, ahead: ExitStack, *, serves: bool) -> PreparedModel:
    """Return what `load_model` loads, with its tokenizer where it `serves`, and its content. All is of one and the same
    model: its files may be replaced at any time. `ahead`: see `prepare_model`. Raises what adapters raise, ModelChanged
    among it."""
    for _ in range(0 if options.shards else _TRIES - 1):  # other workers have layers of the first
        try:
            return _prepare_once(options, progress, ahead, serves=serves)
        except ModelChanged:
            ahead.close()
    return _prepare_once(options, progress, ahead, serves=serves)


def _prepare_once(options: ModelOptions, progress: OnProgress, ahead: ExitStack, *, serves: bool) -> PreparedModel:
    ready = prepare_model(options, progress, ahead)
    file = ready.file
    if file is None:
        return ready
    store = ready.store or ModelStore(Path(options.store))
    check_use(check_model(file, ready.adapter.name), ready.source, draft=not serves)
    tokenizer_dir = prepare_tokenizer_of(options, file, progress, store) if serves else ""
    head = keep_head(store, file, progress)
    digest = ready.prepared.parent.name
    others = [place.parent.name for place in (Path(tokenizer_dir) if tokenizer_dir else None, head) if place]
    if options.identity is not None:
        others.append(options.identity.digest)
    for other in others:
        if other != digest:
            raise _describe_change(ready.source, digest, other)
    identity = options.identity or ModelIdentity(options.source, digest, file.name, file.source)
    return replace(ready, tokenizer_dir=tokenizer_dir, identity=identity)


def prepare_model(options: ModelOptions, progress: OnProgress, ahead: ExitStack | None = None) -> PreparedModel:
    """Prepare (once) what `load_model` loads. `ahead`: who loads it at once, and when it is closed gives back what was
    read for that meanwhile and not taken. Raises what adapters raise."""
    return _prepare_shards(options, progress) if options.shards else _prepare_whole(options, progress, ahead)


def _prepare_shards(options: ModelOptions, progress: OnProgress) -> PreparedModel:
    """Prepare a model for each runtime and device of this process that has some of its layers; call the workers that
    have the rest."""
    endpoints = iter(options.shard_endpoints)
    by_place: dict[tuple[str, str], PreparedModel] = {}
    parts: list[PlacedLayers] = []
    others: list[RemoteRuntime] = []
    with ExitStack() as calls:
        for shard in options.shards:
            if shard.own:
                others.append(RemoteRuntime(next(endpoints), len(options.shards)))
                calls.callback(others[-1].close)
                parts.append(_place_remote(others[-1], shard))
                continue
            place = (shard.adapter, shard.device)
            if place not in by_place:
                mine = msgspec.structs.replace(options, adapter=shard.adapter, device=shard.device, shards=[])
                by_place[place] = prepare_part(mine, progress)
            parts.append(_place_local(by_place[place], shard, options.threads))
        base = next(iter(by_place.values()), None) or _find_source(options, progress)
        _refuse_other_copies(base, list(by_place.values()), others)
        counts = [shard.layers for shard in options.shards]
        ranges = cut_layers(counts, count_layers(options, base.file), base.name)
        calls.pop_all()
    placed = [replace(part, layers=layers) for part, layers in zip(parts, ranges, strict=True)]
    return replace(base, adapter=PipelineLoader(placed))


def _refuse_other_copies(
    base: PreparedModel, here: Sequence[PreparedModel], elsewhere: Sequence[RemoteRuntime]
) -> None:
    """Refuse layers of several models: each host prepares its own copy of the files. Raises ModelRefused, and
    ModelChanged where this process has several."""
    if base.file is None:
        return
    mine = base.prepared.parent.name
    for prepared in here:
        if prepared.prepared.parent.name != mine:
            raise _describe_change(base.source, mine, prepared.prepared.parent.name)
    for runtime in elsewhere:
        description = runtime.description
        if description.digest != mine:
            raise ModelRefused(
                f"{base.source}: the worker for layers on {description.where} has a copy with the digest "
                f"{description.digest}, and this process one with {mine}. Put the same files on both hosts, and run "
                "`outrider reload`."
            )


def _describe_change(source: str, first: str, second: str) -> ModelChanged:
    return ModelChanged(f"{source}: it changed while it was prepared, from the digest {first} to {second}. Try again.")


def _place_local(prepared: PreparedModel, shard: ShardOptions, threads: int) -> PlacedLayers:
    """Return layers of this process, which are not known yet."""
    adapter = check_whole_runtime(prepared.adapter)
    device = effective_device(shard.adapter, shard.device)
    profile = find_device(shard.adapter, shard.device)
    return PlacedLayers(
        *(adapter, device, shard.threads, LayerRange(0, 0), prepared.prepared),
        activations=prepared.choice.activations if prepared.choice else None,
        kv_cache=prepared.choice.kv_cache if prepared.choice else None,
        device_name=device_name(shard.adapter, device),
        mark=f"{class_mark_of(profile)}/{threads_on(profile, shard.threads or threads)}",
    )


def _place_remote(runtime: RemoteRuntime, shard: ShardOptions) -> PlacedLayers:
    """Return layers of another process, which are not known yet."""
    description = runtime.description
    return PlacedLayers(
        *(runtime, description.device, shard.threads, LayerRange(0, 0), Path(description.weights)),
        activations=Precision(description.activations) if description.activations else None,
        kv_cache=Precision(description.kv_cache) if description.kv_cache else None,
        device_name=description.device_name,
        mark=description.mark,
        where=description.where,
        pid=description.pid,
    )


def _find_source(options: ModelOptions, progress: OnProgress) -> PreparedModel:
    """Return a model whose layers are all in other processes: its files, with the tokenizer alone prepared."""
    first = options.shards[0]
    if options.source.startswith(SIMULATED_PREFIX):
        mine = msgspec.structs.replace(options, adapter=first.adapter, device=first.device, shards=[])
        return prepare_part(mine, progress)
    store = ModelStore(Path(options.store))
    file = find_model(options, store, progress)
    prepared = Path(prepare_tokenizer_of(options, file, progress, store))
    adapter = registry.get_for(first.adapter, first.device, options.static)
    return PreparedModel(adapter, options.name or file.name, file.source, file, prepared, None, store=store)


def prepare_part(options: ModelOptions, progress: OnProgress) -> PreparedModel:
    """Prepare (once) a model of which this process is to hold some layers. Raises what adapters raise."""
    return _prepare_whole(options, progress, part=True)


def _prepare_whole(
    options: ModelOptions, progress: OnProgress, ahead: ExitStack | None = None, *, part: bool = False
) -> PreparedModel:
    """Prepare a model for one device; `part`: which is to hold a part of it only. `ahead`: see `prepare_model`."""
    adapter = registry.get_for(options.adapter, options.device, options.static)
    check_device(options.adapter, options.device)  # before minutes of converting
    split = _describe_split(options, adapter)
    store = ModelStore(Path(options.store))
    if options.source.startswith(SIMULATED_PREFIX):
        prepared = _write_simulated_source(options, adapter, store.root)
        return PreparedModel(adapter, options.name or "simulated-toy", options.source, None, prepared, None)
    file = find_model(options, store, progress)
    alone = options.weights != DRAFT and not options.drafts and not options.loras  # another library may read those
    if ahead is not None and isinstance(adapter, FilesInPlace) and alone:
        _read_ahead(adapter, file, effective_device(options.adapter, options.device), ahead)
    sizes = check_model(file, adapter.name)  # before minutes of converting
    chosen = choose_model_precision(options, adapter, store, file, whole=not part and not split)
    is_linked = isinstance(adapter, FilesInPlace) and (chosen is None or chosen.choice.weights != DRAFT)
    needed_bytes = adapter.prepared_bytes if isinstance(adapter, FilesInPlace) and is_linked else None
    if isinstance(sizes, FileFacts) and sizes.linked_bytes is not None:
        needed_bytes = sizes.linked_bytes
    prepared = store.prepare(file, chosen.variant if chosen else Variant(adapter), progress, needed_bytes=needed_bytes)
    if options.store_max_bytes:
        with suppress(OSError, StoreUnwritable):  # a store that is only read
            for removed in bound_store(store, options.store_max_bytes):
                progress(f"removed {removed.parent.name}/{removed.name}, for store.max_size", -1.0)
    choice = chosen.choice if chosen else None
    return PreparedModel(adapter, options.name or file.name, file.source, file, prepared, choice, split, store)


def _read_ahead(adapter: FilesInPlace, file: ModelSource, device: str, ahead: ExitStack) -> None:
    """Begin to read a model that is one file, and fits into what is free."""
    with suppress(OSError):  # whoever reads it next says what is wrong
        if len(file.content) == 1 and not file.digest and file.path.stat().st_size < read_host_memory().free_bytes:
            ahead.callback(adapter.drop_ahead)
            adapter.read_ahead(file.path, device)


def find_model(options: ModelOptions, store: ModelStore, progress: OnProgress) -> ModelSource:
    """Return a model's files, whole: those at its place, or those that it is to have. Raises what `resolve` raises,
    and ModelReplaced."""
    return find_whole(store, options.source, Path(options.base), options.identity, progress, options.adapter)


def prepare_tokenizer_of(
    options: ModelOptions, file: ModelSource, progress: OnProgress, store: ModelStore | None = None
) -> str:
    """Prepare (once) a model's tokenizer; returns its directory. `store`: which has read the file, where one has.
    Raises what adapters raise."""
    return str((store or ModelStore(Path(options.store))).prepare(file, TokenizerRecipe(), progress))


def count_layers(options: ModelOptions, file: ModelSource | None) -> int:
    if file is None:
        return Script.parse(parse_simulated_script(options.source)).layers
    return check_model(file, options.adapter).layers


def load_own_tokenizer(options: ModelOptions, progress: OnProgress) -> Tokenizer:
    """Return a model's tokenizer without loading the model. Raises what adapters raise."""
    return load_tokenizer(prepare_own_tokenizer(options, progress))


def prepare_own_tokenizer(options: ModelOptions, progress: OnProgress = silent) -> str:
    store = ModelStore(Path(options.store))
    return str(
        own_tokenizer.prepare_own_tokenizer(store, options.source, Path(options.base), options.identity, progress)
    )


def _write_simulated_source(options: ModelOptions, adapter: Adapter, root: Path) -> Path:
    """Write the script behind `simulated:toy?` where the adapter loads it from. Raises StoreFull and
    StoreUnwritable."""
    script = parse_simulated_script(options.source)
    prepared = root / digest_simulated_model(options.source)
    if options.adapter != "simulated":  # another distribution's may write something else
        prepared = prepared.with_name(f"{prepared.name}-{options.adapter}")
    source = prepared / "source.txt"
    with explain_errors(root):
        prepared.mkdir(parents=True, exist_ok=True)
        source.write_text(script, encoding="utf-8")
        adapter.prepare(source, prepared, silent)
    return prepared


def _describe_split(options: ModelOptions, adapter: Adapter) -> str:
    """Return over what a model's layers are split, "" where they are not. Raises Unsupported, AdapterUnavailable."""
    if options.tensor_parallel == 1:
        return ""
    if not isinstance(adapter, TensorParallelAdapter):
        raise Unsupported(f"{adapter.name} cannot split layers; take another adapter, or leave tensor_parallel out")
    load = LoadOptions(
        device=options.device, threads=options.threads, static=options.static, tensor_parallel=options.tensor_parallel
    )
    places = adapter.list_rank_places(load)
    return f"tensor parallel over {len(places)} ranks: {' + '.join(places)}"
