"""A decoder on an ONNX Runtime execution provider: caches bound once, a call for each sequence of the batch.

Exactness (measured, docs/adr/0008-onnx-runtime-beside-openvino.md): a row's logits are the same to the bit in every
call of two rows or more. One-row calls take other kernels. So `bit` pads a one-row segment with a second row whose
result nobody reads. The attention operator cuts long calls into blocks of rows, and a last block of one row is a
one-row call again. An even number of rows leaves no such block, because blocks are even.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import (
    BlockRules,
    DeviceLost,
    Hidden,
    LayerRange,
    LoadOptions,
    NumericalClass,
    OutOfMemory,
    Segment,
    ShardResult,
)
from adapters.failures import classify_failure
from adapters.kv_blocks import BlockPool
from adapters.kv_memory import KvMemory, MappedModel, block_tokens
from adapters.onnx_rt.graph import HIDDEN_INPUT, HIDDEN_OUTPUT, cache_names
from adapters.pooled import cut_segment, describe_capabilities
from device_profiles.profile import Exactness
from device_profiles.units import ceil_div
from device_profiles.workload import ModelSpec

_LEAST_ROW_BLOCK = 32
"""No block of the attention operator's is smaller: twice the head size, or what its scores take of the L2 cache. ADR
0020."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of one position: for each of the layers keys and values, (kv_heads, head_dim) in float32."""

    layers: LayerRange
    kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        return self.caches * self.kv_heads * self.head_dim * 4

    @property
    def caches(self) -> int:
        return 2 * (self.layers.end - self.layers.first)


