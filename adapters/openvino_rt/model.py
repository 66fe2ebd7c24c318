"""A paged-attention model on an OpenVINO device.

Exactness was measured (docs/adr/0040-numerical-classes.md). A row's logits are the same to the bit in every forward in
which its segment has two rows or more. They are the same to the bit again where each row is a
sequence of its own (the single-row kernel), in every forward of enough rows. So `bit` pads a prompt's last single row
with a second one, and a forward of too few rows with rows of a scratch sequence. Nobody reads their results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adapters.contract import (
    BlockRules,
    Capabilities,
    DeviceLost,
    Hidden,
    KvLayout,
    LayerRange,
    LoadOptions,
    Logits,
    NumericalClass,
    OutOfMemory,
    Segment,
    ShardResult,
    Unsupported,
)
from adapters.kv_blocks import BlockPool
from adapters.openvino_rt.failures import FAILURES, classify_openvino_failure
from adapters.openvino_rt.graph import HIDDEN_INPUT, KV_PREFIXES, ROWS_INPUT
from adapters.pooled import Bytes, PooledModel
from device_profiles.profile import Exactness
from device_profiles.units import ceil_div
from device_profiles.workload import ModelSpec

_FILLER = 0
"""The token of a row that nobody asked for: every vocabulary has it."""


@dataclass(slots=True)
class Rows:
    """`tokens` and `positions` are of each row. `pasts`, `begins`, `blocks` and `block_begins` are of each sequence;
    rows of the single-row kernel are sequences of their own over the same blocks. `wanted`: the rows whose logits
    come back; `given`: those that tokens of the batch have, the others only fill up. `hidden`: what each row is where a
    range of layers reads no tokens, shape (rows, hidden size)."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    pasts: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=lambda: [0])
    blocks: list[int] = field(default_factory=list)
    block_begins: list[int] = field(default_factory=lambda: [0])
    wanted: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    hidden: Hidden | None = None
    longest: int = 0

    def add(self, segment: Segment, count: int, table: Sequence[int], block_tokens: int, *, apart: bool) -> None:
        """Append a segment as `count` rows, its first token behind its own; `table`: the blocks that hold them all."""
        first, end = len(self.tokens), segment.start + count
        self.tokens += [*segment.tokens, *[segment.tokens[0]] * (count - len(segment.tokens))]
        self.positions += range(segment.start, end)
        self.given += range(first, first + len(segment.tokens))
        self.wanted += range(first + segment.rows[0], first + segment.rows[1])
        step = 1 if apart else count
        for start in range(segment.start, end, step):
            self._add_sequence(start, step, table[: ceil_div(start + step, block_tokens)])

    def fill(self, block: int) -> None:
        """Append a row of no sequence, which is written to the beginning of `block`."""
        self.tokens.append(_FILLER)
        self.positions.append(0)
        self._add_sequence(0, 1, [block])

    def _add_sequence(self, start: int, count: int, blocks: Sequence[int]) -> None:
        self.pasts.append(start)
        self.begins.append(self.begins[-1] + count)
        self.blocks += blocks
        self.block_begins.append(len(self.blocks))
        self.longest = max(self.longest, start + count)

    def read_hidden(self, hidden: Hidden) -> None:
        """Take the hidden states of the batch's tokens, in its order. Rows that only fill up are 0."""
        self.hidden = np.zeros((len(self.tokens), hidden.shape[1]), np.float32)
        self.hidden[self.given] = hidden

    def split_rows(self, width: int) -> Iterator[Rows]:
        """Yield the rows in parts of `width`. All use the single-row kernel, and there is a multiple of `width`."""
        for first in range(0, len(self.tokens), width):
            part, stop = Rows(), first + width
            part.tokens, part.positions = self.tokens[first:stop], self.positions[first:stop]
            part.wanted = [row - first for row in self.wanted if first <= row < stop]
            part.given = [row - first for row in self.given if first <= row < stop]
            part.hidden = self.hidden[first:stop] if self.hidden is not None else None
            for row in range(first, stop):
                part._add_sequence(self.pasts[row], 1, self.blocks[self.block_begins[row] : self.block_begins[row + 1]])
            yield part


def _rank(cache: str) -> tuple[int, int]:
    """Return where a cache stands among those of keys of all layers, then of values, by its name."""
    prefix, _, layer = cache.partition(".")
    return KV_PREFIXES.index(f"{prefix}."), int(layer)


