"""An EAGLE-3 head over a target's hidden states, in the target's own process: they never leave it.

The target's forwards keep the outputs of some layers (`HiddenStates`), one row for each place of its KV cache. So
prefixes, forks and rollbacks are right for them as they are for keys and values. The head is one layer with a KV cache
of its own (arXiv 2503.01840). Its row of a token takes the token's embedding and the target's states of the position
before. Behind what the target has computed it takes what it made itself of the row before.
"""

# torch's and transformers' types are not installed everywhere, so their classes are Any to mypy.
# mypy: disable-error-code="misc"

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from adapters.contract import (
    BlockRules,
    DeviceLost,
    Exactness,
    Hidden,
    LoadOptions,
    ModelRefused,
    NumericalClass,
    Segment,
    ShardResult,
)
from adapters.decoder.hf_config import CONFIG_FILE
from adapters.head_facts import USUAL_LAYERS, HeadFacts
from adapters.kv_blocks import BlockPool
from adapters.pooled import PooledModel, describe_capabilities
from adapters.safetensors_file import Stored
from adapters.torch_device import attention
from adapters.torch_device.attention import NAME, DeviceGroup, KvPool, LayerKv, PagedBatch, attending
from adapters.torch_device.failures import classify_torch_failure
from adapters.torch_device.plan import BLOCK_TOKENS, ForwardPlan, Indices, plan_forward, shapes_for
from adapters.torch_device.runner import on_device
from device_profiles.units import MS_PER_S
from device_profiles.workload import ModelSpec

_NO_SLOT = -1


