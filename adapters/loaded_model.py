"""A loaded model on one device, or a range of its layers: what it takes, what it gives, and what it holds.

A model takes a ragged batch of segments and returns rows of logits. A segment's start position below what its
slot holds *is* the rollback: nothing is copied, the positions behind it are simply overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from adapters.errors import ModelRefused, Unsupported
from device_profiles.numerical_class import NumericalClass
from device_profiles.profile import Exactness, Precision
from device_profiles.units import ceil_div
from device_profiles.workload import ModelSpec

Logits = NDArray[np.float32]
Hidden = NDArray[np.float32]
"""Hidden states between two ranges of layers: a row for each token, as wide as the model's hidden size. Runtimes that
compute in fewer bits give theirs in float32, which holds them exactly."""
NO_REWIND = "it keeps a recurrent state, from which rejected drafts cannot be taken back"
"""Why a model is served without drafts (Capabilities.rewinds)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence, written at `start`, and the rows of logits wanted from them.

    `slot` names the sequence (0 <= slot < capabilities.slots). `start` is the position of the first token, at most what
    the slot holds. A smaller `start` rolls the slot back to it first, but never into positions that the slot shares.
    Row i predicts the token at position start + i + 1. `rows` is the half-open range of offsets into `tokens` whose
    logits come back. `apart`: the rows use the single-row kernel (see Capabilities.apart_tokens). `best`: so many of
    the best logits of each wanted row are enough (see Capabilities.best_logits), 0: all of them come back.
    `temperature`: at which the masses of these rows are asked for, too (BestLogits), 0.0: they are not.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    rows: tuple[int, int]
    apart: bool = False
    best: int = 0
    temperature: float = 0.0


class BestLogits(NamedTuple):
    """The best `logits` (float32) of rows, and which of a row's outputs they are (`ids`, uint32), both of shape
    (rows, k). The best comes first, the lower id first among equals. A row with NaN has NaN or infinity first.

    `masses`, (rows,): the sums over all outputs of exp((logit - best logit) / temperature), but for one in a thousand
    of it; anything where no temperature was given. `read_row`: returns all logits of one of the rows, until the next
    forward. It waits for the device, so it is for the rare row that the best do not decide: of a segment that asked for
    more than one. Raises DeviceLost."""

    logits: Logits
    ids: NDArray[np.uint32]
    masses: NDArray[np.float32]
    read_row: Callable[[int], Logits]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """`logits`: float32, shape (wanted rows over all segments in order, spec.outputs), valid until the next
    forward. `device_ms`: the runtime's own time for this forward, without the adapter's. `stage_ms`: each stage's part
    of it, where there are several. `best`: of the segments for which the best are enough (Segment.best), in order,
    valid as long. `logits` has the rows of the others. There are as many as any of them asks for, or all outputs."""

    logits: Logits
    device_ms: float
    stage_ms: tuple[float, ...] = ()
    best: BestLogits | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded model can do.

    `numerical_class`: how rows are computed, as the compiled model has it. `row_invariant`: a row's logits are expected
    to be the same to the bit whatever else is in the batch (adapters/invariance.py measures it). `min_rows`: minimum
    rows that every segment is charged for (2 where exactness needs a second row: then the first draft token is free).

    `apart_tokens`: a runtime may compute a row faster alone than as one of several of its segment, with other last
    bits. The kernel of a row must then follow from the request alone. Rows behind a prompt of at most `apart_tokens`
    tokens use this single-row kernel (`Segment.apart`), other rows do not. Such rows are charged one by one, but a
    forward of a single row is charged `min_rows`. `apart_rows`: minimum rows that a segment of them is charged for.

    `static_widths`: where shapes are static, the numbers of rows that there are graphs for, in ascending order. Each
    sequence is run in forwards of these widths, and a row that is left over costs like one that is used.

    `device_name`: for people, where it is another than that of `Adapter.devices`, "" where it is that.

    `best_logits`: a segment may ask for up to so many of each row's best logits alone (Segment.best), so that the
    others stay on the device; 0: rows come back whole.

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
    min_rows: int
    weights: str
    numerical_class: NumericalClass
    exactness: Exactness
    device: str
    apart_tokens: int = 0
    apart_rows: int = 1
    static_widths: tuple[int, ...] = ()
    rewinds: bool = True
    device_name: str = ""
    best_logits: int = 0

    @property
    def activations(self) -> Precision:
        return self.numerical_class.activations

    @property
    def kv_cache(self) -> Precision:
        return self.numerical_class.kv_cache

    def count_charged_rows(self, rows: int, *, apart: bool, alone: bool) -> int:
        """Return how many rows a segment of so many is charged for; `alone`: nothing else is in the forward."""
        return max(rows, self.apart_rows if apart and not alone else self.min_rows)


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


@runtime_checkable
class LoadedHead(LoadedModel, Protocol):
    """A draft model that reads what its target computed, where the target has it (arXiv 2503.01840). Its rows of
    committed tokens take the target's hidden states of the position before; those behind take what it made itself.
    `memory_bytes`: what it added to the process."""

    memory_bytes: int

    def follow(self, slot: int, source: int, positions: int) -> None:
        """Say that a slot is of the sequence that the target has in its slot `source`. Of that `positions` tokens are
        committed, and the target has computed all but the last at least."""
        ...


@runtime_checkable
class TakesHeads(Protocol):
    """A loaded model that keeps its hidden states for heads."""

    def attach_head(self, directory: Path, slots: int) -> LoadedHead:
        """Load a head for so many sequences beside this model, and keep hidden states for it until it is closed. What
        was computed before has none. Another thread than that of forwards may call it.

        Raises ModelRefused, Unsupported, and OutOfMemory.
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
    `device_ms`: the runtime's own time. `stays`: the next forward leaves `output` as it is. `best`: as there."""

    output: NDArray[np.float32]
    device_ms: float
    stays: bool = False
    best: BestLogits | None = None


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


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA adapter of a model: what requests call it, the file that it is read from, and a digest of its content."""

    name: str
    path: str
    digest: str


@runtime_checkable
class CountsTouchedBlocks(Protocol):
    """A model that knows how much of its KV pool was ever written."""

    def count_touched_blocks(self) -> int:
        """Return how many blocks ever held something."""
        ...


@runtime_checkable
class LoraSlots(Protocol):
    """A loaded model that computes each sequence with one of its LoRA adapters, or with none. A forward may have
    sequences of several: none of them touches another's rows. What `share` remembers of a slot is found by slots of the
    same adapter alone, and a fork has its source's."""

    @property
    def loras(self) -> Sequence[str]:
        """Return the names of its adapters."""
        ...

    def use_lora(self, slot: int, name: str) -> None:
        """Let a free slot compute with the adapter of this name from now on, "" with none. It stays the slot's when
        that is released.

        Raises Unsupported where the model has no such adapter, or the slot holds something.
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
