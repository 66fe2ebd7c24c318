"""A decoder on a torch device: our block pool in front of transformers' model class.

Exactness (measured, docs/adr/0015-torch.md): `bit` brings products and attention to shapes in which a row's bits do
not depend on the other rows. `kernel` runs the shapes that come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from adapters.contract import (
    BlockRules,
    Capabilities,
    DeviceLost,
    ForwardResult,
    Hidden,
    KvLayout,
    LayerRange,
    LoadOptions,
    NumericalClass,
    OutOfMemory,
    Precision,
    Segment,
    ShardResult,
    Unsupported,
)
from adapters.decoder.spec import DecoderSpec
from adapters.kv_blocks import BlockPool
from adapters.pooled import Bytes, PooledModel
from adapters.torch_device.attention import KvPool
from adapters.torch_device.failures import classify_torch_failure
from adapters.torch_device.plan import Shapes, plan_forward
from adapters.torch_device.runner import ForwardRunner
from device_profiles.profile import Exactness
from device_profiles.workload import ModelSpec

BLOCK_TOKENS = 32
DTYPES: dict[Precision, Any] = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}
_CUDA_TILE_ROWS = 64
_KEY_BLOCKS = 512 // BLOCK_TOKENS
_MOST_QUERIES = 63
"""With AMX, torch's attention in bf16 takes another kernel from 64 query rows on, where threads have enough of it."""
_FREE = 1 << 20


def shapes_for(device_type: str, exactness: Exactness, fixed_width: int = 0, heads_per_key: int = 1) -> Shapes:
    """Return the shapes of forwards. On the CPU, products of two rows or more are one numerical class. So is attention
    of four query rows or more over whole blocks of 512 keys. On CUDA a kernel is chosen by its shape.

    With `fixed_width` every product has that many rows, and every attention tile equally many. `heads_per_key`: how
    many query heads share a key head, and so are rows of one product.
    """
    bit = exactness is Exactness.BIT
    if device_type == "cuda":
        tile = fixed_width or (_CUDA_TILE_ROWS if bit else 0)
        return Shapes(rows=tile or 8, least_rows=tile or 8, tile=8, most_tile=8, key_blocks=1, product_tile=tile)
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


def bytes_per_token(spec: DecoderSpec, activations: Precision) -> int:
    """Return what the KV cache takes for a position, over all layers."""
    return int(spec.layers * 2 * spec.kv_heads * spec.head_dim * DTYPES[activations].itemsize)


class TorchModel(PooledModel):
    """See the module and the contract. One thread calls it."""

    def __init__(
        self,
        network: Any,
        decoder: DecoderSpec,
        spec: ModelSpec,
        options: LoadOptions,
        shapes: Shapes,
        *,
        weights: str,
        numerical_class: NumericalClass,
        device: Any,
        layers: LayerRange,
    ) -> None:
        """Allocate the KV pool on the device. `network` and `decoder` are of these layers alone, `spec` of the whole
        model. Raises torch's errors when memory runs out."""
        self.layers = layers
        blocks = max(1, options.kv_cache_bytes // (BLOCK_TOKENS * spec.bytes_per_token))
        super().__init__(BlockPool(BlockRules(blocks, BLOCK_TOKENS, options.slots)))
        self._shapes = shapes
        memory = KvPool(
            layers=decoder.layers,
            blocks=blocks,
            block=BLOCK_TOKENS,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            dtype=DTYPES[numerical_class.activations],
            device=device,
        )
        self._memory: KvPool | None = memory
        heads = f"{BLOCK_TOKENS}x{decoder.kv_heads}x{decoder.head_dim}"
        self.kv_layout = KvLayout(
            f"torch {2 * decoder.layers}x{heads} {DTYPES[numerical_class.activations]}",
            page_tokens=BLOCK_TOKENS,
            page_bytes=(memory.page_bytes,) * (2 * decoder.layers),
        )
        self._runner: ForwardRunner | None = ForwardRunner(
            network,
            memory,
            block=BLOCK_TOKENS,
            scratch_block=blocks,
            windows=decoder.windows,
            device=device,
            last=layers.end == spec.layers,
        )
        self.spec = spec
        self.capabilities = Capabilities(
            slots=options.slots,
            max_context_tokens=spec.context_length,
            max_batch_rows=options.max_batch_rows,
            block_tokens=BLOCK_TOKENS,
            total_blocks=blocks,
            row_invariant=options.exactness is Exactness.BIT,
            paid_rows=1,
            weights=weights,
            numerical_class=numerical_class,
            exactness=options.exactness,
            device=options.device,
        )

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        """See the contract."""
        found = self.forward_layers(batch, None)
        return ForwardResult(found.output, found.device_ms)

    def forward_layers(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        """See the contract."""
        if self._runner is None:
            raise DeviceLost("the model was closed")
        self._check(batch)
        for segment in batch:
            # On CUDA an id outside the table would take the device with it.
            if min(segment.tokens) < 0 or max(segment.tokens) >= self.spec.vocabulary_size:
                raise Unsupported(f"slot {segment.slot}: a token is outside the vocabulary")
        self._pool.reserve(batch)
        try:
            output, device_ms = self._runner.run(plan_forward(batch, self._pool, self._shapes), hidden)
        except (RuntimeError, MemoryError) as error:
            failure = classify_torch_failure(error)
            if isinstance(failure, OutOfMemory) and self._runner.take_memory_back():
                failure.can_go_on = True
            else:
                self.close()
            raise failure from error
        return ShardResult(output, device_ms)

    def _read_pages(self, cache: int, slot: int, table: Sequence[int]) -> Bytes:
        if self._memory is None:
            raise DeviceLost("the model was closed")
        found: Bytes = self._memory.read_blocks(cache, table).numpy()
        return found

    def _write_pages(self, cache: int, slot: int, table: Sequence[int], first: int, pages: Bytes) -> None:
        if self._memory is not None and first < len(table):
            own = np.ascontiguousarray(pages.reshape(len(table), -1)[first:])
            self._memory.write_blocks(cache, table[first:], torch.from_numpy(own.reshape(-1)))

    def _copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self._memory is not None:
            self._memory.copy(sources, targets)

    def _erase(self, blocks: Sequence[int]) -> None:
        if self._memory is not None:
            self._memory.erase(blocks)

    def close(self) -> None:
        """See the contract."""
        self._runner = self._memory = None
