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
from device_profiles.profile import Exactness
from device_profiles.units import ceil_div

Indices = NDArray[np.int64]

TILE_ROWS = 16
"""Rows of an attention tile on CUDA: the fewest that its kernels multiply at once. So a sequence takes one tile, and
drafts cost no more."""
# Rows that graphs are made for. Below 64 rows weights are waited for, and further steps waste a third at most. Not
# tuned.
LADDER = (8, 16, 32, *range(64, 513, 64))
# Rows of logits of a graph, which take memory all the time. Not tuned: 50 sequences with 4 drafts fit.
MOST_WANTED = 256
# Tiles of graphs: never one, for which compilers make a kernel of its own. Not tuned: a tile that is nobody's copies 16
# rows of each layer's queries.
TILE_STEPS = (2, 8, 32, 128)
# Prefixes are shared by whole blocks (ADR 0013). It divides the 512 below.
BLOCK_TOKENS = 32
# ADR 0015: one cuBLAS kernel, as fast for few rows as their weights are read.
_CUDA_TILE_ROWS = 64
# ADR 0015: the flash kernel works through keys by 512. By 32 to 128 one row in a few hundred differs.
_KEY_BLOCKS = 512 // BLOCK_TOKENS
_MOST_QUERIES = 63
"""With AMX, torch's attention in bf16 takes another kernel from 64 query rows on, where threads have enough of it. ADR
0015."""
_FREE = 1 << 20  # no bound


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


def shapes_for(device_type: str, exactness: Exactness, fixed_width: int = 0, heads_per_key: int = 1) -> Shapes:
    """Return the shapes of forwards. On the CPU, products of two rows or more are one numerical class. So is attention
    of four query rows or more over whole blocks of 512 keys. On CUDA a kernel is chosen by its shape.

    With `fixed_width` every product has that many rows, and every attention tile equally many. `heads_per_key`: how
    many query heads share a key head, and so are rows of one product.
    """
    bit = exactness is Exactness.BIT
    if device_type == "cuda":
        tile = fixed_width or (_CUDA_TILE_ROWS if bit else 0)
        return Shapes(tile or 8, tile or 8, TILE_ROWS, TILE_ROWS, key_blocks=1, product_tile=tile)
    if fixed_width:
        tile = _attention_tile(fixed_width, heads_per_key)
        return Shapes(fixed_width, fixed_width, tile, tile, _KEY_BLOCKS, product_tile=fixed_width)
    if bit:
        return Shapes(rows=1, least_rows=2, tile=4, most_tile=_FREE, key_blocks=_KEY_BLOCKS)
    return Shapes(rows=1, least_rows=1, tile=1, most_tile=_FREE, key_blocks=1)