class OrtModel(MappedModel):
    """See the module and the contract. One thread calls it."""

    def __init__(
        self,
        session: Any,
        spec: ModelSpec,
        options: LoadOptions,
        numerical_class: NumericalClass,
        *,
        cache: CacheShape,
        weights: str,
        device: str,
    ) -> None:
        self._session = session
        self._inputs = {value.name for value in session.get_inputs()}
        self.layers = cache.layers
        self._last = cache.layers.end == spec.layers
        self._outputs = spec.outputs
        self._hidden = 0 if self._last else int(session.get_outputs()[0].shape[2])
        self._width = numerical_class.fixed_width
        pad_to = numerical_class.segment_rows
        block = block_tokens(cache.head_dim * 4, options.kv_cache_bytes)
        blocks = max(1, options.kv_cache_bytes // (block * cache.bytes_per_token))
        even_behind = _LEAST_ROW_BLOCK if options.exactness is Exactness.BIT and not self._width else 0
        rules = BlockRules(
            blocks, block, options.slots, pad_to=pad_to, even_behind=even_behind, multiple=self._width or 1
        )
        super().__init__(BlockPool(rules))
        self._memory = KvMemory(
            caches=cache.caches,
            slots=options.slots,
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            block=block,
            blocks=blocks,
            slot_blocks=min(ceil_div(spec.context_length + max(pad_to, self._width), block), blocks),
        )
        self.kv_layout = self._memory.layout("onnxruntime")
        self._calls: dict[tuple[int, int], _Call] = {}
        self._logits = np.empty((0, spec.outputs), np.float32)
        self.spec = spec
        self.capabilities = describe_capabilities(
            rules, self.spec, options, numerical_class, weights=weights, device=device
        )

    def forward_layers(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        if self._session is None:
            raise DeviceLost("the model was closed")
        self._check(batch)
        self._pool.reserve(batch)
        try:
            return self._forward(batch, hidden) if self._last else self._forward_inner(batch, hidden)
        except MemoryError as error:  # of numpy
            raise OutOfMemory(f"there is no memory for a forward: {error}", can_go_on=True) from error

    def _forward(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        """Run layers whose last is the model's: the rows are logits."""
        batch = self._cut(batch)
        counts = [segment.rows[1] - segment.rows[0] for segment in batch]
        logits = self._room(sum(counts))
        begins = [0, *accumulate(counts)]
        started = time.perf_counter()
        for group, call in self._calls_of(batch, hidden):
            first = group[0]
            if len(group) == 1:
                call.bind_output("logits", logits[begins[first] : begins[first + 1]])
                self._run(call)
            else:
                rows = np.empty((sum(counts[index] for index in group), self._outputs), np.float32)
                call.bind_output("logits", rows)
                self._run(call)
                logits[[begins[index] for index in group if counts[index]]] = rows
        return ShardResult(logits, (time.perf_counter() - started) * 1000.0)

    def _forward_inner(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        """Run layers behind which others come: the rows are hidden states."""
        batch = self._cut(batch)
        begins = [0, *accumulate(len(segment.tokens) for segment in batch)]
        given = np.empty((begins[-1], self._hidden), np.float32)
        started = time.perf_counter()
        for group, call in self._calls_of(batch, hidden):
            made = np.empty((len(group), self._pool.count_padded_rows(batch[group[0]]), self._hidden), np.float32)
            call.bind_output(HIDDEN_OUTPUT, made)
            self._run(call)
            for rows, index in zip(made, group, strict=True):
                given[begins[index] : begins[index + 1]] = rows[: len(batch[index].tokens)]
        return ShardResult(given, (time.perf_counter() - started) * 1000.0)

    def _cut(self, batch: Sequence[Segment]) -> Sequence[Segment]:
        """Return the segments that calls are made of: pieces of one width where the class has one."""
        return [piece for segment in batch for piece in cut_segment(segment, self._width)] if self._width else batch

    def _calls_of(self, batch: Sequence[Segment], hidden: Hidden | None) -> Iterator[tuple[list[int], _Call]]:
        """Yield the calls of a forward with their inputs set, and which segments each is for."""
        begins = [0, *accumulate(len(segment.tokens) for segment in batch)]
        for group in self._groups(batch):
            segments = [batch[index] for index in group]
            call = self._call(segments[0].slot, len(group))
            self._place(segments)
            call.set_inputs(segments, self._pool.count_padded_rows(segments[0]))
            if hidden is not None:
                call.set_hidden([hidden[begins[index] : begins[index + 1]] for index in group])
            yield group, call

    def _place(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            end = segment.start + self._pool.count_padded_rows(segment)
            try:
                self._memory.place(segment.slot, self._pool.table(segment.slot, end))
            except OutOfMemory:
                self.close()
                raise

    def _groups(self, batch: Sequence[Segment]) -> Iterator[list[int]]:
        """Yield which segments run in one call: the attention operator takes several sequences of one row each,
        where their caches lie side by side. Rows that are padded (exactness `bit`) are two: one sequence a call.
        """
        order = sorted(range(len(batch)), key=lambda index: batch[index].slot)
        group: list[int] = []
        for index in order:
            single = self._pool.count_padded_rows(batch[index]) == 1
            if group and not (single and batch[index].slot == batch[group[-1]].slot + 1):
                yield group
                group = []
            group.append(index)
            if not single:
                yield group
                group = []
        if group:
            yield group

    def _room(self, rows: int) -> NDArray[np.float32]:
        """Return rows of a buffer that is kept: a fresh one would be zeroed by the kernel page by page."""
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._outputs), np.float32)
        return self._logits[:rows]

    def _call(self, slot: int, sequences: int) -> _Call:
        """Return the binding of `sequences` slots from `slot` on."""
        call = self._calls.get((slot, sequences))
        if call is None:
            call = _Call(self._session.io_binding(), self._inputs, self.layers, self._memory, slot, sequences)
            self._calls[slot, sequences] = call
        return call

    def _run(self, call: _Call) -> None:
        try:
            self._session.run_with_iobinding(call.binding)
        except Exception as error:  # the runtime's errors have no other root
            failure = classify_failure(error, "ONNX Runtime", last_line=True)
            if isinstance(failure, OutOfMemory):
                failure.can_go_on = True  # a call allocates what it needs anew, and wrote no position in front of it
            else:
                self.close()
            raise failure from error

    def release(self, slot: int) -> None:
        super().release(slot)
        if self._session is not None:
            self._memory.clear(slot)

    def close(self) -> None:
        self._calls.clear()
        self._session = None
        self._memory.close()


class _Call:
    """The binding of neighbouring slots: their caches once, inputs again only where their shape changes."""

    def __init__(
        self, binding: Any, inputs: set[str], layers: LayerRange, memory: KvMemory, slot: int, sequences: int
    ) -> None:
        """`inputs`: those that these layers have."""
        self.binding = binding
        self._inputs = inputs
        self._kept: dict[str, NDArray[Any]] = {}  # the runtime borrows their memory
        self._seqlens = np.zeros(sequences, np.int32)
        self._total = np.zeros((), np.int32)
        self._ids = np.zeros((sequences, 0), np.int64)
        self._wanted: tuple[int, ...] | None = None
        shape = (sequences, *memory.shape)
        names = zip(cache_names(layers, "past"), cache_names(layers, "present"), strict=True)
        for cache, (past, present) in enumerate(names):
            address = memory.address(cache, slot)
            binding.bind_input(past, "cpu", 0, np.float32, shape, address)
            binding.bind_output(present, "cpu", 0, np.float32, shape, address)
        self._bind("seqlens_k", self._seqlens)
        self._bind("total_sequence_length", self._total)

    def set_inputs(self, segments: Sequence[Segment], rows: int) -> None:
        """Write the tokens of all segments, each padded to `rows`."""
        if self._ids.shape[1] != rows:
            self._ids = np.zeros((len(segments), rows), np.int64)
            self._bind("input_ids", self._ids)
        for index, segment in enumerate(segments):
            self._ids[index, : len(segment.tokens)] = segment.tokens
            self._ids[index, len(segment.tokens) :] = segment.tokens[0]
            self._seqlens[index] = segment.start + rows - 1
        self._total[...] = self._seqlens.max() + 1
        wanted = tuple(rows * index + row for index, segment in enumerate(segments) for row in range(*segment.rows))
        if self._wanted != wanted:
            self._wanted = wanted
            self._bind("wanted_rows", np.array(wanted, np.int64))

    def set_hidden(self, states: Sequence[Hidden]) -> None:
        """Write what each sequence's tokens are. Rows that only fill up are 0."""
        sequences, rows = self._ids.shape
        padded = np.zeros((sequences, rows, states[0].shape[1]), np.float32)
        for own, state in zip(padded, states, strict=True):
            own[: len(state)] = state
        self._bind(HIDDEN_INPUT, padded)

    def bind_output(self, name: str, rows: NDArray[np.float32]) -> None:
        """Have an output written to `rows`."""
        self.binding.bind_output(name, "cpu", 0, np.float32, rows.shape, rows.ctypes.data)

    def _bind(self, name: str, values: NDArray[Any]) -> None:
        if name not in self._inputs:
            return
        self._kept[name] = values
        self.binding.bind_input(name, "cpu", 0, values.dtype.type, values.shape, values.ctypes.data)
