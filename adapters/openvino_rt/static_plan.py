"""What a load with static shapes decides before anything is compiled: context, widths, and the KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from adapters.contract import LoadOptions, Precision, Unsupported
from adapters.kv_memory import block_tokens
from device_profiles.units import ceil_div, human_bytes

USUAL_CONTEXT_TOKENS = 2048
"""Positions of a sequence where none are asked for: attention runs over all of them in every forward."""


@dataclass(frozen=True, slots=True)
class StaticKvShape:
    """What lies outside the graphs: `layers` keys and values of (kv_heads, capacity, head_dim) for each sequence, in
    `blocks` blocks of `block` positions for all of them."""

    layers: int
    kv_heads: int
    head_dim: int
    precision: Precision
    capacity: int
    block: int
    blocks: int

    @property
    def caches(self) -> int:
        """Keys and values of every layer."""
        return 2 * self.layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a position over all layers."""
        return self.caches * self.kv_heads * self.head_dim * np.dtype(self.kind).itemsize

    @property
    def kind(self) -> type[np.generic]:
        """The numpy type that holds an element."""
        return choose_numpy_type(self.precision)


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """`context_tokens`: positions of a sequence at most. The widths are numbers of rows, in ascending order."""

    context_tokens: int
    prefill_rows: int
    verify_rows: tuple[int, ...]
    cache: StaticKvShape

    @property
    def widths(self) -> tuple[int, ...]:
        """All widths that a graph is made for."""
        return tuple(sorted({*self.verify_rows, self.prefill_rows}))


def choose_numpy_type(precision: Precision) -> type[np.generic]:
    """Return the numpy type that holds an element; bfloat16 is held as its bits."""
    kinds: dict[Precision, type[np.generic]] = {Precision.BF16: np.uint16, Precision.FP16: np.float16}
    return kinds.get(precision, np.float32)


def plan_shapes(options: LoadOptions, facts: Mapping[str, Any], precision: Precision) -> StaticPlan:
    """Plan for a model of which `facts` are known (prepared_facts.py). Raises Unsupported, with the way out, where the
    context that is asked for is longer than the model's or than the pool holds, or where widths make no sense."""
    static = options.static
    if static.prefill_rows < 1 or not static.verify_rows or min(static.verify_rows) < 1:
        raise Unsupported("static shapes need prefill_rows of at least 1, and verify_rows of at least one such number")
    layers, kv_heads, head_dim = (int(facts[key]) for key in ("layers", "kv_heads", "head_dim"))
    item = np.dtype(choose_numpy_type(precision)).itemsize
    position_bytes = 2 * layers * kv_heads * head_dim * item
    longest = static.context_tokens or min(USUAL_CONTEXT_TOKENS, int(facts["context_length"]))
    useful_bytes = min(options.kv_cache_bytes, options.slots * longest * position_bytes)
    block = block_tokens(head_dim * item, useful_bytes)
    blocks = min(options.kv_cache_bytes // (block * position_bytes), options.slots * ceil_div(longest, block))
    if not blocks:
        raise Unsupported(
            f"a KV cache of {human_bytes(options.kv_cache_bytes)} holds no block of {block} positions; "
            f"give limits.kv_cache at least {human_bytes(block * position_bytes)}"
        )
    context = _context(static.context_tokens, int(facts["context_length"]), blocks * block, position_bytes)
    cache = StaticKvShape(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        precision=precision,
        capacity=ceil_div(context + 1, block) * block,  # one position more, for padding to be written to
        block=block,
        blocks=blocks,
    )
    verify = tuple(sorted({min(rows, context) for rows in static.verify_rows}))
    return StaticPlan(context, min(static.prefill_rows, context), verify, cache)


def _context(wanted: int, model_tokens: int, room_tokens: int, position_bytes: int) -> int:
    if not wanted:
        return min(USUAL_CONTEXT_TOKENS, model_tokens, room_tokens)
    if wanted > model_tokens:
        raise Unsupported(f"static context_tokens {wanted} is more than the model's context of {model_tokens}")
    if wanted > room_tokens:
        raise Unsupported(
            f"static context_tokens {wanted} is more than the {room_tokens} positions that the KV cache holds; "
            f"give limits.kv_cache at least {human_bytes(wanted * position_bytes)}, or lower it"
        )
    return wanted
