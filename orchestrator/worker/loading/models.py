"""Loads models: finds or downloads the source, prepares it once, and puts it on its device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import psutil

from adapters import own_tokenizer, registry
from adapters.contract import (
    ALL_LAYERS,
    Adapter,
    ClassesByModel,
    Exactness,
    FilesInPlace,
    LayerRange,
    LoadedModel,
    LoadOptions,
    ModelRefused,
    OutOfMemory,
    Precision,
    Unsupported,
    cut_layers,
)
from adapters.device_memory import read_host_memory
from adapters.devices_there import check_device
from adapters.model_checks import check_use
from adapters.model_digests import digest_simulated_model, parse_simulated_script
from adapters.model_identity import ModelIdentity
from adapters.model_source import ModelSource, check_model
from adapters.model_store import ModelChanged, ModelStore, explain_errors
from adapters.served_model import find_whole, keep_head
from adapters.simulated.script import Script
from adapters.tokenizer import Tokenizer, load_tokenizer
from adapters.tokenizer_recipe import TokenizerRecipe
from adapters.variant import Variant
from device_profiles.memory import MemoryPlan
from device_profiles.numerical_class import MeasuredClasses
from device_profiles.units import human_bytes
from orchestrator.fitting.device_layers import load_planned
from orchestrator.fitting.precision import choose_model_precision
from orchestrator.fitting.room import check_room
from orchestrator.machine.devices import (
    class_mark_of,
    device_name,
    effective_device,
    find_device,
    join_marks,
    threads_on,
)
from orchestrator.protocol.load_options import EngineOptions, ModelOptions, ShardOptions
from orchestrator.worker.engine.batch import count_logits_rows
from orchestrator.worker.loading.fallback import Attempt, execute_with_fallback
from orchestrator.worker.loading.memory import count_ahead_bytes, predict_memory
from orchestrator.worker.loading.numerical_classes import ClassQuestion, load_in_class
from orchestrator.worker.loading.pipeline import PipelineLoader, PlacedLayers, check_whole_runtime
from orchestrator.worker.loading.split import describe_split, mark_bits
from orchestrator.worker.shards.remote import RemoteRuntime
from policies.models.device_layers import LayerPlan
from policies.models.kv_shares import SHARES
from policies.models.quantization import PrecisionChoice

SIMULATED_PREFIX = "simulated:toy"
_LEAST_BATCH_ROWS = 16
_TRIES = 3
"""Of preparing a model whose files are replaced meanwhile."""

OnProgress = Callable[[str, float], None]


def silent(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A loaded model. `name` is what the API calls it, `published_name` what its files do. `source` is where it came
    from, with the commit for a model of the hub. `tokenizer_dir` is "" for the simulated model's built-in tokenizer,
    and for a draft. `choice` and `plan` are None for the simulated model.
    `classes`: what was found of the numerical classes, None for a draft that takes the first. `parts`: which layers
    are where, where several devices hold them, and `shards` a line for each of them. `split`: over what its layers are
    split, "" where they are not. `identity`: its content, None for the simulated model."""

    model: LoadedModel
    name: str
    published_name: str
    source: str
    tokenizer_dir: str
    prepared: Path
    choice: PrecisionChoice | None
    plan: MemoryPlan | None
    classes: MeasuredClasses | None
    shards: tuple[str, ...]
    parts: tuple[PlacedLayers, ...]
    split: str
    identity: ModelIdentity | None
    layers: LayerPlan | None

    @property
    def row_invariant(self) -> bool:
        """Whether no row's bits depend on its batch: it was measured, and is asked of exactness `bit`."""
        return self.classes is not None and self.model.capabilities.exactness is Exactness.BIT

    @property
    def class_fingerprint(self) -> str:
        """What tells the bits of this model from others' ("" where it was not measured)."""
        found = self.classes.finding if self.classes is not None else None
        return found.fingerprint if found is not None else ""


@dataclass(frozen=True, slots=True)
class LoadedTarget(LoadedSource):
    """A loaded target. `failed`: larger ones that the device had no memory for."""

    load_s: float
    failed: tuple[str, ...] = ()

    @classmethod
    def of(cls, loaded: LoadedSource, load_s: float = 0.0, failed: tuple[str, ...] = ()) -> LoadedTarget:
        """Return a loaded model as a target."""
        known = {name: getattr(loaded, name) for name in LoadedSource.__dataclass_fields__}
        return cls(**known, load_s=load_s, failed=failed)


