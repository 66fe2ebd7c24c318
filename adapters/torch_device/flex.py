"""Attention of all sequences of a forward in one call, over the pages where they lie: torch's FlexAttention (arXiv
2412.05496), whose kernel is told which blocks of the KV pool a tile of rows reads. Nothing of a cache is copied.

Shapes in comments: N rows of the forward, H heads, K key-value heads, D head size; n tiles of R rows, and P blocks of
the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from adapters.torch_device.attention import KvPool, Rule
from adapters.torch_device.plan import TILE_ROWS, Indices, Size, make_blank_inputs

_log = logging.getLogger(__name__)

# A position that no row has: behind each of them as a key's, and as a window longer than all contexts.
FAR = 1 << 30
# How many kernels a process makes: of shapes of layers, and of rules of classes. Not tuned; a model has one or two.
_MOST_KERNELS = 64

Kernel = Callable[..., Any]
"""`attend_pages`, or what torch compiled of it."""


def attend_pages(
    query: Any,
    key: Any,
    value: Any,
    pages: tuple[Any, Any, Any],
    positions: Any,
    window: Any,
    block: int,
    rule: Rule | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> Any:
    """Attend (1, H, n * R, D) over the pool's (1, K, P * block, D), to (1, H, n * R, D).

    `pages`: the blocks that each tile reads (n, P), of which it reads the first (n,), and the position at which each
    block begins for it (n, P). `positions`, (n * R,): of the rows. `window`, (): how many of the last positions a row
    sees, where there is no rule. `softcap` bounds scores (Gemma 2, arXiv 2408.00118). `sinks`, (H,): a score beside
    the keys', which brings no value (arXiv 2309.17453).
    """
    blocks, counts, places = pages

    def sees(batch: Any, head: Any, row: Any, place: Any) -> Any:
        own = positions[row]
        other = places[row // TILE_ROWS, place // block] + place % block
        seen = other <= own
        return seen & (other > own - window if rule is None else rule(batch, head, own, other))

    def bound(score: Any, *_: Any) -> Any:
        return score if softcap is None else torch.tanh(score / softcap) * softcap

    mask = BlockMask.from_kv_blocks(
        counts[None, None],
        blocks[None, None],
        BLOCK_SIZE=(TILE_ROWS, block),
        mask_mod=sees,
        seq_lengths=(query.shape[2], key.shape[2]),
        compute_q_blocks=False,
    )
    made = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else bound,
        block_mask=mask,
        scale=scaling,
        enable_gqa=True,
        # One kernel for any number of rows, which reads a row's keys in one order: none that splits them.
        kernel_options={"BACKEND": "TRITON", "BLOCK_M": TILE_ROWS, "BLOCK_N": block},
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        return made
    mixed, sums = made
    return (mixed * torch.sigmoid(sums.lse - sinks[None, :, None].float())[..., None]).to(query.dtype)


def compile_attention() -> Kernel:
    """Return `attend_pages` as torch compiles it, when it is first called: one kernel for any number of tiles, blocks
    and positions."""
    compiled = torch.compile(attend_pages, fullgraph=True, recompile_limit=_MOST_KERNELS)

    def attend(
        query: Any, key: Any, value: Any, pages: tuple[Any, Any, Any], positions: Any, *rest: Any, **options: Any
    ) -> Any:
        growing = [(query, 2), (key, 2), (value, 2), (positions, 0), *((part, 0) for part in pages)]
        for tensor, axis in (*growing, (pages[0], 1), (pages[2], 1)):
            torch._dynamo.maybe_mark_dynamic(tensor, axis)
        return compiled(query, key, value, pages, positions, *rest, **options)

    return attend


def choose_kernel(pool: KvPool, heads_per_key: int) -> Kernel | None:
    """Return what attends all sequences of a forward in one call. None on a processor, where one after the other has
    bits that are known (docs/adr/0015-torch.md), and where torch compiles no kernel: a line says why. Raises torch's
    error when memory runs out."""
    if pool.get_views(0)[0].device.type == "cpu":
        return None
    kernel = compile_attention()
    try:
        with torch.inference_mode():
            _try(kernel, pool, heads_per_key)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler raises
        why = (str(error).strip().splitlines() or ["it says no more"])[0]
        what = f"{type(error).__name__}: {why}"
        _log.warning("torch compiles no FlexAttention here, so sequences are attended one after another: %s", what)
        return None
    return kernel


def _try(kernel: Kernel, pool: KvPool, heads_per_key: int) -> None:
    """Attend two tiles of rows that are nobody's, over the pool's blank block."""
    key, value = pool.get_views(0)
    size = Size(rows=8, wanted=8, tiles=2)
    inputs, tables = make_blank_inputs(size, block=pool.block, pool_blocks=pool.blocks)
    kept = PageTables(pool, key.device, size.tiles)
    pages = kept.get_pages(size.tiles)
    kept.send(tables, pages)
    query = key.new_zeros((1, size.tiles * TILE_ROWS, key.shape[1] * heads_per_key, key.shape[3])).transpose(1, 2)
    positions, window = (send_array(array, key.device) for array in (inputs[-query.shape[2] :], np.array([FAR])))
    kernel(query, key, value, pages, positions, window[0], pool.block)


class PageTables:
    """Which blocks of a pool each tile of a forward reads, on the device. Those of `most` tiles and fewer lie at one
    place in every forward."""

    def __init__(self, pool: KvPool, device: Any, most: int) -> None:
        self._pool, self._device, self._most = pool, device, most
        self._kept = self._allocate(most)

    def _allocate(self, tiles: int) -> tuple[Any, Any, Any]:
        def fill(*shape: int) -> Any:
            return torch.zeros(shape, dtype=torch.int32, device=self._device)

        return fill(tiles, self._pool.blocks), fill(tiles), fill(tiles, self._pool.blocks)

    def get_pages(self, tiles: int) -> tuple[Any, Any, Any]:
        """Return the pages of so many tiles (see `attend_pages`). Where these are more than are kept, nobody else has
        them."""
        blocks, counts, places = self._kept if tiles <= self._most else self._allocate(tiles)
        return blocks[:tiles], counts[:tiles], places[:tiles]

    def send(self, tables: Indices, pages: tuple[Any, Any, Any]) -> None:
        """Queue what writes the tables of `pages`, (n, 1 + blocks): how many blocks a tile reads, these, and the
        pool's scratch block behind them."""
        blocks, counts, places = pages
        length = tables.shape[1] - 1
        sent = send_array(tables.astype(np.int32), self._device)
        counts.copy_(sent[:, 0])
        blocks[:, :length] = sent[:, 1:]
        order = torch.arange(length, device=self._device, dtype=torch.int32)
        begins = torch.where(order < counts[:, None], order * self._pool.block, FAR)
        places.fill_(FAR).scatter_(1, sent[:, 1:].long(), begins)


