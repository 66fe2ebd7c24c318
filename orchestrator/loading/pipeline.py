"""Loads a model in layer shards: each range of layers by the runtime of its device, behind one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from adapters.contract import (
    Adapter,
    LayerRange,
    LoadedModel,
    LoadedShard,
    LoadOptions,
    ModelRefused,
    NumericalClass,
    Progress,
    ShardingAdapter,
    Unsupported,
)
from adapters.pipeline import PipelineModel


@dataclass(frozen=True, slots=True)
class PlacedLayers:
    """A range of a prepared model's layers, and where it runs. `threads` 0: as many as the model would have."""

    adapter: Adapter
    device: str
    threads: int
    layers: LayerRange
    prepared: Path

    def __str__(self) -> str:
        return f"{self.layers} on {self.adapter.name} {self.device}"

    def fit(self, options: LoadOptions) -> LoadOptions:
        """Return the options of a model's load as this part of it takes them, its share of the KV cache apart."""
        return replace(options, device=self.device, threads=self.threads or options.threads)


class PipelineLoader:
    """Loads a model over several devices; see ModelLoader. `parts` are in the order of layers."""

    def __init__(self, parts: Sequence[PlacedLayers]) -> None:
        self._parts = tuple(parts)

    @property
    def name(self) -> str:
        """Return the runtimes' names."""
        return "+".join(dict.fromkeys(part.adapter.name for part in self._parts))

    @property
    def shards(self) -> tuple[str, ...]:
        """Return which layers are where, a line for each range."""
        return tuple(map(str, self._parts))

    @property
    def device(self) -> str:
        """Return the devices' names, in the order of layers."""
        return "+".join(part.device for part in self._parts)

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        """Return the first runtime's classes, as far as every other one has one of the same formats.

        Raises Unsupported where they have none in common, AdapterUnavailable.
        """
        first = self._parts[0]
        tiers = [
            [one for one in tier if all(_match(part, one, options) is not None for part in self._parts)]
            for tier in first.adapter.classes(first.fit(options))
        ]
        found = [tier for tier in tiers if tier]
        if not found:
            raise Unsupported(
                f"{', '.join(self.shards)}: their runtimes have no formats of activations and KV cache in common; "
                "set model.activations and model.kv_cache_precision, or choose other shards"
            )
        return found

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> LoadedModel:
        """Load all parts. `prepared` is not read: each part has its own. Raises what adapters raise."""
        with ExitStack() as until_loaded:
            shards = []
            for number, part in enumerate(self._parts, 1):
                progress(f"load shard {number} of {len(self._parts)}: {part}", -1.0)
                shard = self._load_part(part, options)
                until_loaded.callback(shard.close)
                shards.append(shard)
            model = PipelineModel(shards)
            until_loaded.pop_all()
        return model

    def _load_part(self, part: PlacedLayers, options: LoadOptions) -> LoadedShard:
        if not isinstance(part.adapter, ShardingAdapter):
            raise Unsupported(f"{part.adapter.name} runs whole models only; name another adapter for {part.layers}")
        share = (part.layers.end - part.layers.first) / self._parts[-1].layers.end
        mine = replace(part.fit(options), kv_cache_bytes=int(options.kv_cache_bytes * share))
        if options.numerical_class is not None:
            mine = replace(mine, numerical_class=_match(part, options.numerical_class, options))
        return part.adapter.load_layers(part.prepared, mine, part.layers, lambda stage, fraction: None)


def cut_layers(counts: Sequence[int], layers: int, model: str) -> list[LayerRange]:
    """Return the ranges of so many layers each. Raises ModelRefused where they are not all of the model's."""
    if sum(counts) != layers:
        raise ModelRefused(
            f"{model} has {layers} layers, and model.shards name {sum(counts)} ({' + '.join(map(str, counts))})"
        )
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return [LayerRange(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def _match(part: PlacedLayers, wanted: NumericalClass, options: LoadOptions) -> NumericalClass | None:
    """Return the class in which a part runs where the first one runs in `wanted`: the same, or one of its formats."""
    open_options = replace(part.fit(options), numerical_class=None)
    there = [one for tier in part.adapter.classes(open_options) for one in tier]
    if wanted in there:
        return wanted
    return next(_with_formats(wanted, there), None)


def _with_formats(wanted: NumericalClass, there: Sequence[NumericalClass]) -> Iterator[NumericalClass]:
    formats = (wanted.activations, wanted.kv_cache)
    return (one for one in there if (one.activations, one.kv_cache) == formats)
