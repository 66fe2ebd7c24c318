"""Attention over our paged KV cache, registered with transformers as an attention implementation of its own.

A model's class calls it in every layer with the rows of the whole ragged batch. It writes their keys and values into
the pool and attends each sequence's rows over that sequence's blocks. Which of them a row sees is said by the spec's
windows where we read the model's config, and else by the rule that the class itself makes masks by (MASKED).

Shapes in comments: N rows of the forward, H heads, K key-value heads, G = H / K, D head size. There are n tiles of T
rows and L positions of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from adapters.contract import ModelRefused

NAME = "outrider_paged"
MASKED = "outrider_paged_masked"
"""The same, told by transformers which positions a row sees."""

Rule = Callable[[int, int, Any, Any], Any]
"""A mask function of transformers (masking_utils): of sequence, head, a row's position and a key's, True where the row
sees the key. Positions come as tensors that are broadcast."""


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What a layer keeps of a position: so many keys and values, and the elements of each."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


class KvPool:
    """Keys and values of all layers: blocks of `block` positions, and two more. Padding is written to the scratch
    block. The blank one behind it is read where a table is filled up: nothing is ever written there, as padding may be
    garbage that a mask does not hide (0 times NaN is NaN)."""

    def __init__(self, layers: Sequence[LayerKv], *, blocks: int, block: int, dtype: Any, device: Any) -> None:
        """Allocate. Raises torch's errors when memory runs out."""
        self.blocks, self.block = blocks + 2, block

        def allocate(heads: int, size: int) -> Any:
            return torch.zeros((blocks + 2, block, heads, size), dtype=dtype, device=device)

        self._caches = [
            (allocate(layer.heads, layer.key_dim), allocate(layer.heads, layer.value_dim)) for layer in layers
        ]

    def write(self, layer: int, places: Any, key: Any, value: Any) -> None:
        """Write (N, K, D) at `places`, (N,)."""
        for cache, rows in zip(self._caches[layer], (key, value), strict=True):
            cache.flatten(0, 1).index_copy_(0, places, rows.to(cache.dtype))

    @property
    def layout(self) -> str:
        """Name the caches' shapes, once where all are of one."""
        shapes = ["x".join(map(str, cache.shape[1:])) for caches in self._caches for cache in caches]
        return f"{len(shapes)}x{shapes[0]}" if len(set(shapes)) == 1 else "+".join(shapes)

    def list_page_bytes(self) -> tuple[int, ...]:
        """Return how long a page of each cache is: keys and values, layer by layer."""
        return tuple(int(cache[0].numel() * cache.element_size()) for caches in self._caches for cache in caches)

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
        """Return a copy of keys and values of the blocks of `table`, (1, blocks): both (1, K, L, D), positions before
        heads in memory."""
        key, value = (cache[table].flatten(1, 2).transpose(1, 2) for cache in self._caches[layer])
        return key, value

    def get_views(self, layer: int) -> tuple[Any, Any]:
        """Return all keys and values as they lie: both (1, K, positions, D)."""
        key, value = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in self._caches[layer])
        return key, value


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """`adapters.torch_device.plan.Group` on the device: rows (n * T,), their positions (n, T), and the table."""

    rows: Any
    positions: Any
    table: Any


@dataclass(slots=True)
class PagedBatch:
    """What the attention of every layer needs to know of a forward on a processor, one sequence after the other (on
    CUDA: adapters.torch_device.flex). `windows` are the layers' sliding windows, () where the model's class has a rule
    for each layer. `sources`, (N,): where in the groups' rows, one after the other, a row stands."""

    pool: KvPool
    writes: Any
    sources: Any
    groups: list[DeviceGroup]
    windows: tuple[int, ...]
    masks: dict[tuple[int, int | Rule, int], Any] = field(default_factory=dict)

    def mask(self, index: int, window: int | Rule, heads_per_key: int) -> Any:
        """Return which positions the rows of a group see: (n, 1, G * T, L), True where they do."""
        known = self.masks.get((index, window, heads_per_key))
        if known is None:
            group = self.groups[index]
            length = group.table.shape[1] * self.pool.block
            keys = torch.arange(length, device=group.positions.device)
            rows = group.positions[:, :, None]
            if callable(window):
                known = window(0, 0, rows, keys) & (keys <= rows)
            else:
                known = keys <= rows
                if window:
                    known &= keys > rows - window
            known = known.repeat(1, heads_per_key, 1)[:, None]
            self.masks[index, window, heads_per_key] = known
        return known

    def attend(self, module: Any, query: Any, key: Any, value: Any, rule: Rule | None, **options: Any) -> Any:
        """Write keys and values, and attend: see the function."""
        return _attend_paged(self, module.layer_idx, query, key, value, rule, **options)


