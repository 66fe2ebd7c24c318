"""The one interface that everything hangs on: a loaded model on one device.

A model takes a ragged batch of segments and returns rows of logits. A segment's start position below what its
slot holds *is* the rollback: nothing is copied, the positions behind it are simply overwritten.

    AdapterError
    +-- AdapterUnavailable   the framework is not installed; the message is the install command
    +-- ModelRefused         the file is damaged, or of a kind that this adapter cannot run
    +-- Unsupported          the request is outside the stated capabilities (a caller's mistake)
    +-- GrammarFailed        a grammar is wrong; the request cannot go on
    |   +-- GrammarTooComplex  it became too complex for its text (the client's grammar, no failure)
    +-- CapacityError        no KV blocks or slots are left; nothing was changed, free some and try again
    +-- DeviceLost           the device or its runtime failed; the loaded model is dead
        +-- OutOfMemory      no memory was left; where it `can_go_on` a smaller forward may fit, else the model is dead
        +-- MemoryCorrupt    the device's memory has an error that its ECC could not correct
        +-- Overheated       the device is too hot
        +-- RuntimeFailed    the runtime failed, and does not say that the device did
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from device_profiles.numerical_class import NumericalClass as NumericalClass
from device_profiles.profile import DeviceProfile, WeightsFormat
from device_profiles.profile import Exactness as Exactness
from device_profiles.profile import Precision as Precision
from device_profiles.units import ceil_div
from device_profiles.workload import ModelSpec

Logits = NDArray[np.float32]
Hidden = NDArray[np.float32]
"""Hidden states between two ranges of layers: a row for each token, as wide as the model's hidden size. Runtimes that
compute in fewer bits give theirs in float32, which holds them exactly."""
NO_REWIND = "it keeps a recurrent state, from which rejected drafts cannot be taken back"
"""Why a model is served without drafts (Capabilities.rewinds)."""
Progress = Callable[[str, float], None]
"""Called with (stage, fraction done in 0..1); fraction is negative where it is not known."""


class AdapterError(Exception):
    """Root of what an adapter raises."""


class AdapterUnavailable(AdapterError):
    """The framework is missing; the message names the install command."""


class ModelRefused(AdapterError):
    """The model file is damaged or of a kind that this adapter cannot run; the message names the file."""


class Unsupported(AdapterError):
    """The call is outside the stated capabilities."""


class GrammarFailed(AdapterError):
    """A grammar is wrong or uses what its library does not support, or it became too complex for its text."""


class GrammarTooComplex(GrammarFailed):
    """Behind its text so far a grammar may go on in more ways than its library follows: a simpler one is needed."""


class CapacityError(AdapterError):
    """No KV blocks or slots are left. Nothing was changed."""


class DeviceLost(AdapterError):
    """The device or its runtime failed; the loaded model can no longer be used."""


class OutOfMemory(DeviceLost):
    """The device ran out of memory. `can_go_on`: the loaded model lives. What slots hold in front of the segments of
    that forward is as it was, and what they hold from there on is to be written again."""

    def __init__(self, message: str, *, can_go_on: bool = False) -> None:
        super().__init__(message)
        self.can_go_on = can_go_on


class MemoryCorrupt(DeviceLost):
    """The device's memory has an error that its ECC could not correct; the loaded model can no longer be used."""


class Overheated(DeviceLost):
    """The device is too hot, and stopped; the loaded model can no longer be used."""


class RuntimeFailed(DeviceLost):
    """The runtime failed for a reason that nobody could place; the loaded model can no longer be used."""


