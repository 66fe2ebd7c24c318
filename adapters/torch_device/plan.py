"""A ragged batch as arrays of fixed kinds: what each row writes, and which tiles of rows read which blocks. No torch.

Rows of one sequence are attended in tiles of query rows over the sequence's blocks. Both are padded to shapes in which
the kernel gives a row the same bits whatever else is in the batch (docs/adr/0015-torch.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adapters.contract import Segment
from adapters.kv_blocks import BlockPool
from device_profiles.units import ceil_div

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that a batch is brought to.

    A forward has a multiple of `rows`, at least `least_rows`. An attention tile has a multiple of `tile` rows, at most
    `most_tile`, over a multiple of `key_blocks` blocks. A product takes `product_tile` rows at a time, 0: all of them.
    """

    rows: int
    least_rows: int
    tile: int
    most_tile: int
    key_blocks: int
    product_tile: int = 0

    def pad_rows(self, count: int) -> int:
        """Return how many rows a product over `count` rows has."""
        return max(ceil_div(count, self.rows) * self.rows, self.least_rows)

    def tiles(self, count: int) -> tuple[int, int]:
        """Return (number of tiles, rows of each) for `count` rows of one sequence."""
        tile = min(ceil_div(count, self.tile) * self.tile, self.most_tile)
        return ceil_div(count, tile), tile


@dataclass(frozen=True, slots=True)
class Group:
    """Tiles `first` to `stop` (half open) that read the blocks of `table`, shape (tables, blocks): one table for
    all of them, or one for each. A tile has `tile` rows."""

    first: int
    stop: int
    tile: int
    table: Indices


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """`ids`, `positions`, `writes` (each row's place in the KV pool), all (rows,). `tiles`: the rows of all tiles
    one after the other; `sources`, (rows,): where among them a row's attention stands. `wanted`: rows whose
    logits come back, of which the first `wanted_count` were asked for. The first `token_count` rows are tokens'."""

    ids: Indices
    positions: Indices
    writes: Indices
    tiles: Indices
    sources: Indices
    wanted: Indices
    wanted_count: int
    token_count: int
    groups: tuple[Group, ...]


def plan_forward(batch: Sequence[Segment], pool: BlockPool, shapes: Shapes) -> ForwardPlan:
    """Return what a forward of `batch` computes; the pool has reserved its blocks. The scratch block, where padding
    is written, is number `pool.total`, and the blank one, which fills tables up, comes behind it."""
    count = sum(len(segment.tokens) for segment in batch)
    rows = shapes.pad_rows(count)
    ids, positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    writes = np.full(rows, pool.total * pool.block_tokens, np.int64)
    sources = np.zeros(rows, np.int64)
    tiles: list[Indices] = []
    wanted: list[Indices] = []
    groups: list[Group] = []
    at = tiled = 0
    for segment in batch:
        size = len(segment.tokens)
        own = slice(at, at + size)
        ids[own] = segment.tokens
        positions[own] = np.arange(segment.start, segment.start + size)
        table = np.array(pool.table(segment.slot, segment.start + size), np.int64)
        writes[own] = table[positions[own] // pool.block_tokens] * pool.block_tokens
        writes[own] += positions[own] % pool.block_tokens
        parts, tile = shapes.tiles(size)
        tiles.append(at + np.minimum(np.arange(parts * tile), size - 1))
        sources[own] = tiled + np.arange(size)
        first = groups[-1].stop if groups else 0
        groups.append(Group(first, first + parts, tile, _pad_table(table, shapes.key_blocks, pool.total + 1)[None]))
        wanted.append(at + np.arange(*segment.rows))
        at += size
        tiled += parts * tile
    wanted_rows = np.concatenate(wanted)
    heads = shapes.pad_rows(len(wanted_rows))
    return ForwardPlan(
        ids=ids,
        positions=positions,
        writes=writes,
        tiles=np.concatenate(tiles),
        sources=sources,
        wanted=np.concatenate([wanted_rows, np.zeros(heads - len(wanted_rows), np.int64)]),
        wanted_count=len(wanted_rows),
        token_count=count,
        groups=tuple(groups),
    )


def _pad_table(table: Indices, multiple: int, blank: int) -> Indices:
    """Fill a table up with the blank block: what is there is finite, and nobody sees it."""
    missing = -len(table) % multiple
    return np.concatenate([table, np.full(missing, blank, np.int64)]) if missing else table