class PagedModel(PooledModel):
    """See the module and the contract. One thread calls it."""

    def __init__(
        self,
        compiled: Any,
        spec: ModelSpec,
        options: LoadOptions,
        numerical_class: NumericalClass,
        *,
        weights: str,
        layers: LayerRange,
    ) -> None:
        import openvino as ov

        self.layers = layers
        self._inputs = {name for port in compiled.inputs for name in port.get_names()}

        self._tensor = ov.Tensor
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self._caches: list[Any] = []
        self._bound: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
        self._class = numerical_class
        block_tokens, blocks = self._allocate_cache(options.kv_cache_bytes)
        self._scratch_block = blocks
        kinds = dict.fromkeys(f"{cache.element_type.type_name}{list(cache.shape)[1:]}" for cache in self._caches)
        self.kv_layout = KvLayout(
            f"openvino paged {len(self._caches)}x{'/'.join(kinds)}",
            page_tokens=block_tokens,
            page_bytes=tuple(cache.byte_size // cache.shape[0] for cache in self._caches),
        )
        super().__init__(
            BlockPool(BlockRules(blocks, block_tokens, options.slots, pad_to=numerical_class.segment_rows))
        )
        self.spec = spec
        self.capabilities = Capabilities(
            slots=options.slots,
            max_context_tokens=spec.context_length,
            max_batch_rows=min(options.max_batch_rows, numerical_class.most_rows or options.max_batch_rows),
            block_tokens=block_tokens,
            total_blocks=blocks,
            row_invariant=options.exactness is Exactness.BIT,
            min_rows=max(numerical_class.segment_rows, numerical_class.forward_rows),
            weights=weights,
            numerical_class=numerical_class,
            exactness=options.exactness,
            device=options.device,
            # rows alone in their sequence are the cheaper ones (ADR 0002)
            apart_tokens=spec.context_length if numerical_class.apart else 0,
        )

    def _allocate_cache(self, budget_bytes: int) -> tuple[int, int]:
        """Give every layer its share of the pool; returns (positions of a block, number of blocks)."""
        import openvino as ov

        caches = [port for port in self._compiled.inputs if port.any_name.startswith(KV_PREFIXES)]
        self._keys_first = sorted(range(len(caches)), key=lambda at: _rank(caches[at].any_name))
        shapes = [[port.get_partial_shape()[axis].get_length() for axis in (1, 2, 3)] for port in caches]
        if len({positions for _, positions, _ in shapes}) > 1:
            raise Unsupported(
                f"a KV cache in {self._class.kv_cache}: OpenVINO gives keys and values blocks of other sizes"
            )
        block_bytes = sum(
            int(np.prod(shape)) * port.get_element_type().size for shape, port in zip(shapes, caches, strict=True)
        )
        blocks = max(1, budget_bytes // block_bytes - 1)
        try:
            for shape, port in zip(shapes, caches, strict=True):
                # One more than the pool knows: padding is written there.
                tensor = ov.Tensor(port.get_element_type(), ov.Shape([blocks + 1, *shape]))
                self._request.set_tensor(port.any_name, tensor)
                self._caches.append(tensor)
        except FAILURES as error:
            raise classify_openvino_failure(error) from error
        return shapes[0][1], blocks

    def forward_layers(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        if self._request is None:
            raise DeviceLost("the model was closed")
        self._check(batch)
        self._pool.reserve(batch)
        rows = self._rows(batch)
        if hidden is not None:
            rows.read_hidden(hidden)
        width = self._class.fixed_width
        if not width:
            output, device_ms = self._run(rows, self._class.output_rows)
            return ShardResult(output, device_ms)
        parts = [self._run(part, width) for part in rows.split_rows(width)]
        return ShardResult(np.concatenate([part for part, _ in parts]), sum(device_ms for _, device_ms in parts))

    def _run(self, rows: Rows, least_outputs: int) -> tuple[Logits, float]:
        """Return the logits of the wanted rows, or the hidden states of those that were asked for, and the
        milliseconds that it took. The output layer runs over `least_outputs` rows or more: a gather of nothing would
        leave it without a shape that it knows."""
        wanted = rows.wanted or [0]
        self._set_inputs(rows, wanted + wanted[-1:] * (least_outputs - len(wanted)))
        started = time.perf_counter()
        try:
            self._request.infer()
        except FAILURES as error:
            failure = classify_openvino_failure(error)
            if isinstance(failure, OutOfMemory):
                failure.can_go_on = True  # buffers grow before they are used, and no position in front was written
            else:
                self.close()
            raise failure from error
        device_ms = (time.perf_counter() - started) * 1000.0
        output = self._request.get_output_tensor(0).data
        output = output.reshape(-1, output.shape[-1])
        if ROWS_INPUT not in self._inputs:
            return output[rows.given], device_ms
        logits = output[: len(rows.wanted)]
        return (logits.copy() if self._class.fixed_width else logits), device_ms

    def _rows(self, batch: Sequence[Segment]) -> Rows:
        """Return the rows of a forward, those that only fill it up among them."""
        rows = Rows()
        width, least = self._class.fixed_width, self._class.forward_rows
        for segment in batch:
            apart = segment.apart or width > 0
            count = len(segment.tokens) if apart else self._pool.count_padded_rows(segment)
            blocks = self._pool.table(segment.slot, segment.start + count)
            rows.add(segment, count, blocks, self._pool.block_tokens, apart=apart)
        # A forward with a segment of several rows has the kernels of many.
        missing = -len(rows.tokens) % width if width else least - len(rows.tokens)
        for _ in range(missing):
            rows.fill(self._scratch_block)
        return rows

    def _set_inputs(self, rows: Rows, wanted: list[int]) -> None:
        self._set("input_ids", rows.tokens, np.int64)
        self._set("position_ids", rows.positions, np.int64)
        self._set("past_lens", rows.pasts, np.int32)
        self._set("subsequence_begins", rows.begins, np.int32)
        self._set("block_indices", rows.blocks, np.int32)
        self._set("block_indices_begins", rows.block_begins, np.int32)
        self._set("max_context_len", rows.longest, np.int32)
        self._set(ROWS_INPUT, wanted, np.int64)
        if rows.hidden is not None:
            self._set(HIDDEN_INPUT, rows.hidden[:, None, :], np.float32)

    def _set(self, name: str, values: Sequence[int] | int | Hidden, kind: type[np.generic]) -> None:
        """Write an input, where these layers have it. The request keeps a tensor that is only overwritten while its
        shape stays the same: binding one takes longer than filling it."""
        if name not in self._inputs:
            return
        bound = self._bound.get(name)
        fresh = np.array(values, dtype=kind)
        if bound is not None and bound.shape == fresh.shape:
            bound[...] = fresh
            return
        self._bound[name] = fresh
        self._request.set_tensor(name, self._tensor(fresh, shared_memory=True))

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """The bytes of a position in each cache, keys of all layers and then values."""
        return tuple(self.kv_layout.page_bytes[cache] // self._pool.block_tokens for cache in self._keys_first)

    def export_rows(self, slot: int, start: int, end: int) -> list[Bytes]:
        """Return copies of what a slot has at these positions, of each cache an array (positions, bytes of one)."""
        size = self._pool.block_tokens
        first = start // size
        table = self._pool.table(slot, end)[first:]
        rows = []
        for cache in self._keys_first:
            blocks = self._caches[cache].data[table]  # (blocks, heads, positions of a block, elements of a head)
            lines = blocks.swapaxes(1, 2).reshape(len(table) * size, -1).view(np.uint8)
            rows.append(lines[start - first * size : end - first * size])
        return rows

    def import_rows(self, slot: int, rows: Sequence[Bytes]) -> None:
        """Let a free slot hold rows as `export_rows` gives them, from position 0 on. Raises CapacityError."""
        self._pool.extend(slot, len(rows[0]))
        table, size = self._pool.table(slot, len(rows[0])), self._pool.block_tokens
        for cache, own in zip(self._keys_first, rows, strict=True):
            data = self._caches[cache].data
            _, heads, _, width = data.shape
            lines = np.zeros((len(table) * size, own.shape[1]), np.uint8)
            lines[: len(own)] = own
            data[table] = lines.view(data.dtype).reshape(len(table), size, heads, width).swapaxes(1, 2)

    def _read_pages(self, cache: int, slot: int, table: Sequence[int], start: int) -> Bytes:
        return self._pages(cache)[table[start:]].reshape(-1)

    def _write_pages(self, cache: int, slot: int, table: Sequence[int], span: tuple[int, int], pages: Bytes) -> None:
        begin, first = span
        self._pages(cache)[table[first:]] = pages.reshape(len(table) - begin, -1)[first - begin :]

    def _pages(self, cache: int) -> Bytes:
        """Return the blocks of a cache as rows of bytes."""
        tensor = self._caches[cache]
        pages: Bytes = tensor.data.reshape(tensor.shape[0], -1).view(np.uint8)
        return pages

    def _copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for cache in range(len(self._caches)):
            pages = self._pages(cache)
            for source, target in zip(sources, targets, strict=True):
                pages[target] = pages[source]

    def _erase(self, blocks: Sequence[int]) -> None:
        for cache in self._caches:
            cache.data.reshape(cache.shape[0], -1)[list(blocks)] = 0

    def close(self) -> None:
        self._caches.clear()
        self._request = None
        self._compiled = None
