"""A decoder on a torch device: our block pool in front of transformers' model class.

Exactness (measured, docs/adr/0015-torch.md): `bit` brings products and attention to shapes in which a row's bits do
not depend on the other rows. `kernel` runs the shapes that come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from adapters.best_logits import MOST_BEST
from adapters.contract import (
    BlockRules,
    DeviceLost,
    Hidden,
    KvLayout,
    LayerRange,
    LoadOptions,
    Logits,
    NumericalClass,
    OutOfMemory,
    Precision,
    Segment,
    ShardResult,
    Unsupported,
)
from adapters.decoder.spec import DecoderSpec
from adapters.head_facts import check_head, read_head
from adapters.kv_blocks import BlockPool
from adapters.pooled import Bytes, PooledModel, describe_capabilities
from adapters.torch_device.failures import classify_torch_failure
from adapters.torch_device.lora import LoraRows
from adapters.torch_device.plan import BLOCK_TOKENS, ForwardPlan, Shapes, plan_forward
from adapters.torch_device.runner import ForwardRunner
from adapters.torch_device.split import split_decoder
from device_profiles.device_names import is_processor
from device_profiles.profile import Exactness
from device_profiles.workload import ModelSpec

if TYPE_CHECKING:
    from adapters.torch_device.head import HiddenStates, TorchHead

DTYPES: dict[Precision, Any] = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


def count_token_bytes(spec: DecoderSpec, activations: Precision, ranks: int) -> int:
    """Return what the KV cache takes for a position, over all layers and ranks. Raises Unsupported where there are more
    ranks than the model has parts."""
    kv_heads = sum(len(part.kv_heads) for part in split_decoder(spec, ranks))
    return int(spec.layers * 2 * kv_heads * spec.head_dim * DTYPES[activations].itemsize)


def count_blocks(options: LoadOptions, token_bytes: int) -> int:
    """Return how many blocks a KV cache has whose positions take so much over all layers."""
    return max(1, options.kv_cache_bytes // (BLOCK_TOKENS * token_bytes))


class KvMemory(Protocol):
    """See adapters.torch_device.attention.KvPool."""

    @property
    def layout(self) -> str: ...

    def list_page_bytes(self) -> tuple[int, ...]: ...

    def read_blocks(self, cache: int, blocks: Sequence[int]) -> Any: ...

    def write_blocks(self, cache: int, blocks: Sequence[int], pages: Any) -> None: ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def erase(self, blocks: Sequence[int]) -> None: ...


class PlanRunner(Protocol):
    """See adapters.torch_device.runner.ForwardRunner."""

    def run(self, plan: ForwardPlan, hidden: Hidden | None = None) -> ShardResult: ...

    def take_memory_back(self) -> bool: ...

    def close(self) -> None: ...


class TorchModel(PooledModel):
    """See the module and the contract. One thread calls it."""

    def __init__(
        self,
        memory: KvMemory,
        runner: PlanRunner,
        spec: ModelSpec,
        options: LoadOptions,
        shapes: Shapes,
        *,
        weights: str,
        numerical_class: NumericalClass,
        layers: LayerRange,
        loras: LoraRows | None = None,
    ) -> None:
        """`memory` and `runner` are of these layers alone, `spec` of the whole model. `loras`: what is told the
        adapters of rows, where there are some (options.loras)."""
        self.layers = layers
        blocks = count_blocks(options, spec.bytes_per_token)
        super().__init__(BlockPool(BlockRules(blocks, BLOCK_TOKENS, options.slots)))
        self._shapes, self._lora_rows = shapes, loras
        self.loras = tuple(lora.name for lora in options.loras) if loras is not None else ()
        self._memory: KvMemory | None = memory
        self.kv_layout = KvLayout(
            f"torch {memory.layout} {DTYPES[numerical_class.activations]}",
            page_tokens=BLOCK_TOKENS,
            page_bytes=memory.list_page_bytes(),
        )
        self._runner: PlanRunner | None = runner
        self._states: list[HiddenStates] = []
        self._options = options
        self.spec = spec
        crosses = not is_processor(options.device) and layers == LayerRange(0, spec.layers)
        self.capabilities = describe_capabilities(
            self.block_rules,
            spec,
            options,
            numerical_class,
            weights=weights,
            device=options.device,
            best_logits=MOST_BEST if crosses else 0,
        )

    def attach_head(self, directory: Path, slots: int) -> TorchHead:
        """See adapters.loaded_model.TakesHeads."""
        from adapters.torch_device.head import HiddenStates, TorchHead, find_layers, load_head_network

        runner = self._runner
        if not isinstance(runner, ForwardRunner) or self.layers != LayerRange(0, self.spec.layers):
            raise Unsupported(
                "a head needs all layers of its target in one process; leave tensor_parallel and shards out"
            )
        facts, network = read_head(directory), runner.network
        embedding, rows = network.get_input_embeddings(), self.spec.vocabulary_size
        width = network.config.hidden_size
        find_layers(network)
        check_head(facts, "the target", hidden=width, vocabulary=rows, layers=self.spec.layers)
        dtype, device = DTYPES[self.capabilities.activations], embedding.weight.device
        options = replace(self._options, slots=slots, exactness=Exactness.KERNEL, loras=())
        try:
            own = load_head_network(facts, dtype, device)
            blocks = self.capabilities.total_blocks + 2
            states = HiddenStates(facts.choose_layers(self.spec.layers), width, blocks, dtype, device)
            reads, its_class = own.embed_tokens or embedding, self.capabilities.numerical_class
            head = TorchHead(facts, own, reads, states, self._pool, self.spec, options, its_class)
        except (RuntimeError, MemoryError) as error:
            raise classify_torch_failure(error) from error
        self._states = [*(known for known in self._states if not known.closed), states]
        runner.add_watch(states)
        return head

    def forward_layers(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        if self._runner is None:
            raise DeviceLost("the model was closed")
        self._check(batch)
        for segment in batch:
            # On CUDA an id outside the table would take the device with it.
            if min(segment.tokens) < 0 or max(segment.tokens) >= self.spec.vocabulary_size:
                raise Unsupported(f"slot {segment.slot}: a token is outside the vocabulary")
        self._pool.reserve(batch)
        plan = plan_forward(batch, self._pool, self._shapes)
        if self._lora_rows is not None:
            numbers = [-self._pool.find_root(segment.slot) for segment in batch for _ in segment.tokens]
            self._lora_rows.set_numbers(np.array(numbers + [0] * (len(plan.ids) - len(numbers)), np.int64))
        try:
            result = self._runner.run(plan, hidden)
        except DeviceLost:
            self.close()
            raise
        except (RuntimeError, MemoryError) as error:
            failure = classify_torch_failure(error)
            if isinstance(failure, OutOfMemory) and self._runner.take_memory_back():
                failure.can_go_on = True
            else:
                self.close()
            raise failure from error
        if result.best is None:
            return result
        return replace(result, best=result.best._replace(read_row=partial(self._read_row, result.best.read_row)))

    def _read_row(self, read_row: Callable[[int], Logits], row: int) -> Logits:
        try:
            return read_row(row)
        except RuntimeError as error:
            self.close()
            raise classify_torch_failure(error) from error

    def _read_pages(self, cache: int, slot: int, table: Sequence[int], start: int) -> Bytes:
        if self._memory is None:
            raise DeviceLost("the model was closed")
        pages: Bytes = self._memory.read_blocks(cache, table[start:]).numpy()
        return pages

    def _write_pages(self, cache: int, slot: int, table: Sequence[int], span: tuple[int, int], pages: Bytes) -> None:
        begin, first = span
        if self._memory is not None and first < len(table):
            own = np.ascontiguousarray(pages.reshape(len(table) - begin, -1)[first - begin :])
            self._memory.write_blocks(cache, table[first:], torch.from_numpy(own.reshape(-1)))
            for states in self._states if cache == 0 else ():
                states.erase(table[first:])

    def _copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self._memory is not None:
            self._memory.copy(sources, targets)
            for states in self._states:
                states.copy(sources, targets)

    def _erase(self, blocks: Sequence[int]) -> None:
        if self._memory is not None:
            self._memory.erase(blocks)
            for states in self._states:
                states.erase(blocks)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = self._memory = None