def send_array(values: Any, device: Any) -> Any:
    """Return an array on the device, from pinned memory where that has a memory of its own: nobody waits for it."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else pin(host).to(device, non_blocking=True)


def pin(host: Any) -> Any:
    """Return a tensor in memory that the device reads and writes by itself."""
    return host.pin_memory()


@dataclass(slots=True)
class FlexBatch:
    """What the attention of every layer needs to know of a forward. `writes`, (N,): where rows lie in the pool. `rows`
    and `positions`, (n * R,): of the tiles, one after the other; `sources`, (N,): where among them a row stands.
    `windows`, (layers,): where layers have no rules of their own."""

    pool: KvPool
    writes: Any
    sources: Any
    rows: Any
    positions: Any
    pages: tuple[Any, Any, Any]
    windows: Any
    kernel: Kernel

    def attend(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        rule: Rule | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        **_: Any,
    ) -> Any:
        """Write keys and values (1, K, N, D), and attend (1, H, N, D), to (1, N, H, D)."""
        layer = module.layer_idx
        self.pool.write(layer, self.writes, key[0].transpose(0, 1), value[0].transpose(0, 1))
        tiles = query[0].transpose(0, 1)[self.rows].transpose(0, 1)[None]
        keys, values = self.pool.get_views(layer)
        window = None if rule is not None else self.windows[layer]
        made = self.kernel(
            tiles,
            keys,
            values,
            self.pages,
            self.positions,
            window,
            self.pool.block,
            rule=rule,
            scaling=scaling,
            softcap=softcap,
            sinks=s_aux,
        )
        return made[0].transpose(0, 1)[self.sources][None]
