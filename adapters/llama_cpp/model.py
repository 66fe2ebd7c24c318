"""A GGUF file on llama.cpp: a context of the library for each sequence, over weights that all of them share.

Exactness (measured, docs/adr/0109-llama-cpp-behind-the-contract.md): with repacked matrices a row's logits are the same
to the bit in every forward of two rows or more whose logits are wanted of two rows or more; a single row takes other
kernels. So `bit` pads to two rows. Several sequences in one cache would have their positions where others left room,
and the order of sums would follow from that; a context of its own has position p in cell p.

A context grows by whole steps: the library cannot enlarge one, so a larger one takes over its cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from adapters.contract import (
    BlockRules,
    DeviceLost,
    ForwardResult,
    KvLayout,
    LoadOptions,
    NumericalClass,
    OutOfMemory,
    Segment,
)
from adapters.failures import classify_failure
from adapters.llama_cpp.native import NativeLibrary
from adapters.llama_cpp.pool import CopiedBlocks
from adapters.llama_cpp.state import CacheFormat, Rows
from adapters.pooled import Bytes, PooledModel, cut_segment, describe_capabilities
from device_profiles.units import ceil_div
from device_profiles.workload import ModelSpec

BLOCK_TOKENS: Final = 32
MOST_ROWS: Final = 24
"""Of a call of the library. More are no faster on a processor (ADR 0109), and each context has buffers for them."""
_STEP_CELLS: Final = 256
"""The library's attention reads so many positions at a time, so a context has a multiple of them."""
_GROWTH: Final = 8
"""A context grows by an eighth of what it holds, at least: copying it stays a small part of what filled it."""


@dataclass(slots=True)
class _Sequence:
    """What a slot holds. `context` 0: nothing is open yet. `held`: positions in the context. `rows`: what it begins
    with, where that is still to be written into one."""

    context: int = 0
    cells: int = 0
    held: int = 0
    rows: Rows | None = None