def load_target(options: EngineOptions, progress: OnProgress, *, slots: int = 0, refresh: bool = False) -> LoadedTarget:
    """Prepare (once) and load the target model, for so many sequences (0: as many as may run at once); `refresh`: find
    its numerical class again. Raises what adapters raise."""
    started = time.perf_counter()

    def attempt(share: int) -> Attempt[LoadedSource]:
        smaller = shrink_model(options.model, share)
        running = max(1, (slots or options.max_running) // share)
        scored = count_logits_rows(smaller.max_batch_rows, running, options.deepest)
        load = partial(load_model, smaller, running, progress, serves=True, refresh=refresh, logits_rows=scored)
        return Attempt(_describe_size(smaller), partial(load, shrinks=share != SHARES[-1]))

    found = execute_with_fallback([attempt(share) for share in SHARES if share >= options.memory_share], (OutOfMemory,))
    killed = [_describe_size(shrink_model(options.model, share)) for share in SHARES if share < options.memory_share]
    failed = (*(f"{size}: the kernel killed the worker for want of memory" for size in killed), *found.failed)
    return LoadedTarget.of(found.value, time.perf_counter() - started, failed)


def _describe_size(options: ModelOptions) -> str:
    return f"loading with {human_bytes(options.kv_cache_bytes)} of KV cache and {options.max_batch_rows} rows a forward"


def shrink_model(options: ModelOptions, share: int) -> ModelOptions:
    """Return a model with a KV cache and forwards of one part in `share`: a shorter context, and smaller batches."""
    rows = max(_LEAST_BATCH_ROWS, options.max_batch_rows // share)
    return msgspec.structs.replace(
        options, kv_cache_bytes=options.kv_cache_bytes // share, max_batch_rows=min(options.max_batch_rows, rows)
    )


def load_model(
    options: ModelOptions,
    slots: int,
    progress: OnProgress,
    *,
    logits_rows: int | None = None,
    serves: bool = False,
    refresh: bool = False,
    shrinks: bool = False,
) -> LoadedSource:
    """Prepare (once) and load a model for so many sequences. Raises what adapters raise.

    `logits_rows`: of a forward, whose logits may be wanted (None: all). `serves`: with its tokenizer, which a draft
    does not need and may not have. `refresh`: find its numerical class again. `shrinks`: it is to be loaded only
    where all that it may ever hold is free, since there is a smaller way.
    """
    with ExitStack() as ahead:
        alike = _prepare_alike(options, progress, ahead, serves=serves)
        scored = options.max_batch_rows if logits_rows is None else logits_rows
        found = alike[0]

        def load(layers: LayerPlan | None) -> LoadedSource:
            how = {"serves": serves, "refresh": refresh, "shrinks": shrinks}
            return _load_prepared(options, slots, progress, alike, scored, layers, **how)

        if found.file is None or isinstance(found.adapter, PipelineLoader):
            return load(None)
        return load_planned(options, found.adapter, found.file, slots, load)


def _load_prepared(
    options: ModelOptions,
    slots: int,
    progress: OnProgress,
    alike: tuple[PreparedModel, str, ModelIdentity | None],
    logits_rows: int,
    layers: LayerPlan | None,
    *,
    serves: bool,
    refresh: bool,
    shrinks: bool,
) -> LoadedSource:
    """Load what `_prepare_alike` gave, with the planned layers on its device; see `load_model`."""
    found, tokenizer_dir, identity = alike
    adapter, file, prepared, choice = found.adapter, found.file, found.prepared, found.choice
    asked = LoadOptions(
        device=adapter.device
        if isinstance(adapter, PipelineLoader)
        else effective_device(options.adapter, options.device),
        exactness=Exactness(options.exactness),
        activations=choice.activations if choice else None,
        kv_cache=choice.kv_cache if choice else None,
        kv_cache_bytes=options.kv_cache_bytes,
        slots=slots,
        max_batch_rows=options.max_batch_rows,
        threads=options.threads,
        static=options.static,
        tensor_parallel=options.tensor_parallel,
        device_layers=ALL_LAYERS if layers is None or layers.has_all else layers.on_device,
    )
    predict = None
    if choice is not None and file is not None and layers is None and not isinstance(adapter, PipelineLoader):
        spec = check_model(file, adapter.name)
        predict = partial(predict_memory, adapter=adapter, spec=spec, prepared=prepared, logits_rows=logits_rows)
    plan = predict(asked) if predict else None
    if layers is not None:
        plan = layers.sum_host(psutil.Process().memory_info().rss)
    if plan is not None and shrinks:
        memory = read_host_memory()
        free = memory._replace(free_bytes=memory.free_bytes + count_ahead_bytes(adapter))
        check_room(f"{found.name} on {adapter.name} {asked.device}", plan, free)
    classes: MeasuredClasses | None = None
    if serves or asked.exactness is Exactness.BIT:
        question = _question(options, adapter, asked, prepared, file)
        model, classes = load_in_class(question, progress, refresh=refresh)
    else:
        model = adapter.load(prepared, asked, progress)
    if predict and plan:  # by its numerical class
        caps = model.capabilities
        known = replace(asked, max_batch_rows=caps.max_batch_rows, activations=caps.activations)
        plan = predict(known, process_bytes=plan.process)
    shards = adapter.describe(model) if isinstance(adapter, PipelineLoader) else ()
    parts = adapter.parts if isinstance(adapter, PipelineLoader) else ()
    published = file.name if file is not None else found.name
    told = (prepared, choice, plan, classes, shards, parts, found.split, identity, layers)
    return LoadedSource(model, found.name, published, found.source, tokenizer_dir, *told)


def _prepare_alike(
    options: ModelOptions, progress: OnProgress, ahead: ExitStack, *, serves: bool
) -> tuple[PreparedModel, str, ModelIdentity | None]:
    """Return what `load_model` loads, the directory of its tokenizer ("" where it has none) and its content, all of one
    and the same model: its files may be replaced at any time. `ahead`: see `prepare_model`. Raises what adapters raise,
    ModelChanged among it."""
    for _ in range(0 if options.shards else _TRIES - 1):  # other workers have layers of the first
        try:
            return _prepare_once(options, progress, ahead, serves=serves)
        except ModelChanged:
            ahead.close()
    return _prepare_once(options, progress, ahead, serves=serves)


def _prepare_once(
    options: ModelOptions, progress: OnProgress, ahead: ExitStack, *, serves: bool
) -> tuple[PreparedModel, str, ModelIdentity | None]:
    found = prepare_model(options, progress, ahead)
    file = found.file
    if file is None:
        return found, "", None
    store = found.store or ModelStore(Path(options.store))
    check_use(check_model(file, found.adapter.name), found.source, draft=not serves)
    tokenizer_dir = prepare_tokenizer_of(options, file, progress, store) if serves else ""
    head = keep_head(store, file, progress)
    digest = found.prepared.parent.name
    others = [place.parent.name for place in (Path(tokenizer_dir) if tokenizer_dir else None, head) if place]
    if options.identity is not None:
        others.append(options.identity.digest)
    for other in others:
        if other != digest:
            raise _describe_change(found.source, digest, other)
    return found, tokenizer_dir, options.identity or ModelIdentity(options.source, digest, file.name, file.source)


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
                others.append(RemoteRuntime(next(endpoints)))
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
    for one in here:
        if one.prepared.parent.name != mine:
            raise _describe_change(base.source, mine, one.prepared.parent.name)
    for runtime in elsewhere:
        said = runtime.description
        if said.digest != mine:
            raise ModelRefused(
                f"{base.source}: the worker for layers on {said.where} has a copy with the digest {said.digest}, and "
                f"this process one with {mine}. Put the same files on both hosts, and run `outrider reload`."
            )


def _describe_change(source: str, first: str, second: str) -> ModelChanged:
    return ModelChanged(f"{source}: it changed while it was prepared, from the digest {first} to {second}. Try again.")


def _place_local(found: PreparedModel, shard: ShardOptions, threads: int) -> PlacedLayers:
    """Return layers of this process, which are not known yet."""
    adapter = check_whole_runtime(found.adapter)
    device = effective_device(shard.adapter, shard.device)
    there = find_device(shard.adapter, shard.device)
    return PlacedLayers(
        *(adapter, device, shard.threads, LayerRange(0, 0), found.prepared),
        activations=found.choice.activations if found.choice else None,
        kv_cache=found.choice.kv_cache if found.choice else None,
        device_name=device_name(shard.adapter, device),
        mark=f"{class_mark_of(there)}/{threads_on(there, shard.threads or threads)}",
    )


def _place_remote(runtime: RemoteRuntime, shard: ShardOptions) -> PlacedLayers:
    """Return layers of another process, which are not known yet."""
    said = runtime.description
    return PlacedLayers(
        *(runtime, said.device, shard.threads, LayerRange(0, 0), Path(said.weights)),
        activations=Precision(said.activations) if said.activations else None,
        kv_cache=Precision(said.kv_cache) if said.kv_cache else None,
        device_name=said.device_name,
        mark=said.mark,
        where=said.where,
        pid=said.pid,
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


def count_layers(options: ModelOptions, file: ModelSource | None) -> int:
    """Return how many layers a model has. Raises ModelRefused."""
    if file is None:
        return Script.parse(parse_simulated_script(options.source)).layers
    return check_model(file, options.adapter).layers


def prepare_part(options: ModelOptions, progress: OnProgress) -> PreparedModel:
    """Prepare (once) a model of which this process is to hold some layers. Raises what adapters raise."""
    return _prepare_whole(options, progress, part=True)


def _prepare_whole(
    options: ModelOptions, progress: OnProgress, ahead: ExitStack | None = None, *, part: bool = False
) -> PreparedModel:
    """Prepare a model for one device; `part`: which is to hold a part of it only. `ahead`: see `prepare_model`."""
    adapter = registry.get_for(options.adapter, options.device, options.static)
    check_device(options.adapter, options.device)  # before minutes of converting
    split = describe_split(options, adapter)
    store = ModelStore(Path(options.store))
    if options.source.startswith(SIMULATED_PREFIX):
        prepared = _write_simulated_source(options, adapter, store.root)
        return PreparedModel(adapter, options.name or "simulated-toy", options.source, None, prepared, None)
    file = find_model(options, store, progress)
    if ahead is not None and isinstance(adapter, FilesInPlace):
        _read_ahead(adapter, file, effective_device(options.adapter, options.device), ahead)
    check_model(file, adapter.name)  # before minutes of converting
    chosen = choose_model_precision(options, adapter, store, file, whole=not part and not split)
    needed_bytes = adapter.prepared_bytes if isinstance(adapter, FilesInPlace) else None
    prepared = store.prepare(file, chosen.variant if chosen else Variant(adapter), progress, needed_bytes=needed_bytes)
    choice = chosen.choice if chosen else None
    return PreparedModel(adapter, options.name or file.name, file.source, file, prepared, choice, split, store)


def _read_ahead(adapter: FilesInPlace, file: ModelSource, device: str, ahead: ExitStack) -> None:
    """Begin to read a model that is one file, and fits into what is free."""
    with suppress(OSError):  # whoever reads it next says what is wrong
        if len(file.content) == 1 and not file.digest and file.path.stat().st_size < read_host_memory().free_bytes:
            ahead.callback(adapter.drop_ahead)
            adapter.read_ahead(file.path, device)


def _question(
    options: ModelOptions,
    adapter: Adapter | PipelineLoader,
    asked: LoadOptions,
    prepared: Path,
    file: ModelSource | None,
) -> ClassQuestion:
    try:
        if isinstance(adapter, PipelineLoader):
            mark = join_marks([*(part.mark for part in adapter.parts), *adapter.shards])
            threads = options.threads
        else:
            device = find_device(options.adapter, options.device)
            mark, threads = mark_bits(device, options, asked.device_layers), threads_on(device, options.threads)
            other = adapter.name_other_library(prepared) if isinstance(adapter, ClassesByModel) else ""
            mark = join_marks([mark, other]) if other else mark
    except Unsupported:  # a name that the runtime takes and does not list
        mark, threads = "", options.threads
    return ClassQuestion(
        adapter=adapter,
        prepared=prepared,
        asked=asked,
        fingerprint=mark,
        model=options.name or (file.name if file is not None else "simulated-toy"),
        model_digest=prepared.parent.name if file is not None else prepared.name,
        weights=prepared.name if file is not None else "",
        threads=threads,
        file=file.path if file is not None and not file.digest else None,
        store=Path(options.store),
        # Nothing of a simulated model crashes for good, or is worth a process.
        isolated=file is not None and not isinstance(adapter, PipelineLoader),
        soon=isinstance(adapter, FilesInPlace),
    )


def tokenizer_of(options: ModelOptions, progress: OnProgress) -> Tokenizer:
    """Return a model's tokenizer without loading the model. Raises what adapters raise."""
    return load_tokenizer(prepare_own_tokenizer(options, progress))


def prepare_own_tokenizer(options: ModelOptions, progress: OnProgress = silent) -> str:
    """See `adapters.own_tokenizer.prepare_own_tokenizer`."""
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
        adapter.prepare(source, prepared, lambda stage, fraction: None)
    return prepared
