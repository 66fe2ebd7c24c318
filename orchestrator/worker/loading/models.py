"""Puts prepared models onto their devices: in a numerical class, and smaller where memory is short."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import psutil

from adapters.contract import (
    ALL_LAYERS,
    AdapterError,
    ClassesByModel,
    Exactness,
    FilesInPlace,
    LoadedModel,
    LoadOptions,
    LoraFile,
    OutOfMemory,
    Unsupported,
)
from adapters.device_memory import read_host_memory
from adapters.lora import find_lora, list_lora_runtimes, open_lora
from adapters.model_identity import ModelIdentity, ServedClass
from adapters.model_source import check_model
from adapters.model_store import explain_errors
from device_profiles.device_names import is_processor
from device_profiles.memory import MeasuredMemory, MemoryPlan, MemoryUse, correct_plan
from device_profiles.numerical_class import MeasuredClasses
from device_profiles.profile import DeviceProfile
from device_profiles.units import human_bytes
from orchestrator.fitting.device_layers import load_planned
from orchestrator.fitting.profile_keys import profiles_in
from orchestrator.fitting.room import check_room
from orchestrator.machine.devices import (
    class_mark_of,
    effective_device,
    find_device,
    join_marks,
    threads_on,
)
from orchestrator.protocol.load_options import EngineOptions, ModelOptions
from orchestrator.worker.engine.batch import count_logits_rows
from orchestrator.worker.loading.memory import MemoryMeter, count_ahead_bytes, predict_memory
from orchestrator.worker.loading.numerical_classes import ClassQuestion, load_in_class
from orchestrator.worker.loading.pipeline import PipelineLoader, PlacedLayers
from orchestrator.worker.loading.prepared import OnProgress, PreparedModel, prepare_alike
from policies.models.device_layers import LayerPlan
from policies.models.kv_shares import SHARES
from policies.models.quantization import PrecisionChoice

_log = logging.getLogger(__name__)
T = TypeVar("T")
# ADR 0053. Not tuned.
_LEAST_BATCH_ROWS = 16


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """One way to make a call: on which device, or how small."""

    title: str
    call: Callable[[], T]


@dataclass(frozen=True, slots=True)
class FallbackResult(Generic[T]):
    """The result, by which attempt, and why the ones before it failed."""

    value: T
    title: str
    failed: tuple[str, ...]


def execute_with_fallback(
    attempts: Sequence[Attempt[T]], retry_on: tuple[type[AdapterError], ...]
) -> FallbackResult[T]:
    """Make a call in the first way that works; each failure is logged.

    Other ways are tried only where the first fails in the manner of `retry_on`. Where all fail, its failure is raised:
    that is about what was asked for.
    """
    first, *others = attempts
    try:
        return FallbackResult(first.call(), first.title, ())
    except retry_on as error:
        wanted = error
    failed = [f"{first.title}: {wanted}"]
    for attempt in others:
        _log.warning("%s; now %s", failed[-1], attempt.title)
        try:
            return FallbackResult(attempt.call(), attempt.title, tuple(failed))
        except AdapterError as error:
            failed.append(f"{attempt.title}: {error}")
    _log.error("%s; no other way is left", failed[-1])
    raise wanted


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A loaded model, a target's or a draft's. `name` is what the API calls it, `published_name` what its files do.
    `source` is where it came from, with the commit for a model of the hub. `tokenizer_dir` is "" for the simulated
    model's built-in tokenizer, and for a draft. `choice` and `plan` are None for the simulated model.
    `classes`: what was found of the numerical classes, None for a draft that takes the first. `parts`: which layers
    are where, where several devices hold them, and `shards` a line for each of them. `split`: over what its layers are
    split, "" where they are not. `identity`: its content, None for the simulated model. `load_s` and `failed` are a
    target's: how long it took, and larger ones that the device had no memory for. `meter` compares the plan with what
    the worker holds, None where nothing is planned or what it holds is not this process's."""

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
    meter: MemoryMeter | None = None
    load_s: float = 0.0
    failed: tuple[str, ...] = ()

    @property
    def row_invariant(self) -> bool:
        """Whether no row's bits depend on its batch: it was measured, and is asked of exactness `bit`."""
        return self.classes is not None and self.model.capabilities.exactness is Exactness.BIT

    @property
    def class_fingerprint(self) -> str:
        """What tells the bits of this model from others' ("" where it was not measured)."""
        finding = self.classes.finding if self.classes is not None else None
        return finding.fingerprint if finding is not None else ""


