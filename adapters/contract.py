"""The one interface that everything hangs on: a runtime loads a model onto one device (`Adapter`), a loaded model is
called (`adapters/loaded_model.py`), and all raise the same errors (`adapters/errors.py`).

Adapters import from here, those of other distributions too: `__all__` is what stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from adapters.errors import (
    AdapterError,
    AdapterUnavailable,
    CapacityError,
    DeviceLost,
    GrammarFailed,
    GrammarTooComplex,
    MemoryCorrupt,
    ModelRefused,
    NoKernel,
    OutOfMemory,
    Overheated,
    RuntimeFailed,
    Unsupported,
)
from adapters.loaded_model import (
    NO_REWIND,
    BestLogits,
    BlockRules,
    Capabilities,
    CountedShard,
    ForkableKv,
    ForwardResult,
    Hidden,
    KvCalls,
    KvLayout,
    KvSlots,
    LayerRange,
    LoadedHead,
    LoadedModel,
    LoadedShard,
    Logits,
    LoraFile,
    LoraSlots,
    MovableKv,
    PendingForward,
    Segment,
    ShardResult,
    StagedModel,
    TakesHeads,
    check_layers,
    cut_layers,
)
from device_profiles.numerical_class import NumericalClass
from device_profiles.profile import DeviceProfile, Exactness, Precision, WeightsFormat

__all__ = [
    "ALL_LAYERS",
    "NO_REWIND",
    "Adapter",
    "AdapterError",
    "AdapterUnavailable",
    "BestLogits",
    "BlockRules",
    "Capabilities",
    "CapacityError",
    "ClassesByModel",
    "CountedShard",
    "DeviceLost",
    "Exactness",
    "FilesInPlace",
    "FixedShapes",
    "Footprint",
    "ForkableKv",
    "ForwardResult",
    "GrammarFailed",
    "GrammarTooComplex",
    "Hidden",
    "KvCalls",
    "KvLayout",
    "KvSlots",
    "LayerRange",
    "LoadOptions",
    "LoadedHead",
    "LoadedModel",
    "LoadedShard",
    "Logits",
    "LoraFile",
    "LoraSlots",
    "MemoryCorrupt",
    "ModelLoader",
    "ModelRefused",
    "MovableKv",
    "NoKernel",
    "NumericalClass",
    "OutOfMemory",
    "Overheated",
    "PendingForward",
    "Precision",
    "Progress",
    "RuntimeFailed",
    "Segment",
    "ShardResult",
    "ShardingAdapter",
    "StagedModel",
    "StaticShapes",
    "TakesHeads",
    "TensorParallelAdapter",
    "TwoCopies",
    "Unsupported",
    "WidensWeights",
    "check_layers",
    "cut_layers",
    "list_classes",
    "silent",
]

Progress = Callable[[str, float], None]
"""Called with (stage, fraction done in 0..1); fraction is negative where it is not known."""


def silent(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class StaticShapes:
    """Graphs of fixed shape. `on`: also on a device that does not need them. `context_tokens`: how many positions a
    sequence may hold, 0 for the adapter's choice. `prefill_rows` and `verify_rows`: the numbers of rows of a forward
    that graphs are made for."""

    on: bool = False
    context_tokens: int = 0
    prefill_rows: int = 128
    # ADR 0021: each width takes 170 to 200 MiB more for the default model.
    verify_rows: tuple[int, ...] = (1, 4, 8)


ALL_LAYERS: Final = -1


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load: `kv_cache_bytes` bounds the KV pool, `threads` 0 leaves the count to the runtime. `numerical_class`:
    one of `Adapter.classes`, None for the first of them. `activations` and `kv_cache`, where they are not None, leave
    only the classes that have them. `static` is read where shapes are static. `tensor_parallel`: over how many devices,
    from `device` on, each layer is split (TensorParallelAdapter). `device_layers`: where a device may leave layers to
    the host (DeviceProfile.layer_costs), how many of the last it holds, of which the output head is one. `loras`: what
    single sequences may be computed with (LoraSlots)."""

    device: str = "CPU"
    exactness: Exactness = Exactness.BIT
    activations: Precision | None = None
    kv_cache: Precision | None = None
    kv_cache_bytes: int = 1 << 30
    slots: int = 32
    max_batch_rows: int = 512
    threads: int = 0
    static: StaticShapes = StaticShapes()
    numerical_class: NumericalClass | None = None
    tensor_parallel: int = 1
    device_layers: int = ALL_LAYERS
    loras: tuple[LoraFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that depend on fixed shapes.

    `kv_cache`: the KV cache as `load` will allocate it. The others are summed over the graphs: the weights that each is
    made from, and the keys and values that each is given.
    """

    kv_cache: int
    graph_weights: int
    graph_caches: int


@runtime_checkable
class FixedShapes(Protocol):
    """An adapter whose memory depends on the shapes that it compiles."""

    def footprint(self, prepared: Path, options: LoadOptions) -> Footprint:
        """Return what `load` will allocate and compile. Raises what `load` raises for such options."""
        ...


@runtime_checkable
class WidensWeights(Protocol):
    """An adapter that holds weights in other numbers than it prepares them in."""

    def count_element_bytes(self, prepared: Path, options: LoadOptions) -> float:
        """Return what a weight takes once it is loaded, in bytes; 0.0 where that is what it takes in its file."""
        ...


@runtime_checkable
class FilesInPlace(Protocol):
    """An adapter that loads a model's own files where they lie. What it prepares only says where, and takes
    `prepared_bytes`."""

    @property
    def prepared_bytes(self) -> int: ...

    def read_ahead(self, file: Path, device: str) -> None:
        """Begin to read a model's only file onto a device, beside what prepares it. The next `load` takes that where
        it is of this file as it was now. Raises AdapterUnavailable."""
        ...

    @property
    def ahead_bytes(self) -> int:
        """How much of this process's memory has what was read ahead, and no `load` took."""
        ...

    def drop_ahead(self) -> None:
        """Give back what was read ahead and no `load` took. Without effect where nothing was."""
        ...


@runtime_checkable
class TwoCopies(Protocol):
    """An adapter that holds a model's weights more than once: in formats of its own, and as its file has them."""

    def count_held_bytes(self, converted_bytes: int, file_bytes: int) -> int:
        """Return what weights take of which one copy has `converted_bytes` and the other one `file_bytes`."""
        ...


class ModelLoader(Protocol):
    """What loads prepared models: a runtime, or several together."""

    @property
    def name(self) -> str: ...

    def classes(self, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        """Return the numerical classes that a model may be run in, in tiers.

        Those of a tier are in order of preference: what more devices share comes first. Which one is used is decided
        by measuring them. The next tier is for where none of these keeps its rows' bits.

        Raises Unsupported where `options` leave none, AdapterUnavailable.
        """
        ...

    def load(self, prepared: Path, options: LoadOptions, progress: Progress) -> LoadedModel:
        """Load a prepared model onto a device.

        Raises ModelRefused, Unsupported, OutOfMemory, AdapterUnavailable.
        """
        ...


@runtime_checkable
class ClassesByModel(Protocol):
    """An adapter whose numerical classes depend on the model."""

    def list_classes(self, prepared: Path, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
        """Return the numerical classes of a prepared model, as `ModelLoader.classes` does. Raises ModelRefused, too."""
        ...

    def name_other_library(self, prepared: Path, options: LoadOptions) -> str:
        """Return the version of the library that runs a prepared model, "" where it is the adapter's usual one. Raises
        ModelRefused, AdapterUnavailable."""
        ...


def list_classes(loader: ModelLoader, prepared: Path, options: LoadOptions) -> Sequence[Sequence[NumericalClass]]:
    """Return the numerical classes that a prepared model may be run in. Raises what a loader's `classes` raises, and
    ModelRefused."""
    if isinstance(loader, ClassesByModel):
        return loader.list_classes(prepared, options)
    return loader.classes(options)


class Adapter(ModelLoader, Protocol):
    """A runtime. Importing the module that defines it must not import the framework."""

    def devices(self) -> list[DeviceProfile]:
        """List what this runtime can use. Raises AdapterUnavailable."""
        ...

    def recipe(self, weights: WeightsFormat | None = None) -> str:
        """Return a text that changes whenever `prepare` would write something else (versions included)."""
        ...

    def prepare(self, source: Path, target: Path, progress: Progress, weights: WeightsFormat | None = None) -> None:
        """Write what `load` needs from the model file `source` into the empty directory `target`, with its weights in
        another number format (FAST among them) where one is given.

        Raises ModelRefused when the file cannot be converted, AdapterUnavailable without the framework.
        """
        ...


@runtime_checkable
class ShardingAdapter(Protocol):
    """An adapter that loads a part of a model's layers, for pipelines over devices and runtimes."""

    def load_layers(self, prepared: Path, options: LoadOptions, layers: LayerRange, progress: Progress) -> LoadedShard:
        """Load a range of a prepared model's layers onto a device; its memory holds nothing of other layers.

        Raises what `Adapter.load` raises; Unsupported where the range is not in the model.
        """
        ...


@runtime_checkable
class TensorParallelAdapter(Protocol):
    """An adapter that splits each layer of a model over several devices or processes (LoadOptions.tensor_parallel)."""

    def list_rank_places(self, options: LoadOptions) -> Sequence[str]:
        """Return where each part of a model runs that `load` loads with these options, in words, as "CPU, 1 thread".

        Raises Unsupported where there are fewer devices, AdapterUnavailable.
        """
        ...
