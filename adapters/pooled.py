"""What every model over a pool of KV blocks does alike: the bookkeeping half of `adapters.contract.LoadedModel`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from adapters.contract import (
    BlockRules,
    Capabilities,
    ForwardResult,
    Hidden,
    KvLayout,
    LoadOptions,
    NumericalClass,
    Segment,
    ShardResult,
    Unsupported,
)
from adapters.kv_blocks import BlockPool
from device_profiles.profile import Exactness
from device_profiles.units import ceil_div
from device_profiles.workload import ModelSpec

Bytes = NDArray[np.uint8]


def choose_min_rows(exactness: Exactness) -> int:
    """Return the fewest rows that a segment is run with where single rows are a numerical class of their own."""
    return 2 if exactness is Exactness.BIT else 1


def cut_segment(segment: Segment, most: int, least: int = 1) -> Iterator[Segment]:
    """Yield a segment in pieces of at most `most` tokens, each with the rows that are wanted of it. Where there are
    several, the last one has at least `least`."""
    begin, count = 0, len(segment.tokens)
    while begin < count:
        left = count - begin
        size = most - max(0, least - (left - most)) if left > most else left
        yield take_piece(segment, begin, size)
        begin += size


def take_piece(segment: Segment, begin: int, size: int) -> Segment:
    """Return so many tokens of a segment from one of them on, with the rows that are wanted of them."""
    first, last = segment.rows
    rows = (min(max(first - begin, 0), size), min(max(last - begin, 0), size))
    return Segment(segment.slot, segment.start + begin, segment.tokens[begin : begin + size], rows)


def describe_capabilities(
    rules: BlockRules,
    spec: ModelSpec,
    options: LoadOptions,
    numerical_class: NumericalClass,
    *,
    weights: str,
    device: str,
    best_logits: int = 0,
) -> Capabilities:
    """Return what a model can do that pays for each segment the rows that its rules pad it to."""
    return Capabilities(
        slots=options.slots,
        max_context_tokens=spec.context_length,
        max_batch_rows=options.max_batch_rows,
        block_tokens=rules.block_tokens,
        total_blocks=rules.blocks,
        row_invariant=options.exactness is Exactness.BIT,
        min_rows=max(rules.pad_to, rules.multiple),
        weights=weights,
        numerical_class=numerical_class,
        exactness=options.exactness,
        device=device,
        best_logits=best_logits,
    )


class PooledSlots:
    """The slots of a model whose memory is counted by a `BlockPool`."""

    capabilities: Capabilities
    loras: tuple[str, ...] = ()

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def use_lora(self, slot: int, name: str) -> None:
        """See adapters.contract.LoraSlots. A slot's root is the negative of its adapter's number, from 1 on."""
        if name and name not in self.loras:
            raise Unsupported(f"there is no adapter {name!r}; there is {', '.join(self.loras) or 'none'}")
        self._pool.choose_root(slot, -1 - self.loras.index(name) if name else 0)

    @property
    def block_rules(self) -> BlockRules:
        return self._pool.rules

    def _check(self, batch: Sequence[Segment]) -> None:
        """Refuse what is beyond the capabilities. Raises Unsupported."""
        caps = self.capabilities
        self._pool.check(batch, max_rows=caps.max_batch_rows, max_context=caps.max_context_tokens)
        if (best := max(segment.best for segment in batch)) > caps.best_logits:
            raise Unsupported(f"the {best} best logits of a row are asked for, and {caps.best_logits} can be at most")

    def count_cached_positions(self, slot: int) -> int:
        return self._pool.count_cached_positions(slot)

    def free_blocks(self) -> int:
        return self._pool.free

    def count_touched_blocks(self) -> int:
        """See adapters.loaded_model.CountsTouchedBlocks."""
        return self._pool.touched

    def count_needed_blocks(self, batch: Sequence[Segment]) -> int:
        return self._pool.count_needed_blocks(batch)

    def attach(self, slot: int, tokens: Sequence[int]) -> int:
        return self._pool.attach(slot, tokens)

    def share(self, slot: int, tokens: Sequence[int]) -> None:
        self._pool.share(slot, tokens)


class PooledModel(PooledSlots):
    """The same, of a KV cache that can be copied block by block; the runtime's model derives from it."""

    kv_layout: KvLayout

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        result = self.forward_layers(batch, None)
        return ForwardResult(result.output, result.device_ms, best=result.best)

    def forward_layers(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        raise NotImplementedError

    def release(self, slot: int) -> None:
        if suspects := self._pool.release(slot):
            self._erase(suspects)

    def discard(self, slot: int) -> None:
        suspects = self._pool.discard(slot)
        self.release(slot)  # what the runtime's model frees beside the pool's blocks
        if suspects:
            self._erase(suspects)

    def fork(self, slot: int, source: int, positions: int, shared: int) -> None:
        if copies := self._pool.fork(slot, source, positions, shared):
            self._copy_blocks([block for block, _ in copies], [block for _, block in copies])

    def export_kv(self, slot: int, positions: int, start_page: int = 0) -> Iterator[Bytes]:
        table = self._check_export(slot, positions, start_page)
        for cache in range(len(self.kv_layout.page_bytes)):
            yield self._read_pages(cache, slot, table, start_page)

    def _check_export(self, slot: int, positions: int, start_page: int) -> list[int]:
        """Return the blocks of a slot's first positions. Raises Unsupported as `export_kv`."""
        held = self.count_cached_positions(slot)
        if not 0 < positions <= held:
            raise Unsupported(f"slot {slot} holds {held} positions, and {positions} are asked for")
        table = self._pool.table(slot, positions)
        if not 0 <= start_page < len(table):
            raise Unsupported(f"page {start_page} is not among the {len(table)} of {positions} positions")
        return table

    def import_kv(self, slot: int, positions: int, pages: Bytes, start_pages: Sequence[int] = (0,)) -> None:
        layout, limit = self.kv_layout, self.capabilities.max_context_tokens
        if not 0 < positions <= limit:
            raise Unsupported(f"slot {slot}: {positions} positions are not within the context of {limit}")
        if len(pages) != layout.count_bytes(positions):
            raise Unsupported(f"{len(pages)} bytes are not the pages of {positions} positions")
        borders = [*start_pages, ceil_div(positions, layout.page_tokens)]
        if borders[0] != 0 or any(end <= begin for begin, end in pairwise(borders)):
            raise Unsupported(f"pages {borders} do not follow one another from 0 on")
        first = self._pool.extend(slot, positions)
        table = self._pool.table(slot, positions)
        offset = 0
        for begin, end in pairwise(borders):
            for cache, page_bytes in enumerate(layout.page_bytes):
                length = (end - begin) * page_bytes
                if first < end:
                    own = pages[offset : offset + length]
                    self._write_pages(cache, slot, table[:end], (begin, max(begin, first)), own)
                offset += length

    def _read_pages(self, cache: int, slot: int, table: Sequence[int], start: int) -> Bytes:
        """Return a copy of what one cache has in the blocks of a slot's `table` from block `start` of it on, in one row
        of bytes."""
        raise NotImplementedError

    def _write_pages(self, cache: int, slot: int, table: Sequence[int], span: tuple[int, int], pages: Bytes) -> None:
        """Write pages of one cache to the blocks of a slot's `table`. `span`: the block of the table that they begin
        with, and the one from which on they are to be written."""
        raise NotImplementedError

    def _copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks, in all caches."""
        raise NotImplementedError

    def _erase(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros. Runtimes multiply what a mask hides by zero, and NaN stays NaN then."""
        raise NotImplementedError
