"""Loads a model in layer shards: each range of layers by the runtime of its device, behind one model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from adapters.contract import (
    Adapter,
    CountedShard,
    LayerRange,
    LoadedModel,
    LoadOptions,
    NumericalClass,
    Precision,
    Progress,
    ShardingAdapter,
    Unsupported,
    silent,
)
from adapters.pipeline import OnForward, PipelineModel
from orchestrator.worker.shards.remote import RemoteShard


class LayerRuntime(Protocol):
    """A runtime in this process or another one; what loads ranges of layers is a ShardingAdapter too."""

    @property
    def name(self) -> str: ...

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        """See adapters.contract.ModelLoader.classes."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedLayers:
    """A range of a prepared model's layers, and where it runs. `threads` 0: as many as the model would have.
    `activations` and `kv_cache`: the formats that were chosen for it, None where the whole model's options say them.
    `device_name`: the device's full name; `mark`: what decides bits there; `where`: the host and process that it is
    in, "" and `pid` 0 where it is this one."""

    adapter: LayerRuntime
    device: str
    threads: int
    layers: LayerRange
    prepared: Path
    activations: Precision | None = None
    kv_cache: Precision | None = None
    device_name: str = ""
    mark: str = ""
    where: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"{self.layers} on {self.adapter.name} {self.device}"

    def fit(self, options: LoadOptions) -> LoadOptions:
        """Return the options of a model's load as this part of it takes them, its share of the KV cache apart."""
        return replace(
            options,
            device=self.device,
            threads=self.threads or options.threads,
            activations=self.activations or options.activations,
            kv_cache=self.kv_cache or options.kv_cache,
        )


class PipelineLoader:
    """Loads a model over several devices; see ModelLoader. `parts` are in the order of layers. `watch`: see
    PipelineModel."""

    def __init__(self, parts: Sequence[PlacedLayers], watch: OnForward | None = None) -> None:
        self.parts = tuple(parts)
        self._watch = watch
        self.name = "+".join(dict.fromkeys(part.adapter.name for part in parts))
        self.shards = tuple(map(str, parts))
        self.device = "+".join(part.device for part in parts)

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        """Return the first runtime's classes: each stands for the pipeline whose first part runs in it."""
        first = self.parts[0]
        return first.adapter.classes(first.fit(options))

    def describe_parts(self, model: LoadedModel) -> tuple[str, ...]:
        """Return which layers of a loaded model are where, in which formats, a line for each range."""
        assert isinstance(model, PipelineModel)  # noqa: S101  # this loads nothing else
        loaded = zip(self.parts, (shard.capabilities for shard in model.shards), strict=True)
        return tuple(
            f"{part} in {caps.activations}, KV cache in {caps.kv_cache}{f' ({part.where})' if part.where else ''}"
            for part, caps in loaded
        )

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> LoadedModel:
        """Load all parts. `prepared` is not read: each part has its own. Raises what adapters raise."""
        with ExitStack() as until_loaded:
            shards: list[CountedShard] = []
            for number, part in enumerate(self.parts, 1):
                progress(f"load shard {number} of {len(self.parts)}: {part}", -1.0)
                shard = self._load_part(part, options)
                until_loaded.callback(shard.close)
                shards.append(shard)
            model = PipelineModel(shards, self._watch)
            until_loaded.pop_all()
        return model

    def _load_part(self, part: PlacedLayers, options: LoadOptions) -> CountedShard:
        if not isinstance(part.adapter, ShardingAdapter):
            raise Unsupported(f"{part.adapter.name} runs whole models only; name another adapter for {part.layers}")
        share = (part.layers.end - part.layers.first) / self.parts[-1].layers.end
        mine = replace(part.fit(options), kv_cache_bytes=int(options.kv_cache_bytes * share))
        if options.numerical_class is not None:
            mine = replace(mine, numerical_class=self._match(part, options.numerical_class, options))
        return part.adapter.load_layers(part.prepared, mine, part.layers, silent)

    def _match(self, part: PlacedLayers, wanted: NumericalClass, options: LoadOptions) -> NumericalClass:
        """Return the class in which a part runs where the first one runs in `wanted`: of a tier as far from the first,
        the same class, else one of the same formats, of the same activations, or any. Hidden states go between the
        parts in float32, so formats may differ."""
        open_options = replace(options, numerical_class=None)
        tiers = part.adapter.classes(part.fit(open_options))
        tier = tiers[_place_tier(self.classes(open_options), wanted, len(tiers))]
        return max(
            tier,
            key=lambda own: (
                own == wanted,
                (own.activations, own.kv_cache) == (wanted.activations, wanted.kv_cache),
                own.activations is wanted.activations,
            ),
        )


def _place_tier(firsts: Sequence[Sequence[NumericalClass]], wanted: NumericalClass, count: int) -> int:
    """Return which of `count` tiers goes with that of the first runtime's `wanted`: the last one with its last."""
    number = next((index for index, tier in enumerate(firsts) if wanted in tier), 0)
    return count - 1 if 0 < number == len(firsts) - 1 else min(number, count - 1)


def list_planned_parts(model: LoadedModel) -> list[int]:
    """Return what the processes beside this one that have some of a model's layers were announced to hold."""
    shards = model.shards if isinstance(model, PipelineModel) else ()
    return [shard.planned_bytes for shard in shards if isinstance(shard, RemoteShard)]


def check_whole_runtime(adapter: Adapter | PipelineLoader) -> Adapter:
    """Return the runtime that one part of a model runs on. Raises Unsupported where it is several."""
    if isinstance(adapter, PipelineLoader):
        raise Unsupported("a part of a target cannot be cut into shards itself")
    return adapter