def load_target(options: EngineOptions, progress: OnProgress, *, slots: int = 0, refresh: bool = False) -> LoadedSource:
    """Prepare (once) and load the target model, for so many sequences (0: as many as may run at once); `refresh`: find
    its numerical class again. Raises what adapters raise."""
    started = time.perf_counter()

    def attempt(share: int) -> Attempt[LoadedSource]:
        smaller = shrink_model(options.model, share)
        running = max(1, (slots or options.max_running) // share)
        scored = count_logits_rows(smaller.max_batch_rows, running, options.deepest)
        load = partial(load_model, smaller, running, progress, serves=True, refresh=refresh, logits_rows=scored)
        return Attempt(_describe_size(smaller), partial(load, shrinks=share != SHARES[-1]))

    attempts = [attempt(share) for share in SHARES if share >= options.memory_share]
    loaded = execute_with_fallback(attempts, (OutOfMemory,))
    killed = [_describe_size(shrink_model(options.model, share)) for share in SHARES if share < options.memory_share]
    failed = (*(f"{size}: the kernel killed the worker for want of memory" for size in killed), *loaded.failed)
    return replace(loaded.value, load_s=time.perf_counter() - started, failed=failed)


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
        ready = prepare_alike(options, progress, ahead, serves=serves)
        scored = options.max_batch_rows if logits_rows is None else logits_rows

        def load(layers: LayerPlan | None) -> LoadedSource:
            how = {"serves": serves, "refresh": refresh, "shrinks": shrinks}
            return _load_prepared(options, slots, progress, ready, scored, layers, **how)

        if ready.file is None or isinstance(ready.adapter, PipelineLoader):
            return load(None)
        return load_planned(options, ready.adapter, ready.file, slots, load)


def _load_prepared(
    options: ModelOptions,
    slots: int,
    progress: OnProgress,
    ready: PreparedModel,
    logits_rows: int,
    layers: LayerPlan | None,
    *,
    serves: bool,
    refresh: bool,
    shrinks: bool,
) -> LoadedSource:
    adapter, choice = ready.adapter, ready.choice
    pipeline = adapter if isinstance(adapter, PipelineLoader) else None
    wanted = LoadOptions(
        device=pipeline.device if pipeline else effective_device(options.adapter, options.device),
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
        loras=_open_loras(options, ready) if serves else (),
    )
    predict = None
    if choice is not None and ready.file is not None and layers is None and not isinstance(adapter, PipelineLoader):
        spec = check_model(ready.file, adapter.name)
        predict = partial(predict_memory, adapter=adapter, spec=spec, prepared=ready.prepared, logits_rows=logits_rows)
    question, plan, last = None, predict(wanted) if predict else None, None
    if plan is not None:
        question = _question(options, ready, wanted)
        if serves:  # a draft lies beside a target in its process, and what that held says nothing of another
            last = profiles_in(Path(options.store)).find_memory(_key_memory(question))
        plan = correct_plan(plan, last)
    if layers is not None:
        plan = layers.sum_host(psutil.Process().memory_info().rss)
    if plan is not None and shrinks:
        memory = read_host_memory()
        free = memory._replace(free_bytes=memory.free_bytes + count_ahead_bytes(adapter))
        check_room(f"{ready.name} on {adapter.name} {wanted.device}", plan, free)
    classes: MeasuredClasses | None = None
    if serves or wanted.exactness is Exactness.BIT:
        question = question or _question(options, ready, wanted)
        model, classes = load_in_class(question, progress, refresh=refresh)
    else:
        model = adapter.load(ready.prepared, wanted, progress)
    meter: MemoryMeter | None = None
    if predict and plan and question:  # by its numerical class
        caps = model.capabilities
        known = replace(wanted, max_batch_rows=caps.max_batch_rows, activations=caps.activations)
        predict = partial(predict, known, process_bytes=plan.process)
        plan = correct_plan(predict() or plan, last)
        if serves and is_processor(wanted.device):
            held = replace(_key_memory(question), format=caps.weights.partition(" + ")[0])
            meter = MemoryMeter(profiles_in(Path(options.store)), held, partial(_announce, predict), model)
    return LoadedSource(
        model,
        ready.name,
        ready.file.name if ready.file is not None else ready.name,
        ready.source,
        ready.tokenizer_dir,
        ready.prepared,
        choice,
        plan,
        classes,
        shards=pipeline.describe_parts(model) if pipeline else (),
        parts=pipeline.parts if pipeline else (),
        split=ready.split,
        identity=_tell_class(ready.identity, question, classes),
        layers=layers,
        meter=meter,
    )


def _announce(predict: Callable[..., MemoryPlan | None], use: MemoryUse | None) -> MemoryPlan | None:
    return predict(use=use)


def _key_memory(question: ClassQuestion) -> MeasuredMemory:
    """Return by what the memory of such a load is known."""
    options = question.options
    return MeasuredMemory(
        fingerprint=question.fingerprint,
        adapter=question.adapter.name,
        device=options.device,
        model=question.model,
        model_digest=question.model_digest,
        weights=question.weights,
        wanted=question.wanted_formats,
        slots=options.slots,
    )


def _open_loras(options: ModelOptions, ready: PreparedModel) -> tuple[LoraFile, ...]:
    """Return the model's LoRA adapters, where its runtime applies any. Raises ModelRefused, and StoreFull and
    StoreUnwritable."""
    if not options.loras or ready.file is None or isinstance(ready.adapter, PipelineLoader) or ready.split:
        return ()
    base, model, directory = Path(options.base), ready.file.path, ready.prepared.parent
    paths = [find_lora(lora.source, base) for lora in options.loras]
    if options.adapter not in list_lora_runtimes(is_directory=model.is_dir(), loras=paths):
        return ()
    with explain_errors(directory):
        return tuple(
            open_lora(lora.name, lora.source, base, model, options.adapter, directory) for lora in options.loras
        )


def _question(options: ModelOptions, ready: PreparedModel, wanted: LoadOptions) -> ClassQuestion:
    adapter, prepared, file = ready.adapter, ready.prepared, ready.file
    threads = options.threads
    try:
        if isinstance(adapter, PipelineLoader):
            mark = join_marks([*(part.mark for part in adapter.parts), *adapter.shards])
        else:
            device = find_device(options.adapter, options.device)
            mark, threads = mark_bits(device, options, wanted.device_layers), threads_on(device, options.threads)
            other = adapter.name_other_library(prepared, wanted) if isinstance(adapter, ClassesByModel) else ""
            mark = join_marks([mark, other]) if other else mark
    except Unsupported:  # a name that the runtime takes and does not list
        mark = ""
    return ClassQuestion(
        adapter=adapter,
        prepared=prepared,
        options=wanted,
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
        served=tuple(options.identity.classes) if options.identity is not None else (),
    )


def _tell_class(
    identity: ModelIdentity | None, question: ClassQuestion | None, classes: MeasuredClasses | None
) -> ModelIdentity | None:
    """Return a model's identity with the class that it runs in, where its device is known."""
    if identity is None or question is None or not question.fingerprint or classes is None or classes.finding is None:
        return identity
    others = [str(finding.numerical_class) for finding in classes.rejected if finding.passed or not finding.tried]
    return replace(identity, classes=[ServedClass(question.place, str(classes.finding.numerical_class), others)])


def mark_bits(device: DeviceProfile, options: ModelOptions, device_layers: int = ALL_LAYERS) -> str:
    """Return the fingerprint that a model's numerical classes are kept by on a device: sums of parts of layers have
    other bits than whole layers, and layers on the host others than on the device."""
    split = [f"tensor parallel {options.tensor_parallel}"] if options.tensor_parallel > 1 else []
    some = [f"{device_layers} layers"] if device_layers != ALL_LAYERS else []
    return join_marks([class_mark_of(device), *split, *some])