def _attention_tile(width: int, heads_per_key: int) -> int:
    """Return the largest power of two of rows that attention takes one kernel for: at most `width`, at least one."""
    most = max(1, min(width, _MOST_QUERIES // heads_per_key))
    return 1 << (most.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Group:
    """Tiles `first` to `stop` (half open) of one sequence, which read the blocks of `table`, (1, blocks). A tile has
    `tile` rows."""

    first: int
    stop: int
    tile: int
    table: Indices


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """`ids`, `positions`, `writes` (each row's place in the KV pool), all (rows,). `tiles`: the rows of all tiles
    one after the other; `sources`, (rows,): where among them a row's attention stands. `wanted`: rows whose
    logits come back, of which the first `wanted_count` were asked for: the first `whole_count` whole, and of the rest
    the `best` logits. `scales`: of the latter one over the temperature of each, float32; None where nobody asks for
    masses. The first `token_count` rows are tokens'."""

    ids: Indices
    positions: Indices
    writes: Indices
    tiles: Indices
    sources: Indices
    wanted: Indices
    wanted_count: int
    whole_count: int
    best: int
    scales: NDArray[np.float32] | None
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
    whole: list[Indices] = []
    few: list[Indices] = []
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
        (few if segment.best else whole).append(at + np.arange(*segment.rows))
        at += size
        tiled += parts * tile
    wanted_rows = np.concatenate([*whole, *few])
    heads = shapes.pad_rows(len(wanted_rows))
    return ForwardPlan(
        ids=ids,
        positions=positions,
        writes=writes,
        tiles=np.concatenate(tiles),
        sources=sources,
        wanted=np.concatenate([wanted_rows, np.zeros(heads - len(wanted_rows), np.int64)]),
        wanted_count=len(wanted_rows),
        whole_count=sum(map(len, whole)),
        best=max((segment.best for segment in batch if segment.rows[0] < segment.rows[1]), default=0),
        scales=_list_scales(batch) if any(segment.temperature for segment in batch) else None,
        token_count=count,
        groups=tuple(groups),
    )


def _list_scales(batch: Sequence[Segment]) -> NDArray[np.float32]:
    """Return one over the temperature of each row of which the best logits are enough, 0 where it has none."""
    known = [segment for segment in batch if segment.best]
    scales = [1.0 / segment.temperature if segment.temperature else 0.0 for segment in known]
    return np.repeat(np.array(scales, np.float32), [segment.rows[1] - segment.rows[0] for segment in known])


def _pad_table(table: Indices, multiple: int, blank: int) -> Indices:
    """Fill a table up with the blank block: what is there is finite, and nobody sees it."""
    missing = -len(table) % multiple
    return np.concatenate([table, np.full(missing, blank, np.int64)]) if missing else table


@dataclass(frozen=True, slots=True)
class Size:
    """What a forward in one call is filled up to: rows, rows with logits, and tiles of TILE_ROWS rows."""

    rows: int
    wanted: int
    tiles: int

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """The inputs by name and length, in the order in which they lie in a buffer."""
        rows, tiled = self.rows, self.tiles * TILE_ROWS
        lengths = {"ids": rows, "positions": rows, "writes": rows, "sources": rows, "wanted": self.wanted}
        return (*lengths.items(), ("tiles", tiled), ("tile_positions", tiled))


def size_of(plan: ForwardPlan) -> Size:
    """Return the plan's own size."""
    return Size(len(plan.ids), len(plan.wanted), plan.groups[-1].stop)


def size_of_graph(plan: ForwardPlan) -> Size | None:
    """Return the size of the graph for a plan, None where there is none so large."""
    own = size_of(plan)
    if own.rows > LADDER[-1] or own.wanted > MOST_WANTED or own.tiles > TILE_STEPS[-1]:
        return None
    return Size(_step_up(LADDER, own.rows), _step_up(LADDER, own.wanted), _step_up(TILE_STEPS, own.tiles))


def list_decode_sizes(shapes: Shapes, *, most_rows: int, slots: int) -> list[Size]:
    """Return the sizes of the graphs for sequences that decode: each takes a tile, and all of its rows are wanted."""
    sizes, before = [], 0
    for step in LADDER:
        if step != shapes.pad_rows(step) or step > min(shapes.pad_rows(most_rows), MOST_WANTED):
            continue
        for fewer, tiles in zip((0, *TILE_STEPS), TILE_STEPS, strict=False):
            if fewer < min(slots, step) and tiles * TILE_ROWS > before:
                sizes.append(Size(step, step, tiles))
        before = step
    return sizes


def _step_up(steps: tuple[int, ...], count: int) -> int:
    return next(step for step in steps if step >= count)


def make_blank_inputs(size: Size, *, block: int, pool_blocks: int, width: int = 1) -> tuple[Indices, Indices]:
    """Return inputs of a size that are nobody's, one after the other, and the tables of its tiles: (tiles, 1 + width),
    how many blocks a tile reads and which, filled up with the scratch block. They write to that alone. Each tile reads
    the blank block's first position, which is finite."""
    scratch, blank = pool_blocks - 2, pool_blocks - 1
    fills = [np.full(length, scratch * block if name == "writes" else 0, np.int64) for name, length in size.inputs]
    tables = np.full((size.tiles, 1 + width), scratch, np.int64)
    tables[:, :2] = 1, blank
    return np.concatenate(fills), tables


def pad_inputs(plan: ForwardPlan, size: Size, *, block: int, pool_blocks: int) -> tuple[Indices, Indices]:
    """Return the inputs of a plan in a size, and its tables: see `make_blank_inputs`."""
    width = max(group.table.shape[1] for group in plan.groups)
    inputs, tables = make_blank_inputs(size, block=block, pool_blocks=pool_blocks, width=width)
    positions = plan.positions[plan.tiles]
    parts = (plan.ids, plan.positions, plan.writes, plan.sources, plan.wanted, plan.tiles, positions)
    at = 0
    for part, (_, length) in zip(parts, size.inputs, strict=True):
        inputs[at : at + len(part)] = part
        at += length
    for group in plan.groups:
        tables[group.first : group.stop, 1 : 1 + group.table.shape[1]] = group.table
    tables[: plan.groups[-1].stop, 0] = positions.reshape(-1, TILE_ROWS).max(axis=1) // block + 1
    return inputs, tables
