"""What a model costs on a device that has no room for all of it: few of its layers are loaded, and scaled.

The first layer, some in the middle and the last one are loaded as ranges of their own, behind each other. What a
forward takes in each tells a layer, the output layer and what a range takes beside its layers. With A ms in the first
one, B ms in `m` middle layers, C ms in the last, and D ms outside of all three:

    start = (m A - B) / (m - 1),  layer = (B - start) / m,  head = C - start - layer

    all N layers = head + N layer,  a range beside its layers = start + D / 3
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median

import psutil

from adapters.contract import (
    Capabilities,
    Exactness,
    LayerRange,
    LoadedModel,
    LoadOptions,
    ModelRefused,
    Progress,
    Segment,
    ShardingAdapter,
)
from adapters.hardware import read_cache_bytes
from adapters.model_source import check_model
from adapters.process_heap import trim_heap
from device_profiles.curve_fit import StepSample
from device_profiles.device_names import is_processor
from device_profiles.measured import ENDS
from device_profiles.memory import MemoryPlan
from device_profiles.numerical_class import MeasuredClasses
from device_profiles.units import MS_PER_S, human_bytes
from orchestrator.machine.devices import class_mark_of, effective_device, find_device, join_marks, threads_on
from orchestrator.protocol.load_options import ModelOptions
from orchestrator.worker.loading.memory import predict_memory
from orchestrator.worker.loading.numerical_classes import ClassQuestion, load_in_class
from orchestrator.worker.loading.pipeline import PipelineLoader, PlacedLayers, check_whole_runtime
from orchestrator.worker.loading.prepared import PreparedModel, count_layers, prepare_part
from orchestrator.worker.measuring.steps import Steps, fit_forwards
from policies.models.kv_shares import SHARES

# In the middle: two at least tell a layer from what a range takes beside it; six do so on a busy machine (ADR 0120).
_LEAST_MIDDLE, _ENOUGH_MIDDLE = 2, 6
# Times the processor's largest cache: layers in the middle that are larger do not stay there (ADR 0137).
_TIMES_CACHE = 1.25
_LEAST_LAYERS = _LEAST_MIDDLE + 2  # with the first and the last one

_LONGEST_PAUSE_S = 0.02
"""Of 20 ms and of 60 a forward behind them notices the same (ADR 0137)."""
_TOKENIZER_BYTES = 1100
"""Of each token of a vocabulary: the target's own process reads its tokenizer for grammars. Measured: 1,240 of 49,152
tokens and 1,110 of 151,936 (ADR 0137)."""

_Shape = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a forward: each sequence's rows, and the positions that it held before."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """In bytes: what each `layer` takes, a process with nothing of the model (`fixed`), and the largest forward without
    logits (`workspace`). `ends`: of each of device_profiles.measured.ENDS; beside the first what the `target`'s own
    process holds. `whole`: what all of it would take at least, with the smallest KV cache that it is loaded with."""

    layer: int
    ends: dict[str, int]
    fixed: int
    workspace: int
    whole: int
    target: int = 0

    @property
    def parts(self) -> dict[str, int]:
        return {"layer": self.layer, "fixed": self.fixed, **self.ends}

    def count_layers(self, room_bytes: int, kv_bytes: int = 0) -> int:
        """Return how many layers one process has room for beside both ends, with nothing of the target's: each with so
        much KV cache. What it holds beside them it holds once, in however many ranges they are."""
        ends = sum(self.ends[end] for end in ("first", "last", "logits")) - self.target
        beside = self.fixed + self.workspace + ends
        return (room_bytes - beside) // max(1, self.layer + kv_bytes)


@dataclass(frozen=True, slots=True)
class FewLayers:
    """A prepared model that has no room on its device, and what is loaded of its `layers` instead."""

    ready: PreparedModel
    options: LoadOptions
    layers: int
    ranges: tuple[LayerRange, ...]
    memory: LayerMemory

    @property
    def digest(self) -> str:
        """Of the model's files; the simulated one has its script's."""
        return self.ready.prepared.parent.name if self.ready.file is not None else self.ready.prepared.name

    @property
    def count(self) -> int:
        return sum(part.end - part.first for part in self.ranges)

    @property
    def middle_layers(self) -> int:
        return self.ranges[1].end - self.ranges[1].first

    def explain(self, room_bytes: int) -> str:
        return (
            f"all {self.layers} layers take {human_bytes(self.memory.whole)}, and {human_bytes(room_bytes)} may be "
            f"filled: {self.count} of them are measured"
        )


def find_few_layers(
    model: ModelOptions, slots: int, logits_rows: int, room_bytes: int, progress: Progress
) -> FewLayers | None:
    """Prepare a model, and return which of its layers to measure; None where all of them have room.

    Raises ModelRefused where they do not, and its runtime cannot load a part or there are too few of them. Raises what
    preparing raises, too.
    """
    ready = prepare_part(model, progress)
    adapter = check_whole_runtime(ready.adapter)
    layers = count_layers(model, ready.file)
    options = _build_load_options(model, ready, slots)
    memory = _predict_layers(model, ready, options, layers, logits_rows)
    if memory.whole <= room_bytes:
        return None
    needed = f"{ready.name} takes {human_bytes(memory.whole)}, and {human_bytes(room_bytes)} may be filled"
    if not isinstance(adapter, ShardingAdapter):
        raise ModelRefused(f"{needed}; {adapter.name} runs whole models only")
    if layers < _LEAST_LAYERS:
        raise ModelRefused(f"{needed}; it has {layers} layers, too few to measure some of them")
    if memory.count_layers(room_bytes) < _LEAST_LAYERS:
        raise ModelRefused(f"{needed}; {_LEAST_LAYERS} of its {layers} layers have no room either")
    uncached = 0
    if is_processor(options.device):
        prepared_bytes = sum(path.stat().st_size for path in ready.prepared.iterdir() if path.is_file())
        uncached = ceil(_TIMES_CACHE * read_cache_bytes() * layers / max(1, prepared_bytes))
    options = replace(options, kv_cache_bytes=options.kv_cache_bytes // SHARES[-1])  # it holds short texts alone
    held = memory.count_layers(room_bytes, options.kv_cache_bytes // layers)
    return FewLayers(ready, options, layers, choose_ranges(layers, held, uncached), memory)


def choose_ranges(layers: int, held: int, uncached: int = 0) -> tuple[LayerRange, ...]:
    """Return the first layer, some in the middle, and the last of so many; together no more than `held`. The processor
    does not keep `uncached` layers from one forward to the next."""
    count = max(_LEAST_MIDDLE, min(max(_ENOUGH_MIDDLE, uncached), held - 2, layers - 2))
    first = (layers - count) // 2
    return LayerRange(0, 1), LayerRange(first, first + count), LayerRange(layers - 1, layers)


@dataclass(frozen=True, slots=True)
class RangeTimes:
    """What a forward took in ms in the `first`, the `middle` and the `last` range, and `outside` of all three."""

    first: float
    middle: float
    last: float
    outside: float

    def find_start_ms(self, middle_layers: int) -> float:
        return (middle_layers * self.first - self.middle) / (middle_layers - 1)

    def scale_ms(self, start_ms: float, middle_layers: int, layers: int) -> float:
        """Return what so many layers and the output layer take. It is no less than what the ranges took without their
        starts."""
        first, middle, last = (max(0.0, ms - start_ms) for ms in (self.first, self.middle, self.last))
        layer = middle / middle_layers
        return max(layers * layer + max(0.0, last - layer), first + middle + last)


class StageTimes:
    """What each range took of every forward, and what lay outside of all; in the order of forwards, by their shapes."""

    def __init__(self) -> None:
        self._taken: dict[_Shape, list[tuple[float, ...]]] = {}
        self._pause_share = 0.0

    def note(self, batch: Sequence[Segment], stage_ms: Sequence[float], all_ms: float) -> None:
        """See adapters.pipeline.OnForward."""
        shape = tuple(len(segment.tokens) for segment in batch), tuple(segment.start for segment in batch)
        self._taken.setdefault(shape, []).append((*stage_ms, max(0.0, all_ms - sum(stage_ms))))
        time.sleep(min(_LONGEST_PAUSE_S, self._pause_share * all_ms / MS_PER_S))

    def begin(self, pause_share: float) -> None:
        """Forget what was tried. From now on a pause of so many times its own time is behind each forward, as a shard
        waits for the others: its threads sleep, and what it read leaves the caches."""
        self._taken.clear()
        self._pause_share = pause_share

    def match(self, samples: Sequence[StepSample]) -> list[tuple[StepSample, RangeTimes]]:
        """Return each sample with what such a forward took: lower quartiles, as what disturbs only slows."""
        pairs = []
        for sample in samples:
            seen = self._taken.get((sample.rows, sample.contexts), [])
            if seen:
                quartiles = (sorted(some)[(len(some) - 1) // 4] for some in zip(*seen, strict=True))
                pairs.append((sample, RangeTimes(*quartiles)))
        return pairs


def load_few_layers(
    few: FewLayers, model: ModelOptions, times: StageTimes, progress: Progress
) -> tuple[LoadedModel, MeasuredClasses]:
    """Load these layers as if they were a model, in the numerical class that is found for them. `times` hears of its
    forwards. Raises what adapters raise."""
    ready, device = few.ready, find_device(model.adapter, model.device)
    adapter = check_whole_runtime(ready.adapter)
    parts = [PlacedLayers(adapter, few.options.device, model.threads, part, ready.prepared) for part in few.ranges]
    question = ClassQuestion(
        adapter=PipelineLoader(parts, times.note),
        prepared=ready.prepared,
        options=few.options,
        fingerprint=join_marks([class_mark_of(device), *map(str, few.ranges)]),
        model=ready.name,
        model_digest=few.digest,
        weights=ready.prepared.name if ready.file is not None else "",
        threads=threads_on(device, model.threads),
        file=None,  # the reference says what the whole model says
        store=Path(model.store),
        isolated=False,
    )
    loaded = load_in_class(question, progress)
    times.begin((few.layers - few.count) / few.count)
    return loaded


def scale_steps(few: FewLayers, times: StageTimes, steps: Steps, caps: Capabilities) -> tuple[Steps, float]:
    """Return what forwards of all layers cost, and what each range takes of one beside its layers, in ms. `steps`: as
    they were measured of the few."""
    count, decode = few.middle_layers, times.match(steps.decode_samples)
    start_ms = max(0.0, median(taken.find_start_ms(count) for _, taken in decode))
    call_ms = start_ms + median(taken.outside for _, taken in decode) / len(few.ranges)
    whole_decode, whole_prefill = (
        [replace(sample, ms=taken.scale_ms(start_ms, count, few.layers)) for sample, taken in some]
        for some in (decode, times.match(steps.prefill_samples))
    )
    return fit_forwards(whole_decode, whole_prefill, caps), call_ms


def _build_load_options(model: ModelOptions, ready: PreparedModel, slots: int) -> LoadOptions:
    return LoadOptions(
        device=effective_device(model.adapter, model.device),
        exactness=Exactness(model.exactness),
        activations=ready.choice.activations if ready.choice else None,
        kv_cache=ready.choice.kv_cache if ready.choice else None,
        kv_cache_bytes=model.kv_cache_bytes,
        slots=slots,
        max_batch_rows=model.max_batch_rows,
        threads=model.threads,
        static=model.static,
    )


def _predict_layers(
    model: ModelOptions, ready: PreparedModel, options: LoadOptions, layers: int, logits_rows: int
) -> LayerMemory:
    """Return what ranges of a model's layers take, as their runtime's costs say; by the size of what is prepared where
    these are not known."""
    trim_heap()  # what measuring has left is no part of a shard's process
    process = psutil.Process().memory_info().rss if is_processor(options.device) else 0
    least_kv = model.kv_cache_bytes // SHARES[-1]
    adapter = check_whole_runtime(ready.adapter)
    spec = check_model(ready.file, adapter.name) if ready.file is not None else None
    if spec is not None and layers >= _LEAST_LAYERS:
        ranges = (spec.all_layers, LayerRange(1, 2), LayerRange(1, 3), LayerRange(0, 1), LayerRange(layers - 1, layers))
        plans = [
            predict_memory(
                # Each has its share of the KV cache, as in shards: attention's buffers are as long as what it holds.
                replace(options, kv_cache_bytes=options.kv_cache_bytes * (part.end - part.first) // layers),
                *(adapter, spec, ready.prepared),
                logits_rows=logits_rows,
                layers=part,
                process_bytes=process,
            )
            for part in ranges
        ]
        known = [plan for plan in plans if plan is not None]
        if len(known) == len(plans):
            return _compare_plans(known, layers, least_kv, _sum_target_bytes(spec.vocabulary_size, logits_rows))
    size = sum(path.stat().st_size for path in ready.prepared.iterdir() if path.is_file())
    ends = dict.fromkeys(ENDS, 0)
    if spec is not None:
        parts = {"first": LayerRange(0, 1), "last": LayerRange(layers - 1, layers), "both": spec.all_layers}
        for end, part in parts.items():
            beside = spec.count_elements(part) - spec.count_layer_elements(part)
            ends[end] = size * beside // spec.matrix_elements
    return LayerMemory((size - ends["both"]) // layers, ends, process, 0, process + size + least_kv)


def _sum_target_bytes(vocabulary: int, logits_rows: int) -> int:
    """Return what a target's own process holds beside layers: its tokenizer, and the largest forward's logits in 32
    bits, which come from the last shard."""
    return vocabulary * (_TOKENIZER_BYTES + 4 * logits_rows)


def _compare_plans(plans: Sequence[MemoryPlan], layers: int, least_kv: int, target: int) -> LayerMemory:
    """Return what differs between the plans of all `layers`, of one and of two in the middle, of the first and the last
    one. The first shard is in the target's own process, which holds `target` bytes besides."""
    whole, single, double, first, last = plans
    layer = double.weights - single.weights
    none = single.weights - layer
    ends = {
        "first": first.weights - single.weights + target,
        "last": last.weights - single.weights,
        "both": whole.weights - none - layers * layer + target,
        "logits": last.workspace - single.workspace,
    }
    least = whole.total - whole.kv_cache + least_kv + target
    return LayerMemory(layer, ends, single.process + none, single.workspace, least, target)