class NoKernel(DeviceLost):
    """The runtime has no code for a part of the model on this device, and will have none: nothing was lost."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence, written at `start`, and the rows of logits wanted from them.

    `slot` names the sequence (0 <= slot < capabilities.slots). `start` is the position of the first token, at most what
    the slot holds. A smaller `start` rolls the slot back to it first, but never into positions that the slot shares.
    Row i predicts the token at position start + i + 1. `rows` is the half-open range of offsets into `tokens` whose
    logits come back. `apart`: the rows use the single-row kernel (see Capabilities.apart_tokens).
    """

    slot: int
    start: int
    tokens: Sequence[int]
    rows: tuple[int, int]
    apart: bool = False


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """`logits`: float32, shape (wanted rows over all segments in order, spec.outputs), valid until the next
    forward. `device_ms`: the runtime's own time for this forward, without the adapter's. `stage_ms`: each stage's part
    of it, where there are several."""

    logits: Logits
    device_ms: float
    stage_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded model can do.

    `numerical_class`: how rows are computed, as the compiled model has it. `row_invariant`: a row's logits are expected
    to be the same to the bit whatever else is in the batch (adapters/invariance.py measures it). `paid_rows`: minimum
    rows that every segment is charged for (2 where exactness needs a second row: then the first draft token is free).

    `apart_tokens`: a runtime may compute a row faster alone than as one of several of its segment, with other last
    bits. The kernel of a row must then follow from the request alone. Rows behind a prompt of at most `apart_tokens`
    tokens use this single-row kernel (`Segment.apart`), other rows do not. Such rows are charged one by one, but a
    forward of a single row is charged `paid_rows`.

    `static_widths`: where shapes are static, the numbers of rows that there are graphs for, in ascending order. Each
    sequence is run in forwards of these widths, and a row that is left over costs like one that is used.

    `device_name`: for people, where it is another than that of `Adapter.devices`, "" where it is that.

    `rewinds`: a slot can be rolled back to any position. Where it is not (a recurrent state is one of all tokens so
    far), a segment starts where its slot ends, or at 0, which begins the slot anew. Drafts could not be taken back, so
    there are none. `attach` finds nothing. An OutOfMemory that `can_go_on` leaves the slots of its forward to be
    released.
    """

    slots: int
    max_context_tokens: int
    max_batch_rows: int
    block_tokens: int
    total_blocks: int
    row_invariant: bool
    paid_rows: int
    weights: str
    numerical_class: NumericalClass
    exactness: Exactness
    device: str
    apart_tokens: int = 0
    static_widths: tuple[int, ...] = ()
    rewinds: bool = True
    device_name: str = ""

    @property
    def activations(self) -> Precision:
        """The number format of activations."""
        return self.numerical_class.activations

    @property
    def kv_cache(self) -> Precision:
        """The number format of the KV cache."""
        return self.numerical_class.kv_cache


@dataclass(frozen=True, slots=True)
class BlockRules:
    """How the slots of a model take KV blocks: `blocks` of `block_tokens` positions for `slots` sequences. Whoever has
    them can count along with the model (adapters/kv_blocks.py).

    `pad_to` is the number of rows that a segment is padded to. All segments are padded to a multiple of `multiple`, and
    those of more than `even_behind` rows (0: none) to an even number. `copies`: what a slot begins with is a copy, and
    takes blocks of its own.
    """

    blocks: int
    block_tokens: int
    slots: int
    pad_to: int = 1
    even_behind: int = 0
    multiple: int = 1
    copies: bool = False


class KvCalls(Protocol):
    """What is loaded on a device, and the sequences that it holds. Not thread-safe: one thread calls it."""

    @property
    def spec(self) -> ModelSpec:
        """The whole model's facts, also where some of its layers are loaded; `bytes_per_token` is theirs."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        """Let a free slot begin with what is remembered of a prefix of `tokens`; nothing is computed.

        Returns how many positions the slot holds then, less than len(tokens): 0 where nothing is remembered. A later
        segment may not start below them. Raises Unsupported when the slot holds something.
        """
        ...

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        """Remember the slot's leading positions, which hold `tokens`, for `attach`, also after its release.

        To be called with rows of one numerical class only (Segment.apart). The slot may not be rolled back below
        them. What is remembered of released slots counts as free, and goes when the room is needed, the least
        recently used first.
        """
        ...

    def release(self, slot: int) -> None:
        """Free what the slot holds. Releasing a free slot does nothing."""
        ...

    def discard(self, slot: int) -> None:
        """Free what the slot holds, for it may be garbage: nobody begins with it any more, and none of it is left in
        memory that another slot gets. Slots that share some of it keep that, and nobody begins with what they hold."""
        ...

    def close(self) -> None:
        """Give the device's memory back. Idempotent."""
        ...


class KvSlots(KvCalls, Protocol):
    """What is loaded on a device and says what its sequences hold."""

    def count_cached_positions(self, slot: int) -> int:
        """Return how many positions the slot holds (0 for a free one)."""
        ...

    def free_blocks(self) -> int:
        """Return how many KV blocks of `capabilities.block_tokens` positions are free."""
        ...

    def count_needed_blocks(self, batch: Sequence[Segment]) -> int:
        """Return how many free blocks a forward of this batch would take."""
        ...


class LoadedModel(KvSlots, Protocol):
    """A model on a device."""

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        """Run one ragged batch.

        Raises Unsupported for a malformed batch, CapacityError when blocks are missing (nothing changed), and
        DeviceLost, or the class of it that says more, when the device failed.
        """
        ...


class PendingForward(Protocol):
    """A forward that was started and may not have ended."""

    def result(self) -> ForwardResult:
        """Wait for it, and return what it gives, valid until the same caller's next forward. Raises what
        `LoadedModel.forward` raises of devices."""
        ...


@runtime_checkable
class StagedModel(LoadedModel, Protocol):
    """A loaded model of several stages, each of which can run a forward while another runs the next one."""

    @property
    def stages(self) -> int:
        """Return how many forwards can run at the same time."""
        ...

    def start_forward(self, batch: Sequence[Segment]) -> PendingForward:
        """Start one ragged batch behind those started before. Calls about slots count from then on as if it had ended.

        Raises Unsupported for a malformed batch, and CapacityError when blocks are missing (nothing changed).
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Consecutive layers of a model, from `first` up to `end`, which is not among them."""

    first: int
    end: int

    def __str__(self) -> str:
        """Return the first and the last layer's numbers, in words."""
        return f"layers {self.first} to {self.end - 1}"


