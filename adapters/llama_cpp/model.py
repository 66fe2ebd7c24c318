"""A GGUF file on llama.cpp whose memory is a KV cache.

Exactness (measured, docs/adr/0109-llama-cpp-behind-the-contract.md): with repacked matrices a row's logits are the same
to the bit in every forward of two rows or more whose logits are wanted of two rows or more; a single row takes other
kernels. So `bit` pads to two rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from adapters.contract import BlockRules, KvLayout, LoadOptions, NumericalClass
from adapters.llama_cpp.contexts import BLOCK_TOKENS, STEP_CELLS, ContextModel, HeldSequence, OpenModel
from adapters.llama_cpp.pool import CopiedBlocks
from adapters.llama_cpp.state import CacheFormat, Rows
from adapters.pooled import Bytes, PooledModel, describe_capabilities
from device_profiles.units import ceil_div
from device_profiles.workload import ModelSpec


class LlamaModel(ContextModel[Rows], PooledModel):
    """See the module and the contract. One thread calls it."""

    def __init__(
        self, model: OpenModel, spec: ModelSpec, options: LoadOptions, numerical_class: NumericalClass, weights: str
    ) -> None:
        """`spec.bytes_per_token` is not looked at: the library says what it is. Raises OutOfMemory, and RuntimeFailed
        where the model's state is more than a KV cache."""
        self._kept: dict[int, Rows] = {}  # what remembered blocks hold that no slot has any more
        self._coming: Rows = []
        self._format = _find_format(model)
        position_bytes = self._format.position_bytes
        blocks = max(1, options.kv_cache_bytes // (BLOCK_TOKENS * position_bytes))
        if model.library.most_contexts:  # sequences are computed one after another: more would wait for contexts, too
            options = replace(options, slots=min(options.slots, model.library.most_contexts))
        pad_to, multiple = max(numerical_class.segment_rows, 1), numerical_class.fixed_width or 1
        rules = BlockRules(blocks, BLOCK_TOKENS, options.slots, pad_to=pad_to, multiple=multiple, copies=True)
        self._copied = CopiedBlocks(rules, self._forget)
        super().__init__(model, self._copied, numerical_class, spec.outputs)
        self.kv_layout = KvLayout(
            f"{model.library.version} {self._format.name}",
            BLOCK_TOKENS,
            tuple(BLOCK_TOKENS * size for size in self._format.row_bytes),
        )
        self.spec = replace(spec, bytes_per_token=position_bytes)
        self.capabilities = describe_capabilities(
            rules, self.spec, options, numerical_class, weights=weights, device=model.device
        )

    def _read(self, sequence: HeldSequence[Rows]) -> Rows:
        """Return what a sequence holds: views of what the library wrote, or what it begins with."""
        if sequence.kept is not None:
            return sequence.kept
        return self._format.split(self._library.read_state(sequence.context))

    def _take_first(self, kept: Rows, positions: int) -> Rows:
        return [rows[:positions] for rows in kept]

    def _write(self, context: int, kept: Rows) -> int:
        self._library.write_state(context, self._format.join(kept))
        return len(kept[0])

    def _forget(self, block: int) -> None:
        self._kept.pop(block, None)

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        positions = self._pool.attach(slot, tokens)
        if positions:
            self._begin(slot, positions)
        return positions

    def fork(self, slot: int, source: int, positions: int, shared: int) -> None:
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
        self._sequences[slot] = HeldSequence(kept=rows)

    def release(self, slot: int) -> None:
        remembered = self._copied.list_remembered(slot)
        if remembered and self._model:
            rows = self._read(self._sequences[slot])
            for place, block in remembered:
                at = place * BLOCK_TOKENS
                self._kept[block] = [row[at : at + BLOCK_TOKENS].copy() for row in rows]
        self._drop(slot)

    def discard(self, slot: int) -> None:
        self._copied.discard(slot)
        self._drop(slot)

    def export_kv(self, slot: int, positions: int, start_page: int = 0) -> Iterator[Bytes]:
        """The library writes all caches at once."""
        table = self._check_export(slot, positions, start_page)
        first = start_page * BLOCK_TOKENS
        for rows in self._read(self._sequences[slot]):
            pages = np.zeros((len(table) * BLOCK_TOKENS - first, rows.shape[1]), np.uint8)
            pages[: positions - first] = rows[first:positions]
            yield pages.reshape(-1)

    def import_kv(self, slot: int, positions: int, pages: Bytes, start_pages: Sequence[int] = (0,)) -> None:
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
        self._sequences[slot] = HeldSequence(kept=[coming[:positions] for coming in self._coming])
        self._coming = []

    def _write_pages(self, cache: int, slot: int, table: Sequence[int], span: tuple[int, int], pages: Bytes) -> None:
        begin, first = span
        rows = pages.reshape(-1, self._format.row_bytes[cache])
        self._coming[cache][first * BLOCK_TOKENS : begin * BLOCK_TOKENS + len(rows)] = rows[
            (first - begin) * BLOCK_TOKENS :
        ]

    def close(self) -> None:
        super().close()
        self._kept.clear()


def _find_format(model: OpenModel) -> CacheFormat:
    """Return how the library writes a sequence of a model, learnt from a short one."""
    library, batch = model.library, model.library.new_batch(2)
    first = model.open_context(STEP_CELLS)
    try:
        model.decode(first, batch, [0, 0], 0, range(0))
        return library.read_format(first)
    finally:
        library.free_batch(batch)
        library.close_context(first)