class HiddenStates:
    """The outputs of some layers of a network for every place of its KV cache: (places, layers * width), zeros where
    nothing was computed. `closed`: nobody reads them any more."""

    def __init__(self, layer_ids: Sequence[int], width: int, blocks: int, dtype: Any, device: Any) -> None:
        """Allocate, for so many blocks, scratch and blank one included. Raises torch's errors when memory runs out."""
        self._ids = tuple(layer_ids)
        self._rows = torch.zeros((blocks, BLOCK_TOKENS, len(self._ids) * width), dtype=dtype, device=device)
        self._outputs: dict[int, Any] = {}
        self.hooks: list[Any] = []
        self.closed = False

    def watch_layers(self, network: Any) -> None:
        """Let a network's layers leave their outputs here."""
        layers = find_layers(network)
        self.hooks = [layers[number].register_forward_hook(self._note(number)) for number in self._ids]

    def remove_hooks(self) -> None:
        """Leave the network as it was."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def store_outputs(self, places: Any) -> None:
        """Keep what the last forward's layers gave, at the places of its rows, (N,)."""
        held = self._rows  # another thread may close it
        if not self.closed:
            rows = torch.cat([self._outputs[number] for number in self._ids], dim=-1)
            held.flatten(0, 1).index_copy_(0, places, rows.to(held.dtype))
        self._outputs.clear()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.closed = True
        self._rows = self._rows[:0]

    def read(self, places: Any) -> Any:
        """Return the rows of places, (N,)."""
        return self._rows.flatten(0, 1)[places]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks."""
        held = self._rows
        with torch.inference_mode():
            if not self.closed:
                held[list(targets)] = held[list(sources)]

    def erase(self, blocks: Sequence[int]) -> None:
        """Forget blocks: their keys and values came from elsewhere, or are garbage."""
        held = self._rows
        with torch.inference_mode():
            if not self.closed:
                held[list(blocks)] = 0

    def _note(self, number: int) -> Any:
        def note(module: Any, given: Any, output: Any) -> None:
            self._outputs[number] = (output[0] if isinstance(output, tuple) else output)[0]

        return note


def find_layers(network: Any) -> Any:
    """Return a decoder's layers. Raises ModelRefused where its class has no list of them."""
    count = network.config.num_hidden_layers
    lists = (module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    layers = next(lists, None)
    if layers is None:
        raise ModelRefused(f"{type(network).__name__} has no list of its {count} layers, whose outputs a head reads")
    return layers


class HeadNetwork(nn.Module):
    """The layer, its inputs and its outputs, by the names of its files."""

    def __init__(self, head: HeadFacts) -> None:
        super().__init__()
        config = LlamaConfig.from_dict(head.config)
        config._attn_implementation = NAME
        fused = (len(head.layer_ids) or USUAL_LAYERS) * head.target_hidden
        self.fc = nn.Linear(fused, head.hidden, bias="fc.bias" in head.tensors)
        self.midlayer = LlamaDecoderLayer(config, 0)
        own, bias = self.midlayer.self_attn, bool(config.attention_bias)
        own.q_proj, own.k_proj, own.v_proj = (
            nn.Linear(2 * head.hidden, made.out_features, bias=bias) for made in (own.q_proj, own.k_proj, own.v_proj)
        )
        self.midlayer.hidden_norm = LlamaRMSNorm(head.hidden, eps=config.rms_norm_eps)
        self.norm = LlamaRMSNorm(head.hidden, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(head.hidden, head.outputs, bias=False)
        self.embed_tokens = nn.Embedding(head.vocabulary, head.hidden) if head.has_embedding else None
        self.rotary = LlamaRotaryEmbedding(config)
        self.kept = LayerKv(config.num_key_value_heads, own.head_dim, own.head_dim)
        self.normed_residual = bool(head.config.get("norm_before_residual"))

    def compute_hidden(self, embedded: Any, states: Any, positions: Any, rule: Any = None) -> Any:
        """Return what the layer makes of embeddings and fused states, both (1, N, hidden size): the same shape."""
        layer = self.midlayer
        normed = layer.hidden_norm(states)
        joined = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        turned = self.rotary(joined, positions)
        attended, _ = layer.self_attn(hidden_states=joined, position_embeddings=turned, attention_mask=rule)
        hidden = attended + (normed if self.normed_residual else states)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def load_head_network(head: HeadFacts, dtype: Any, device: Any) -> HeadNetwork:
    """Return a head's network with its weights. Raises ModelRefused, and torch's errors when memory runs out."""
    attention.register()
    try:
        network = HeadNetwork(head)
    except Exception as error:  # whatever transformers' checks of its keys raise
        raise ModelRefused(f"{head.title}/{CONFIG_FILE}: {str(error).splitlines()[0]}") from error
    tensors = {name: _read_values(stored) for name, stored in head.tensors.items() if name != "d2t"}
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    for name in sorted(wanted.keys() | tensors.keys()):
        has = tuple(tensors[name].shape) if name in tensors else "none"
        if has != wanted.get(name, "none"):
            raise ModelRefused(f"{head.title}: {name} has the shape {has}, and its config {wanted.get(name, 'none')}")
    network.load_state_dict(tensors)
    network.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return network


def _read_values(stored: Stored) -> Any:
    values = torch.from_numpy(np.array(stored.values()))
    return values.view(torch.bfloat16) if stored.kind == "BF16" else values


def _hides_first(batch: int, head: int, rows: Any, keys: Any) -> Any:
    """Position 0 has no states before it, so no row behind it sees it."""
    return (keys > 0) | (rows == 0)


class TorchHead(PooledModel):
    """Implements adapters.loaded_model.LoadedHead: see the module. One thread calls it and its target."""

    def __init__(
        self,
        facts: HeadFacts,
        network: HeadNetwork,
        embedding: Any,
        states: HiddenStates,
        target: BlockPool,
        spec: ModelSpec,
        options: LoadOptions,
        numerical_class: NumericalClass,
    ) -> None:
        """`embedding` reads tokens, `target` says where the target's slots lie, `spec` is the target's. Raises torch's
        errors when memory runs out."""
        # Its slots hold what the target's do, and the drafts behind: a block more at most, begun and full ones.
        blocks = target.total + 2 * options.slots
        super().__init__(BlockPool(BlockRules(blocks, BLOCK_TOKENS, options.slots)))
        self._network, self._embedding, self._states, self._target = network, embedding, states, target
        weight = network.fc.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._memory = KvPool([network.kept], blocks=blocks, block=BLOCK_TOKENS, dtype=self._dtype, device=self._device)
        self._shapes = shapes_for(self._device.type, Exactness.KERNEL)
        self._sources: dict[int, tuple[int, int]] = {}
        self._made: dict[int, tuple[int, Any]] = {}
        token_bytes = (network.kept.elements + weight.shape[1]) * self._dtype.itemsize
        self.spec = ModelSpec(
            layers=1,
            vocabulary_size=spec.vocabulary_size,
            context_length=spec.context_length,
            bytes_per_token=token_bytes,
            vocabulary_fingerprint=spec.vocabulary_fingerprint,
            output_ids=facts.read_output_ids(),
        )
        name = str(self._dtype).removeprefix("torch.")
        self.capabilities = describe_capabilities(
            self.block_rules, self.spec, options, numerical_class, weights=name, device=options.device
        )
        weights = sum(value.numel() for value in network.parameters()) * self._dtype.itemsize
        self.memory_bytes = weights + token_bytes * blocks * BLOCK_TOKENS

    def follow(self, slot: int, source: int, positions: int) -> None:
        """See adapters.loaded_model.LoadedHead."""
        self._sources[slot] = (source, positions)

    def forward_layers(self, batch: Sequence[Segment], hidden: Hidden | None) -> ShardResult:
        if self._states.closed:
            raise DeviceLost("the head was closed")
        self._check(batch)
        self._pool.reserve(batch)
        plan = plan_forward(batch, self._pool, self._shapes)
        try:
            with torch.inference_mode(), on_device(self._device):
                started_s = time.perf_counter()
                logits = self._compute(batch, plan).float().cpu().numpy()
                return ShardResult(logits, (time.perf_counter() - started_s) * MS_PER_S)
        except (RuntimeError, MemoryError) as error:
            self.close()
            raise classify_torch_failure(error) from error

    def close(self) -> None:
        self._states.close()

    def _compute(self, batch: Sequence[Segment], plan: ForwardPlan) -> Any:
        """Return the wanted rows of logits, on the device."""
        paged = PagedBatch(self._memory, self._send(plan.writes), self._send(plan.sources), [], ())
        for group in plan.groups:
            own = plan.tiles[sum(len(done.rows) for done in paged.groups) :][: (group.stop - group.first) * group.tile]
            positions = self._send(plan.positions[own]).view(-1, group.tile)
            paged.groups.append(DeviceGroup(self._send(own), positions, self._send(group.table)))
        embedded = self._embedding(self._send(plan.ids)[None]).to(self._dtype)
        states = self._network.fc(self._states.read(self._send(self._find_places(batch, len(plan.ids)))))[None]
        ends = np.cumsum([len(segment.tokens) for segment in batch])
        for segment, end in zip(batch, ends, strict=True):
            place, made = self._made.get(segment.slot, (_NO_SLOT, None))
            if made is not None and place == segment.start - 1 >= self._count_known(segment.slot) - 1:
                states[0, end - len(segment.tokens)] = made
        with attending(paged):
            hidden = self._network.compute_hidden(embedded, states, self._send(plan.positions)[None], _hides_first)[0]
        for segment, end in zip(batch, ends, strict=True):
            self._made[segment.slot] = (segment.start + len(segment.tokens) - 1, hidden[end - 1].clone())
        wanted = hidden[self._send(plan.wanted[: plan.wanted_count])]
        return self._network.lm_head(self._network.norm(wanted))

    def _count_known(self, slot: int) -> int:
        """Return up to which position rows take the target's states of the position before."""
        return self._sources.get(slot, (_NO_SLOT, 0))[1]

    def _find_places(self, batch: Sequence[Segment], rows: int) -> Indices:
        """Return where the target's states of the position before each row lie, (rows,): in its blank block, which has
        zeros, where there are none."""
        size = BLOCK_TOKENS
        places = np.full(rows, (self._target.total + 1) * size, np.int64)
        at = 0
        for segment in batch:
            source, known = self._sources.get(segment.slot, (_NO_SLOT, 0))
            before = np.arange(segment.start, min(segment.start + len(segment.tokens), known)) - 1
            if len(before) and source != _NO_SLOT:
                table = np.array(self._target.table(source, int(before[-1]) + 1), np.int64)
                own = places[at : at + len(before)]
                has = before >= 0
                own[has] = table[before[has] // size] * size + before[has] % size
            at += len(segment.tokens)
        return places

    def _send(self, values: Indices) -> Any:
        return torch.from_numpy(values).to(self._device)

    def _copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._memory.copy(sources, targets)

    def _erase(self, blocks: Sequence[int]) -> None:
        self._memory.erase(blocks)
