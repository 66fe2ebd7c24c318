"""Attention over our paged KV cache, registered with transformers as an attention implementation of its own.

A model's class calls it in every layer with the rows of the whole ragged batch. It writes their keys and values into
the pool and attends each sequence's rows over that sequence's blocks.

Shapes in comments: N rows of the forward, H heads, K key-value heads, G = H / K, D head size. There are g tables, n
tiles of T rows and L positions of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "outrider_paged"


class KvPool:
    """Keys and values of all layers: blocks of `block` positions, and two more. Padding is written to the scratch
    block. The blank one behind it is read where a table is filled up: nothing is ever written there, as padding may be
    garbage that a mask does not hide (0 times NaN is NaN)."""

    def __init__(
        self, *, layers: int, blocks: int, block: int, kv_heads: int, head_dim: int, dtype: Any, device: Any
    ) -> None:
        """Allocate. Raises torch's errors when memory runs out."""
        shape = (blocks + 2, block, kv_heads, head_dim)
        self._caches = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(layers)
        ]

    def write(self, layer: int, places: Any, key: Any, value: Any) -> None:
        """Write (N, K, D) at `places`, (N,)."""
        for cache, rows in zip(self._caches[layer], (key, value), strict=True):
            cache.flatten(0, 1).index_copy_(0, places, rows)

    @property
    def page_bytes(self) -> int:
        """How long a block is, of the keys or the values of one layer."""
        first = self._caches[0][0]
        return int(first[0].numel() * first.element_size())

    @property
    def layout(self) -> str:
        """Name the caches' shape."""
        return f"{2 * len(self._caches)}x{'x'.join(map(str, self._caches[0][0].shape[1:]))}"

    def list_page_bytes(self) -> tuple[int, ...]:
        """Return how long a page of each cache is: keys and values, layer by layer."""
        return (self.page_bytes,) * (2 * len(self._caches))

    def read_blocks(self, cache: int, blocks: Sequence[int]) -> Any:
        """Return the bytes of blocks, on the host: of keys and values, one layer after the other."""
        with torch.inference_mode():
            return self._caches[cache // 2][cache % 2][list(blocks)].view(torch.uint8).flatten().cpu()

    def write_blocks(self, cache: int, blocks: Sequence[int], pages: Any) -> None:
        """Write what `read_blocks` returned."""
        own = self._caches[cache // 2][cache % 2]
        with torch.inference_mode():
            own[list(blocks)] = pages.view(own.dtype).view(len(blocks), *own.shape[1:]).to(own.device)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks, of all layers."""
        with torch.inference_mode():
            for caches in self._caches:
                for cache in caches:
                    cache[list(targets)] = cache[list(sources)]

    def erase(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros."""
        with torch.inference_mode():
            for caches in self._caches:
                for cache in caches:
                    cache[list(blocks)] = 0

    def read(self, layer: int, table: Any) -> tuple[Any, Any]:
        """Return keys and values of the blocks of `table`, (g, blocks): both (g, K, L, D), positions before heads in
        memory."""
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in self._caches[layer])
        return key, value


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """`adapters.torch_device.plan.Group` on the device: rows (n * T,), their positions (n, T), and the table."""

    rows: Any
    positions: Any
    table: Any


@dataclass(slots=True)
class PagedBatch:
    """What the attention of every layer needs to know of a forward. `windows` are the layers' sliding windows.
    `sources`, (N,): where in the groups' rows, one after the other, a row stands."""

    pool: KvPool
    writes: Any
    sources: Any
    groups: list[DeviceGroup]
    block: int
    windows: tuple[int, ...]
    masks: dict[tuple[int, int], Any] = field(default_factory=dict)

    def mask(self, index: int, window: int, heads_per_key: int) -> Any:
        """Return which positions the rows of a group see: (n, 1, G * T, L), True where they do."""
        known = self.masks.get((index, window))
        if known is None:
            group = self.groups[index]
            length = group.table.shape[1] * self.block
            keys = torch.arange(length, device=group.positions.device)
            rows = group.positions[:, :, None]
            known = keys <= rows
            if window:
                known &= keys > rows - window
            known = known.repeat(1, heads_per_key, 1)[:, None]
            self.masks[index, window] = known
        return known


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    scaling: float,
    paged: PagedBatch,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """transformers' attention interface: query (1, H, N, D), key and value (1, K, N, D) to (1, N, H, D)."""
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[3]
    per_key = heads // kv_heads
    layer = module.layer_idx
    paged.pool.write(layer, paged.writes, key[0].transpose(0, 1), value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)
    made = []
    for index, group in enumerate(paged.groups):
        tiles, tile = group.positions.shape
        queries = rows[group.rows].view(tiles, tile, kv_heads, per_key, size)
        queries = queries.permute(0, 2, 3, 1, 4).reshape(tiles, kv_heads, per_key * tile, size)
        keys, values = paged.pool.read(layer, group.table)
        if keys.shape[0] != tiles:
            keys, values = keys.expand(tiles, -1, -1, -1), values.expand(tiles, -1, -1, -1)
        mask = paged.mask(index, paged.windows[layer], per_key)
        if softcap is None:
            mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
        else:
            mixed = _attend_softcapped(queries, keys, values, mask, scaling, softcap)
        mixed = mixed.view(tiles, kv_heads, per_key, tile, size).permute(0, 3, 1, 2, 4)
        made.append(mixed.reshape(tiles * tile, heads, size))
    joined = made[0] if len(made) == 1 else torch.cat(made)
    return joined[paged.sources][None], None


def _attend_softcapped(query: Any, key: Any, value: Any, mask: Any, scaling: float, softcap: float) -> Any:
    """Attention whose scores are bounded by softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118)."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float().masked_fill(~mask, -torch.inf)
    return torch.matmul(torch.softmax(scores, dim=-1).to(query.dtype), value)


def register() -> None:
    """Let transformers' classes call `attend` where their configuration says NAME. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