class LlamaModel(PooledModel):
    """See the module and the contract. One thread calls it."""

    def __init__(
        self,
        library: NativeLibrary,
        model: int,
        spec: ModelSpec,
        options: LoadOptions,
        numerical_class: NumericalClass,
        *,
        weights: str,
        device: str,
        threads: int,
    ) -> None:
        """`spec.bytes_per_token` is not looked at: the library says what it is. Raises OutOfMemory, and RuntimeFailed
        where the model's state is more than a KV cache."""
        self._library, self._model, self._threads = library, model, threads
        self._device = device
        self._batch: Any = library.new_batch(MOST_ROWS)
        self._sequences: dict[int, _Sequence] = {}
        self._kept: dict[int, Rows] = {}  # what remembered blocks hold that no slot has any more
        self._coming: Rows = []
        self._least_outputs = numerical_class.output_rows
        self._width = numerical_class.fixed_width
        self._format = self._find_format()
        position_bytes = self._format.position_bytes
        blocks = max(1, options.kv_cache_bytes // (BLOCK_TOKENS * position_bytes))
        pad_to = max(numerical_class.segment_rows, 1)
        rules = BlockRules(blocks, BLOCK_TOKENS, options.slots, pad_to=pad_to, multiple=self._width or 1, copies=True)
        self._copied = CopiedBlocks(rules, self._forget)
        super().__init__(self._copied)
        self.kv_layout = KvLayout(
            f"{library.version} {self._format.name}",
            BLOCK_TOKENS,
            tuple(BLOCK_TOKENS * size for size in self._format.row_bytes),
        )
        self.spec = replace(spec, bytes_per_token=position_bytes)
        self._logits = np.empty((0, spec.outputs), np.float32)
        self.capabilities = describe_capabilities(
            rules, self.spec, options, numerical_class, weights=weights, device=device
        )

    def _find_format(self) -> CacheFormat:
        """Return how the library writes a sequence of this model, learnt from a short one."""
        first = self._open(_STEP_CELLS)
        try:
            self._decode(first, [0, 0], 0, range(0))
            return self._library.read_format(first)
        finally:
            self._library.close_context(first)

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        """See the contract."""
        if not self._model:
            raise DeviceLost("the model was closed")
        self._check(batch)
        self._pool.reserve(batch)
        counts = [segment.rows[1] - segment.rows[0] for segment in batch]
        begins = [0, *accumulate(counts)]
        started = time.perf_counter()
        try:
            logits = self._room(begins[-1])
            for segment, begin, count in zip(batch, begins, counts, strict=False):
                self._run(segment, logits[begin : begin + count])
        except MemoryError as error:  # of numpy
            raise OutOfMemory(f"there is no memory for a forward: {error}", can_go_on=True) from error
        return ForwardResult(logits, (time.perf_counter() - started) * 1000.0)

    def _run(self, segment: Segment, logits: NDArray[np.float32]) -> None:
        """Run a segment in as few calls as it takes, and write the rows that are wanted of it."""
        padded = self._pool.count_padded_rows(segment)
        sequence = self._prepare(segment.slot, segment.start, segment.start + padded)
        done = 0
        for piece in self._cut(segment):
            tokens = [*piece.tokens, *[piece.tokens[0]] * (self._count_rows(piece) - len(piece.tokens))]
            first, last = piece.rows
            wanted = self._widen(first, last, len(tokens))
            if sequence.held > piece.start:
                self._library.cut(sequence.context, piece.start)
            sequence.held = piece.start  # what a failed call leaves behind it is forgotten by the next one
            self._decode(sequence.context, tokens, piece.start, wanted)
            sequence.held = piece.start + len(tokens)
            if last > first:
                found = self._library.read_logits(sequence.context, len(wanted), logits.shape[1])
                logits[done : done + last - first] = found[first - wanted.start : last - wanted.start]
                done += last - first

    def _cut(self, segment: Segment) -> Iterator[Segment]:
        """Yield the pieces that calls are made of. None is of one row where a segment may not be."""
        return cut_segment(segment, self._width or MOST_ROWS, 1 if self._width else self._pool.rules.pad_to)

    def _count_rows(self, piece: Segment) -> int:
        return self._width or max(len(piece.tokens), self._pool.rules.pad_to)

    def _widen(self, first: int, last: int, rows: int) -> range:
        """Return the rows whose logits a call computes: those that are wanted, and as many as their class needs."""
        if first == last:
            return range(0)
        if self._width:
            return range(rows)
        last = max(last, min(first + self._least_outputs, rows))
        return range(min(first, max(0, last - self._least_outputs)), last)

    def _prepare(self, slot: int, start: int, end: int) -> _Sequence:
        """Return a slot's sequence with room for `end` positions, of which it holds the first `start`."""
        sequence = self._sequences.pop(slot, _Sequence())
        self._sequences[slot] = sequence  # the last is the one that was used last
        if sequence.cells < end or sequence.rows is not None:
            if sequence.rows is None and start:
                sequence.rows = [rows[:start] for rows in self._read(sequence)]
            self._close(sequence)
            self._make_room()
            wanted = max(end, start + start // _GROWTH)
            sequence.cells = 0
            sequence.context = self._open(cells := ceil_div(wanted, _STEP_CELLS) * _STEP_CELLS)
            sequence.cells = cells
            if sequence.rows is not None:
                self._library.write_state(sequence.context, self._format.join(sequence.rows))
                sequence.held, sequence.rows = len(sequence.rows[0]), None
        return sequence

    def _make_room(self) -> None:
        """See that a context can be opened: the sequence that was used the longest ago has its cache beside one from
        now on. Raises OutOfMemory where other models of this process have them all."""
        while 0 < self._library.most_contexts <= self._library.contexts:
            sequence = next((one for one in self._sequences.values() if one.context), None)
            if sequence is None:
                raise OutOfMemory(f"{self._library.name} has no contexts left in this process", can_go_on=True)
            sequence.rows = self._read(sequence)
            self._close(sequence)

    def _open(self, cells: int) -> int:
        context = self._library.open_context(self._model, cells, MOST_ROWS, self._threads, self._device)
        if not context:
            failure = classify_failure(RuntimeError(self._library.last_words or "no reason given"), self._library.name)
            told = str(failure) if isinstance(failure, OutOfMemory) else f"{failure} (a context of {cells} positions)"
            raise OutOfMemory(told, can_go_on=True)
        return context

    def _decode(self, context: int, tokens: Sequence[int], start: int, wanted: range) -> None:
        code = self._library.decode(context, self._batch, tokens, start, wanted)
        if code:
            reason = self._library.last_words or f"llama_decode returned {code}"
            failure = classify_failure(RuntimeError(reason), self._library.name, last_line=True)
            self.close()
            raise failure

    def _room(self, rows: int) -> NDArray[np.float32]:
        """Return rows of a buffer that is kept: a fresh one would be zeroed by the kernel page by page."""
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._logits.shape[1]), np.float32)
        return self._logits[:rows]

    def _read(self, sequence: _Sequence) -> Rows:
        """Return what a sequence holds: views of what the library wrote, or what it begins with."""
        if sequence.rows is not None:
            return sequence.rows
        return self._format.split(self._library.read_state(sequence.context))

    def _close(self, sequence: _Sequence) -> None:
        if sequence.context:
            self._library.close_context(sequence.context)
        sequence.context = sequence.held = 0

    def _forget(self, block: int) -> None:
        self._kept.pop(block, None)

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        """See the contract."""
        found = self._pool.attach(slot, tokens)
        if found:
            self._begin(slot, found)
        return found

    def fork(self, slot: int, source: int, positions: int, shared: int) -> None:
        """See the contract."""
        self._pool.fork(slot, source, positions, shared)
        self._begin(slot, positions)

    def _begin(self, slot: int, positions: int) -> None:
        """Let a slot begin with copies of the blocks that the pool named."""
        read: dict[int, Rows] = {}
        parts = []
        for block in self._copied.sources:
            if block in self._kept:  # nobody had it
                parts.append(self._kept.pop(block))
                continue
            owner, place = self._copied.find_holder(block)
            if owner not in read:
                read[owner] = self._read(self._sequences[owner])
            at = place * BLOCK_TOKENS
            parts.append([rows[at : at + BLOCK_TOKENS] for rows in read[owner]])
        rows = [np.concatenate(pieces)[:positions] for pieces in zip(*parts, strict=True)]
        self._sequences[slot] = _Sequence(rows=rows)

    def release(self, slot: int) -> None:
        """See the contract."""
        remembered = self._copied.list_remembered(slot)
        if remembered and self._model:
            rows = self._read(self._sequences[slot])
            for place, block in remembered:
                at = place * BLOCK_TOKENS
                self._kept[block] = [one[at : at + BLOCK_TOKENS].copy() for one in rows]
        self._drop(slot)

    def discard(self, slot: int) -> None:
        """See the contract."""
        self._copied.discard(slot)
        self._drop(slot)

    def _drop(self, slot: int) -> None:
        self._pool.release(slot)
        sequence = self._sequences.pop(slot, None)
        if sequence is not None:
            self._close(sequence)

    def export_kv(self, slot: int, positions: int, start_page: int = 0) -> Iterator[Bytes]:
        """See the contract. The library writes all caches at once."""
        table = self._check_export(slot, positions, start_page)
        first = start_page * BLOCK_TOKENS
        for rows in self._read(self._sequences[slot]):
            pages = np.zeros((len(table) * BLOCK_TOKENS - first, rows.shape[1]), np.uint8)
            pages[: positions - first] = rows[first:positions]
            yield pages.reshape(-1)

    def import_kv(self, slot: int, positions: int, pages: Bytes, start_pages: Sequence[int] = (0,)) -> None:
        """See the contract."""
        own = self._sequences.get(slot)
        before = self._read(own) if own is not None else None
        held = self.count_cached_positions(slot)
        most = min(max(positions, 0), self.capabilities.max_context_tokens)
        whole = ceil_div(most, BLOCK_TOKENS) * BLOCK_TOKENS
        self._coming = [np.zeros((whole, size), np.uint8) for size in self._format.row_bytes]
        super().import_kv(slot, positions, pages, start_pages)
        for coming, rows in zip(self._coming, before or self._coming, strict=True):
            coming[:held] = rows[:held]
        if own is not None:
            self._close(own)
        self._sequences[slot] = _Sequence(rows=[coming[:positions] for coming in self._coming])
        self._coming = []

    def _write_pages(self, cache: int, slot: int, table: Sequence[int], span: tuple[int, int], pages: Bytes) -> None:
        begin, first = span
        rows = pages.reshape(-1, self._format.row_bytes[cache])
        self._coming[cache][first * BLOCK_TOKENS : begin * BLOCK_TOKENS + len(rows)] = rows[
            (first - begin) * BLOCK_TOKENS :
        ]

    def close(self) -> None:
        """See the contract."""
        for sequence in self._sequences.values():
            self._close(sequence)
        self._sequences.clear()
        self._kept.clear()
        if self._model:
            self._library.free_batch(self._batch)
            self._library.close_model(self._model)
            self._model = 0