def check_layers(layers: LayerRange, count: int) -> None:
    """Refuse a range that a model of so many layers does not have. Raises Unsupported."""
    if not 0 <= layers.first < layers.end <= count:
        raise Unsupported(f"{layers} are not in the model, which has {count}")


def cut_layers(counts: Sequence[int], layers: int, model: str) -> list[LayerRange]:
    """Return the ranges of so many layers each. Raises ModelRefused where they are not all of the model's `layers`."""
    if sum(counts) != layers:
        named = " + ".join(map(str, counts))
        raise ModelRefused(f"{model} has {layers} layers, and its shards name {sum(counts)} ({named}); name each once")
    ends = list(accumulate(counts))
    return [LayerRange(first, end) for first, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What a range of layers gives, valid until its next forward: behind the last layer `output` is logits, as
    ForwardResult has them; else hidden states, float32, shape (all tokens of the batch in order, hidden size).
    `device_ms`: the runtime's own time."""

    output: NDArray[np.float32]
    device_ms: float


class CountedShard(KvCalls, Protocol):
    """A range of a model's layers on a device. Its slots hold the keys and values of its own layers. Whoever calls it
    counts what they hold (`block_rules`)."""

    @property
    def layers(self) -> LayerRange: ...

    @property
    def block_rules(self) -> BlockRules: ...

    def forward_layers(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        """Run one ragged batch through these layers. `hidden`: what the range before gave for the same batch; None in
        the range that begins with layer 0, which reads the tokens.

        Raises what `LoadedModel.forward` raises.
        """
        ...


class LoadedShard(CountedShard, KvSlots, Protocol):
    """The same, where it says itself what its slots hold."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the KV cache of a sequence lies in pages. Equal names mean that equal bytes mean the same.

    There are several caches (keys and values of every layer), each in pages of `page_tokens` positions. `page_bytes`
    has the length of a page of each.
    """

    name: str
    page_tokens: int
    page_bytes: tuple[int, ...]

    def count_bytes(self, positions: int) -> int:
        """Return how long the pages of so many positions are, of all caches."""
        return sum(self.list_lengths(positions))

    def list_lengths(self, positions: int) -> list[int]:
        """Return how long the pages of so many positions are, of each cache."""
        pages = ceil_div(positions, self.page_tokens)
        return [pages * page_bytes for page_bytes in self.page_bytes]


@runtime_checkable
class MovableKv(Protocol):
    """A loaded model whose KV cache can go along with a sequence to another one, of the same class and layout. Pages
    are raw: what lies behind the last position may be anything that is finite."""

    @property
    def kv_layout(self) -> KvLayout: ...

    def export_kv(self, slot: int, positions: int, start_page: int = 0) -> Iterator[NDArray[np.uint8]]:
        """Yield the pages of the slot's first `positions`, from `start_page` on, one cache after the other. They are
        copies, which later forwards leave as they are.

        Raises Unsupported where the slot holds fewer.
        """
        ...

    def import_kv(self, slot: int, positions: int, pages: NDArray[np.uint8], start_pages: Sequence[int] = (0,)) -> None:
        """Let a slot hold `positions`, as one call of `export_kv` gave them, or several behind each other. Then each
        began at one of `start_pages` and ended where the next begins. What `attach` gave it already stays.

        Raises CapacityError and Unsupported; then nothing has changed. Raises OutOfMemory where the model is dead.
        """
        ...


@runtime_checkable
class ForkableKv(Protocol):
    """A loaded model in which a sequence can go on in several ways, each in a slot of its own."""

    def fork(self, slot: int, source: int, positions: int, shared: int) -> None:
        """Let a free slot begin with the first `positions` of another one; nothing is computed.

        Neither slot may be rolled back below the whole blocks of the first `shared` of them: both hold these.
        Raises Unsupported where `source` holds fewer or `slot` holds something, and CapacityError; then nothing has
        changed.
        """
        ...


@dataclass(frozen=True, slots=True)
class StaticShapes:
    """Graphs of fixed shape. `on`: also on a device that does not need them. `context_tokens`: how many positions a
    sequence may hold, 0 for the adapter's choice. `prefill_rows` and `verify_rows`: the numbers of rows of a forward
    that graphs are made for."""

    on: bool = False
    context_tokens: int = 0
    prefill_rows: int = 128
    verify_rows: tuple[int, ...] = (1, 4, 8)


ALL_LAYERS: Final = -1


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load: `kv_cache_bytes` bounds the KV pool, `threads` 0 leaves the count to the runtime. `numerical_class`:
    one of `Adapter.classes`, None for the first of them. `activations` and `kv_cache`, where they are not None, leave
    only the classes that have them. `static` is read where shapes are static. `tensor_parallel`: over how many devices,
    from `device` on, each layer is split (TensorParallelAdapter). `device_layers`: where a device may leave layers to
    the host (DeviceProfile.layer_costs), how many of the last it holds, of which the output head is one."""

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

    def name_other_library(self, prepared: Path) -> str:
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
