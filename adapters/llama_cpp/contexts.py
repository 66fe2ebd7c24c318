"""Sequences on llama.cpp, each in a context of the library of its own, over weights that all of them share.

Several sequences in one cache would have their positions where others left room, and the order of sums would follow
from that; a context of its own has position p in cell p. A library that was built here computes several contexts in one
pass over the weights (docs/adr/0158-sequences-in-one-pass.md). Contexts grow by whole steps: the library cannot enlarge
one, so a larger one takes over what it holds.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from adapters.contract import DeviceLost, ForwardResult, NumericalClass, OutOfMemory, Segment
from adapters.failures import classify_failure
from adapters.kv_blocks import BlockPool
from adapters.llama_cpp.draft_file import EmbeddingTable
from adapters.llama_cpp.native import NativeLibrary
from adapters.pooled import PooledSlots, cut_segment, take_piece
from device_profiles.device_names import is_processor
from device_profiles.units import ceil_div

Kept = TypeVar("Kept")
"""What of a sequence goes into another context."""

# Prefixes are shared by whole blocks (ADR 0013). Not tuned.
BLOCK_TOKENS: Final = 32
MOST_ROWS: Final = 24
"""Of a call of the library. More are no faster on a processor (ADR 0109), and each context has buffers for them."""
STEP_CELLS: Final = 256
"""The library's attention reads so many positions at a time, so a context has a multiple of them. ADR 0109."""
GROWTH: Final = 8
"""A context grows by an eighth of what it holds, at least: copying it stays a small part of what filled it. ADR 0109:
to open one takes 29 ms."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Room for the tokens of a forward, and for rows of the embedding where the loaded model does not have all."""

    tokens: Any
    rows: Any


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that a library has loaded: its handle, and where and by how many threads it runs. `embedding`: of all
    tokens, where the loaded model has some. `loras`: the handles of its adapters by their names."""

    library: NativeLibrary
    handle: int
    device: str
    threads: int
    embedding: EmbeddingTable | None = None
    loras: Mapping[str, int] = field(default_factory=dict)

    @property
    def spare_cells(self) -> int:
        """How many positions behind its own a forward may need."""
        return self.library.least_fed_rows - 1 if self.embedding is not None else 0

    def new_batch(self, rows: int) -> Batch:
        """Return room for `decode`, which `free_batch` frees."""
        width = 0 if self.embedding is None else self.embedding.width
        return Batch(self.library.new_batch(rows), self.library.new_batch(rows, width) if width else None)

    def free_batch(self, batch: Batch) -> None:
        for room in filter(None, (batch.tokens, batch.rows)):
            self.library.free_batch(room)

    def open_context(self, cells: int, give_up: Callable[[], None] | None = None, lora: int = 0) -> int:
        """Open a context of so many positions; `give_up` as in NativeLibrary, `lora` the handle of its adapter. Raises
        OutOfMemory, also where other models of this process have all contexts, and keep them."""
        library = self.library
        if not library.make_room():
            raise OutOfMemory(f"{library.name} has no contexts left in this process", can_go_on=True)
        context = library.open_context(self.handle, cells, MOST_ROWS, self.threads, self.device, give_up)
        if not context:
            failure = classify_failure(RuntimeError(library.last_words or "no reason given"), library.name)
            text = str(failure) if isinstance(failure, OutOfMemory) else f"{failure} (a context of {cells} positions)"
            raise OutOfMemory(text, can_go_on=True)
        if lora:
            library.apply_lora(context, lora)
        return context

    def decode(self, context: int, batch: Batch, tokens: Sequence[int], start: int, wanted: range) -> None:
        """Run tokens in a context, as NativeLibrary.decode does. Raises DeviceLost and its kinds."""
        known = tokens if self.embedding is None else self.embedding.find_places(tokens)
        if known is not None:
            code = self.library.decode(context, batch.tokens, known, start, wanted)
        else:
            code = self._decode_rows(context, batch, tokens, start, wanted)
        if code:
            reason = self.library.last_words or f"llama_decode returned {code}"
            raise classify_failure(RuntimeError(reason), self.library.name, last_line=True)

    def _decode_rows(self, context: int, batch: Batch, tokens: Sequence[int], start: int, wanted: range) -> int:
        """Run tokens of which the loaded model does not have all."""
        library, embedding = self.library, self.embedding
        assert embedding is not None  # noqa: S101 -- a whole model has all tokens
        missing = library.least_fed_rows - len(tokens)
        rows = embedding.read([*tokens, *[tokens[0]] * missing])
        code = library.decode(context, batch.rows, rows, start, wanted)
        if missing > 0:
            library.cut(context, start + len(tokens))
        return code


def choose_width(position: int, width: int, border: int) -> int:
    """Return how many rows a forward from a position on has: `width`, or one where fewer are left before the next
    multiple of `border`. So none reaches over that.

    Attention on a GPU sums over all positions up to the next border, in an order that depends on how many these are. So
    a row has the same bits in every forward only where its position alone says which border that is.
    """
    return width if border - position % border >= width else 1


def cut_at_borders(segment: Segment, width: int, border: int) -> Iterator[Segment]:
    """Yield the pieces of a segment, each for a forward of `choose_width` rows. A position is in the same kind of
    forward wherever the segment begins."""
    begin = 0
    while begin < len(segment.tokens):
        at = segment.start + begin
        before = border - at % border - width + 1  # positions from which a whole forward ends before the border
        size = max(1, min(choose_width(at, width, border), len(segment.tokens) - begin, before))
        yield take_piece(segment, begin, size)
        begin += size


Part = tuple[Segment, NDArray[np.float32]]
"""A segment of a forward, and where the logits of its wanted rows go."""


@dataclass(slots=True)
class HeldSequence(Generic[Kept]):
    """What a slot holds. `context` 0: nothing is open yet. `held`: positions in the context. `kept`: what it begins
    with, where that is still to be written into one."""

    context: int = 0
    cells: int = 0
    held: int = 0
    kept: Kept | None = None


class ContextModel(PooledSlots, ABC, Generic[Kept]):
    """See the module and the contract. One thread calls it."""

    def __init__(self, model: OpenModel, pool: BlockPool, numerical_class: NumericalClass, outputs: int) -> None:
        """`outputs`: the width of a row of logits."""
        super().__init__(pool)
        self._library, self._opened, self._model = model.library, model, model.handle
        self._batch = model.new_batch(MOST_ROWS)
        self._sequences: dict[int, HeldSequence[Kept]] = {}
        self._least_outputs = numerical_class.output_rows
        self._width = numerical_class.fixed_width
        self._border = STEP_CELLS if self._width and not is_processor(model.device) else 0
        self._most_rows = self._width or min(MOST_ROWS, numerical_class.most_rows or MOST_ROWS)
        self._logits = np.empty((0, outputs), np.float32)
        self.loras = tuple(model.loras)
        self._handles = (0, *model.loras.values())  # by the negative of a slot's root

    @abstractmethod
    def _read(self, sequence: HeldSequence[Kept]) -> Kept:
        """Return what a sequence holds, or begins with."""

    @abstractmethod
    def _take_first(self, kept: Kept, positions: int) -> Kept:
        """Return the first positions of what a sequence holds."""

    @abstractmethod
    def _write(self, context: int, kept: Kept) -> int:
        """Let an empty context hold what was kept; returns how many positions that are."""

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        if not self._model:
            raise DeviceLost("the model was closed")
        self._check(batch)
        self._pool.reserve(batch)
        counts = [segment.rows[1] - segment.rows[0] for segment in batch]
        begins = [0, *accumulate(counts)]
        started = time.perf_counter()
        try:
            logits = self._room(begins[-1])
            parts = [
                (segment, logits[begin : begin + count])
                for segment, begin, count in zip(batch, begins, counts, strict=False)
            ]
            for together in self._group(parts):
                if len(together) > 1:
                    self._run_together(together)
                else:
                    self._run(*together[0])
        except MemoryError as error:  # of numpy
            raise OutOfMemory(f"there is no memory for a forward: {error}", can_go_on=True) from error
        return ForwardResult(logits, (time.perf_counter() - started) * 1000.0)

    def _group(self, parts: Iterable[Part]) -> Iterator[list[Part]]:
        """Yield what one call computes: several sequences where the library computes their rows in one pass, if each
        has no more rows than that may have."""
        most_rows = self._most_rows if self._library.joins and not self._width else 0
        together: list[Part] = []
        rows = 0
        for part in parts:
            own = self._pool.count_padded_rows(part[0])
            if together and rows + own > most_rows:
                yield together
                together, rows = [], 0
            together.append(part)
            rows += own
        if together:
            yield together

    def _run(self, segment: Segment, logits: NDArray[np.float32]) -> None:
        sequence = self._prepare_for(segment)
        done = 0
        for piece in self._cut(segment):
            count, wanted = self._start(sequence, piece)
            sequence.held = piece.start + count
            first, last = piece.rows
            if last > first:
                rows = self._library.read_logits(sequence.context, len(wanted), logits.shape[1])
                logits[done : done + last - first] = rows[first - wanted.start : last - wanted.start]
                done += last - first

    def _run_together(self, parts: Sequence[Part]) -> None:
        """Run sequences in one pass over the weights: none has more rows than a call."""
        sequences = [self._prepare_for(segment) for segment, _ in parts]
        with self._library.share_pass(self._opened.threads):
            starts = [self._start(sequence, segment) for (segment, _), sequence in zip(parts, sequences, strict=True)]
        for place, (segment, logits) in enumerate(parts):
            (count, wanted), (first, last) = starts[place], segment.rows
            sequences[place].held = segment.start + count
            if last > first:
                rows = self._library.read_joined(place, logits.shape[1])
                begin = 0 if len(rows) == count else wanted.start
                logits[:] = rows[first - begin : last - begin]

    def _start(self, sequence: HeldSequence[Kept], piece: Segment) -> tuple[int, range]:
        """Run a piece of a segment; returns how many rows it has, and the logits of which ones are computed."""
        tokens = [*piece.tokens, *[piece.tokens[0]] * (self._count_rows(piece) - len(piece.tokens))]
        wanted = self._widen(*piece.rows, len(tokens))
        if sequence.held > piece.start:
            self._library.cut(sequence.context, piece.start)
        sequence.held = piece.start  # what a failed call leaves behind it is forgotten by the next one
        self._decode(sequence.context, tokens, piece.start, wanted)
        return len(tokens), wanted

    def _prepare_for(self, segment: Segment) -> HeldSequence[Kept]:
        end = segment.start + self._pool.count_padded_rows(segment) + self._opened.spare_cells
        return self._prepare(segment.slot, segment.start, end)

    def _cut(self, segment: Segment) -> Iterator[Segment]:
        """Yield the pieces that calls are made of. None is of one row where a segment may not be."""
        if self._border:
            return cut_at_borders(segment, self._width, self._border)
        return cut_segment(segment, self._most_rows, 1 if self._width else self._pool.rules.pad_to)

    def _count_rows(self, piece: Segment) -> int:
        if self._border:
            return choose_width(piece.start, self._width, self._border)
        return self._width or max(len(piece.tokens), self._pool.rules.pad_to)

    def _widen(self, first: int, last: int, rows: int) -> range:
        """Return the rows whose logits a call computes: those that are wanted, and as many as their class needs."""
        if first == last:
            return range(0)
        if self._width:
            return range(rows)
        last = max(last, min(first + self._least_outputs, rows))
        return range(min(first, max(0, last - self._least_outputs)), last)

    def _prepare(self, slot: int, start: int, end: int) -> HeldSequence[Kept]:
        """Return a slot's sequence with room for `end` positions, of which it holds the first `start`."""
        sequence = self._sequences.setdefault(slot, HeldSequence())
        if sequence.cells < end or sequence.kept is not None:
            if sequence.kept is None and start:
                sequence.kept = self._take_first(self._read(sequence), start)
            self._close(sequence)
            wanted = max(end, start + start // GROWTH)
            cells = ceil_div(wanted, STEP_CELLS) * STEP_CELLS
            lora = self._handles[-self._pool.find_root(slot)]
            sequence.context = self._opened.open_context(cells, partial(self._give_up, sequence), lora)
            sequence.cells = cells
            if sequence.kept is not None:
                sequence.held, sequence.kept = self._write(sequence.context, sequence.kept), None
        self._library.touch_context(sequence.context)
        return sequence

    def _give_up(self, sequence: HeldSequence[Kept]) -> None:
        """Keep what a sequence holds beside a context."""
        sequence.kept = self._read(sequence)
        self._close(sequence)

    def _decode(self, context: int, tokens: Sequence[int], start: int, wanted: range) -> None:
        try:
            self._opened.decode(context, self._batch, tokens, start, wanted)
        except DeviceLost:
            self.close()
            raise

    def _room(self, rows: int) -> NDArray[np.float32]:
        """Return rows of a buffer that is kept: a fresh one would be zeroed by the kernel page by page."""
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._logits.shape[1]), np.float32)
        return self._logits[:rows]

    def _close(self, sequence: HeldSequence[Kept]) -> None:
        if sequence.context:
            self._library.close_context(sequence.context)
        sequence.context = sequence.held = sequence.cells = 0

    def _drop(self, slot: int) -> None:
        self._pool.release(slot)
        sequence = self._sequences.pop(slot, None)
        if sequence is not None:
            self._close(sequence)

    def close(self) -> None:
        for sequence in self._sequences.values():
            self._close(sequence)
        self._sequences.clear()
        if self._model:
            self._opened.free_batch(self._batch)
            self._library.close_model(self._model)
            self._model = 0
