"""A paged-attention model on an OpenVINO device.

Exactness (measured, see docs/adr/0002-two-rows-per-segment.md): with a 16-bit KV cache a row's logits are the same to
the bit in every forward in which its segment has two rows or more, and again in every forward of two rows or more in
which it stands apart, as a sequence of its own. So `bit` pads a prompt's last single row, and a forward of one row
alone, with a second row whose result nobody reads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from adapters.contract import (
    Capabilities,
    DeviceLost,
    ForwardResult,
    LoadOptions,
    Precision,
    Segment,
)
from adapters.kv_blocks import BlockPool
from adapters.openvino_rt.failures import typed
from adapters.openvino_rt.graph import ROWS_INPUT
from adapters.pooled import PooledModel, padded_rows
from device_profiles.profile import Exactness
from device_profiles.workload import ModelSpec

_KV_PREFIXES = ("key_cache.", "value_cache.")


class PagedModel(PooledModel):
    """See the module and the contract. One thread calls it."""

    def __init__(
        self,
        compiled: Any,
        spec: ModelSpec,
        options: LoadOptions,
        *,
        weights: str,
        activations: Precision,
        kv_cache: Precision,
    ) -> None:
        import openvino as ov

        self._tensor = ov.Tensor
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self._bound: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
        block_tokens, blocks = self._allocate_cache(options.kv_cache_bytes)
        pad_to = padded_rows(options.exactness)
        super().__init__(BlockPool(blocks, block_tokens, options.slots, pad_to=pad_to))
        self.spec = spec
        self.capabilities = Capabilities(
            slots=options.slots,
            max_context_tokens=spec.context_length,
            max_batch_rows=options.max_batch_rows,
            block_tokens=block_tokens,
            total_blocks=blocks,
            row_invariant=options.exactness is Exactness.BIT and kv_cache is not Precision.INT8,
            paid_rows=pad_to,
            weights=weights,
            activations=activations,
            kv_cache=kv_cache,
            exactness=options.exactness,
            device=options.device,
            apart_tokens=spec.context_length,  # rows alone in their sequence are the cheaper ones (ADR 0002)
        )

    def _allocate_cache(self, budget_bytes: int) -> tuple[int, int]:
        """Give every layer its share of the pool; returns (positions of a block, number of blocks)."""
        import openvino as ov

        caches = [port for port in self._compiled.inputs if port.any_name.startswith(_KV_PREFIXES)]
        shapes = [[port.get_partial_shape()[axis].get_length() for axis in (1, 2, 3)] for port in caches]
        block_bytes = sum(
            int(np.prod(shape)) * port.get_element_type().size for shape, port in zip(shapes, caches, strict=True)
        )
        blocks = max(1, budget_bytes // block_bytes)
        try:
            for shape, port in zip(shapes, caches, strict=True):
                tensor = ov.Tensor(port.get_element_type(), ov.Shape([blocks, *shape]))
                self._request.set_tensor(port.any_name, tensor)
        except RuntimeError as error:
            raise typed(error) from error
        return shapes[0][1], blocks

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        """See the contract."""
        if self._request is None:
            raise DeviceLost("the model was closed")
        self._check(batch)
        self._pool.reserve(batch)
        self._set_inputs(batch)
        started = time.perf_counter()
        try:
            self._request.infer()
        except RuntimeError as error:
            self.close()
            raise typed(error) from error
        device_ms = (time.perf_counter() - started) * 1000.0
        logits = self._request.get_output_tensor(0).data
        return ForwardResult(logits.reshape(-1, logits.shape[-1]), device_ms)

    def _set_inputs(self, batch: Sequence[Segment]) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        begins, block_begins = [0], [0]
        pasts: list[int] = []
        blocks: list[int] = []
        wanted: list[int] = []
        longest = 0
        lone = len(batch) == 1 and batch[0].apart and len(batch[0].tokens) == 1
        for segment in batch:
            first = len(tokens)
            rows = len(segment.tokens) if segment.apart and not lone else self._pool.padded(segment)
            end = segment.start + rows
            tokens.extend(segment.tokens)
            tokens.extend([segment.tokens[0]] * (rows - len(segment.tokens)))
            positions.extend(range(segment.start, end))
            wanted.extend(range(first + segment.rows[0], first + segment.rows[1]))
            # Rows that are apart are sequences of their own over the same blocks.
            for start, stop in _pieces(segment, end):
                pasts.append(start)
                begins.append(begins[-1] + stop - start)
                blocks.extend(self._pool.table(segment.slot, stop))
                block_begins.append(len(blocks))
            longest = max(longest, end)
        if not wanted:
            wanted.append(0)  # a gather of nothing leaves the output layer without a shape it knows
        self._set("input_ids", tokens, np.int64)
        self._set("position_ids", positions, np.int64)
        self._set("past_lens", pasts, np.int32)
        self._set("subsequence_begins", begins, np.int32)
        self._set("block_indices", blocks, np.int32)
        self._set("block_indices_begins", block_begins, np.int32)
        self._set("max_context_len", longest, np.int32)
        self._set(ROWS_INPUT, wanted, np.int64)

    def _set(self, name: str, values: Sequence[int] | int, kind: type[np.int32] | type[np.int64]) -> None:
        """Write an input. The request keeps a tensor that is only overwritten while its shape stays the same:
        binding one takes longer than filling it."""
        bound = self._bound.get(name)
        fresh = np.array(values, dtype=kind)
        if bound is not None and bound.shape == fresh.shape:
            bound[...] = fresh
            return
        self._bound[name] = fresh
        self._request.set_tensor(name, self._tensor(fresh, shared_memory=True))

    def close(self) -> None:
        """See the contract."""
        self._request = None
        self._compiled = None


def _pieces(segment: Segment, end: int) -> list[tuple[int, int]]:
    """Return the (first position, position behind) of each sequence that a segment is run as."""
    if segment.apart:
        return [(position, position + 1) for position in range(segment.start, end)]
    return [(segment.start, end)]