class AttendingBatch(Protocol):
    """What stands behind the attention of every layer during a forward."""

    def attend(self, module: Any, query: Any, key: Any, value: Any, rule: Rule | None, **options: Any) -> Any: ...


_current: ContextVar[AttendingBatch] = ContextVar("_current")


@contextmanager
def attending(batch: AttendingBatch) -> Iterator[None]:
    """Let forwards of this thread be about a batch."""
    token = _current.set(batch)
    try:
        yield
    finally:
        _current.reset(token)


def attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Rule | None, **options: Any
) -> tuple[Any, None]:
    """transformers' attention interface: query (1, H, N, D), key and value (1, K, N, D) to (1, N, H, D)."""
    return _current.get().attend(module, query, key, value, attention_mask, **options), None


def _attend_paged(
    paged: PagedBatch,
    layer: int,
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
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[3]
    per_key = heads // kv_heads
    scaling = size**-0.5 if scaling is None else scaling
    window = rule if rule is not None else paged.windows[layer]
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
        mask = paged.mask(index, window, per_key)
        if softcap is None and s_aux is None:
            queries, keys, values, wide = _widen(queries, keys, values)
            mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)[..., :wide]
        else:
            sinks = None if s_aux is None else s_aux.view(1, kv_heads, per_key, 1).repeat_interleave(tile, dim=2)
            mixed = _attend_by_products(queries, keys, values, mask, scaling, softcap, sinks)
        mixed = mixed.reshape(tiles, kv_heads, per_key, tile, -1).permute(0, 3, 1, 2, 4)
        made.append(mixed.reshape(tiles * tile, heads, -1))
    joined = made[0] if len(made) == 1 else torch.cat(made)
    return joined[paged.sources][None]


def _widen(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any, int]:
    """Return them with heads of one length, filled up with zeros, which add exactly zero, and the values' own length:
    kernels that keep a row's bits take no others (latent attention has short values)."""
    size, own = query.shape[3], value.shape[3]
    if own < size:
        value = pad(value, (0, size - own))
    elif own > size:
        query, key = pad(query, (0, own - size)), pad(key, (0, own - size))
    return query, key, value, own


def _attend_by_products(
    query: Any, key: Any, value: Any, mask: Any, scaling: float, softcap: float | None, sinks: Any
) -> Any:
    """Attention that no kernel has. Scores are bounded by softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118).
    `sinks`, (1, K, G * T, 1): a score beside the keys', which takes its part of the softmax and brings no value
    (gpt-oss, arXiv 2309.17453)."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float().masked_fill(~mask, -torch.inf)
    if sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1).to(query.dtype), value)
    beside = sinks.float().expand(len(scores), -1, -1, 1)
    chances = torch.softmax(torch.cat([scores, beside], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(chances.to(query.dtype), value)


def _hand_on_rule(*, mask_function: Rule, use_vmap: bool = False, **_: Any) -> Rule:
    """transformers' mask interface: the rule itself is handed to the attention of each layer. Raises ModelRefused for a
    rule that takes no tensors."""
    if use_vmap:
        raise ModelRefused("its attention follows a rule of its own (or_mask_function)")
    return mask_function


def register() -> None:
    """Let transformers' classes call `attend` where their configuration says NAME or MASKED. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(MASKED, attend)
    AttentionMaskInterface.register(MASKED, _hand_on_rule)
