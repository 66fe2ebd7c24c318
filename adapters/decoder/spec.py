"""The shape of a decoder-only model, and its weights by canonical name. Readers fill it in, builders read it.

Readers (GGUF, safetensors) translate a file's names and conventions; builders (ONNX, OpenVINO) turn the result
into a runtime's graph. Neither knows the other. Canonical names, with `L` the layer's index:

    embedding                                     (vocabulary, hidden)
    L.attention_norm  L.mlp_norm                  (hidden,)
    L.query  L.key  L.value                       (heads or kv_heads * head_dim, hidden)
    L.query_bias  L.key_bias  L.value_bias        where spec.qkv_bias
    L.query_norm  L.key_norm                      (head_dim,), where spec.qk_norm
    L.output                                      (hidden, heads * head_dim)
    L.gate  L.up                                  (mlp, hidden)
    L.down                                        (hidden, mlp)
    L.post_attention_norm  L.post_mlp_norm        (hidden,), where spec.post_norms
    final_norm                                    (hidden,)
    head                                          (outputs, hidden), unless spec.tied_embeddings

Norm weights are what the normalised value is multiplied with (Gemma's stored w means 1 + w here). Query and key
rows are in the order of rotate-half (NeoX) position embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from adapters.contract import LayerRange, ModelRefused

MOST_LAYERS, MOST_HEAD_DIM = 10_000, 10_000
"""More, in a model's file, is damage, and would be answered with all memory."""
PROJECTIONS = ("query", "key", "value")
"""The matrices that read what attention is given."""
_MATRICES = (*PROJECTIONS, "output", "gate", "up", "down")
MOST_COUNT = 1 << 31
"""Of anything that a file counts: positions, rows, heads."""


class NotConvertible(ModelRefused):
    """A sound model that no graph here computes. A library may: llama.cpp's of a GGUF file, transformers of a
    directory."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864): `inverse_frequencies` has head_dim / 2 entries, scaling
    (linear, Llama 3) already applied; `magnitude` multiplies cos and sin (1 unless YaRN)."""

    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0


class DecoderSizes(Protocol):
    """What is known of every decoder, also of one that only a library of its own computes. `family`: its architecture.
    Weights are counted in elements of matrices."""

    @property
    def family(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def mlp(self) -> int: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def draft_outputs(self) -> int: ...
    @property
    def whole(self) -> str:
        """Why its layers are not loaded apart, with the way out; "" where they are."""
        ...

    @property
    def fixed_formats(self) -> bool:
        """Whether its weights are run in the formats of its files alone."""
        ...

    @property
    def outputs(self) -> int: ...
    @property
    def all_layers(self) -> LayerRange: ...
    @property
    def matrix_elements(self) -> int: ...
    @property
    def read_elements(self) -> int:
        """How many weights a forward of one row reads."""
        ...

    @property
    def attention_elements(self) -> int:
        """The elements of all heads' queries, over all layers with attention."""
        ...

    def count_elements(self, layers: LayerRange) -> int:
        """Return how many weights a range of layers has, with the embedding and the head at its ends."""
        ...

    def count_layer_elements(self, layers: LayerRange) -> int:
        """Return how many of `count_elements` are the layers' own."""
        ...

    def count_kv_elements(self, layers: LayerRange) -> int: ...


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes in elements. `windows[L]` is the layer's sliding window in tokens, 0 for full attention; `ropes[L]`
    the layer's rope. `query_scale` multiplies query-key products. Soft caps are 0 where there is none. `draft_outputs`:
    how many tokens a draft can say, where that is not the whole vocabulary, else 0."""

    whole: ClassVar[str] = ""
    fixed_formats: ClassVar[bool] = False

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary_size: int
    context_length: int
    norm_epsilon: float
    activation: Literal["silu", "gelu_tanh"]
    query_scale: float
    ropes: tuple[Rope, ...]
    windows: tuple[int, ...]
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    draft_outputs: int = 0

    @property
    def outputs(self) -> int:
        """How many logits a row has."""
        return self.draft_outputs or self.vocabulary_size

    @property
    def head_name(self) -> str:
        """The tensor that makes logits of rows."""
        return "embedding" if self.tied_embeddings else "head"

    @property
    def projection_rows(self) -> tuple[int, int, int]:
        keys = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, keys, keys

    @property
    def rope_kinds(self) -> tuple[Rope, ...]:
        """Each rope once, in the order of the layers."""
        return tuple(dict.fromkeys(self.ropes))

    @property
    def all_layers(self) -> LayerRange:
        return LayerRange(0, self.layers)

    @property
    def most_ranks(self) -> int:
        """How many ranks of tensor parallelism can have a part of each layer: a head, and some of the MLP."""
        return min(self.heads, self.mlp, self.vocabulary_size, self.outputs)

    @property
    def matrix_elements(self) -> int:
        """How many weights the matrices have together."""
        return self.count_elements(self.all_layers)

    @property
    def read_elements(self) -> int:
        return self.count_layer_elements(self.all_layers) + self.outputs * self.hidden

    @property
    def attention_elements(self) -> int:
        return self.layers * self.heads * self.head_dim

    def count_kv_elements(self, layers: LayerRange) -> int:
        return 2 * (layers.end - layers.first) * self.kv_heads * self.head_dim

    def count_elements(self, layers: LayerRange) -> int:
        """Return how many weights the matrices of a range of layers have together: with the embedding where it begins
        with the first layer, and with the head, which may be the embedding, where it ends with the last."""
        outer = {"embedding"} if layers.first == 0 else set()
        if layers.end == self.layers:
            outer.add(self.head_name)
        return sum(math.prod(self.shape_of(name)) for name in outer) + self.count_layer_elements(layers)

    def count_layer_elements(self, layers: LayerRange) -> int:
        """Return how many of `count_elements` are the layers' own."""
        return (layers.end - layers.first) * sum(math.prod(self.shape_of(name)) for name in _MATRICES)

    def keep_layers(self, layers: LayerRange) -> DecoderSpec:
        """Return the spec of these layers alone, numbered from 0."""
        kept = slice(layers.first, layers.end)
        return replace(self, layers=layers.end - layers.first, ropes=self.ropes[kept], windows=self.windows[kept])

    def list_tensors(self) -> list[str]:
        """Return the canonical name of every tensor that such a model computes with, and of no other."""
        roles = [*_MATRICES, "attention_norm", "mlp_norm"]
        roles += [f"{role}_bias" for role in PROJECTIONS] if self.qkv_bias else []
        roles += ["query_norm", "key_norm"] if self.qk_norm else []
        roles += ["post_attention_norm", "post_mlp_norm"] if self.post_norms else []
        inside = [f"{layer}.{role}" for layer in range(self.layers) for role in roles]
        return ["embedding", *inside, "final_norm", *([] if self.tied_embeddings else ["head"])]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor of a canonical name."""
        queries, keys, _ = self.projection_rows
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocabulary_size, self.hidden),
            "head": (self.outputs, self.hidden),
            "query": (queries, self.hidden),
            "key": (keys, self.hidden),
            "value": (keys, self.hidden),
            "query_bias": (queries,),
            "key_bias": (keys,),
            "value_bias": (keys,),
            "query_norm": (self.head_dim,),
            "key_norm": (self.head_dim,),
            "output": (self.hidden, queries),
            "gate": (self.mlp, self.hidden),
            "up": (self.mlp, self.hidden),
            "down": (self.hidden, self.mlp),
        }
        return shapes.get(name.rpartition(".")[2], (self.hidden,))


def describe_too_many(decoder: DecoderSpec, ranks: int) -> str:
    most = decoder.most_ranks
    return (
        f"{ranks} ranks cannot share a model with {decoder.heads} attention heads and an MLP of {decoder.mlp}; "
        f"{most} can at most. " + (f"Set tensor_parallel to {most} or less." if most > 1 else "Leave it out.")
    )


@dataclass(frozen=True, slots=True)
class Dense:
    """A tensor in full: float32, float16, or bfloat16 as uint16 bit patterns (`bfloat16` True)."""

    values: NDArray[Any]
    bfloat16: bool = False

    def float32(self) -> NDArray[np.float32]:
        """Return the values in float32, always a copy."""
        if self.bfloat16:
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix quantised by groups along its rows: (values - zeros) * scales.

    `values`: uint8, shape (rows, columns), each below 2**bits. `scales`: float16, shape (rows, groups).
    `zeros`: uint8, shape (rows, groups). groups = columns / group_size.
    """

    values: NDArray[np.uint8]
    scales: NDArray[np.float16]
    zeros: NDArray[np.uint8]
    bits: Literal[4, 8]
    group_size: int

    def float32(self) -> NDArray[np.float32]:
        """Return what the matrix stands for, in float32."""
        groups = self.values.reshape(*self.scales.shape, self.group_size).astype(np.float32)
        centred = groups - self.zeros[..., None].astype(np.float32)
        return (centred * self.scales[..., None].astype(np.float32)).reshape(self.values.shape)


Tensor = Dense | Grouped

OnRead = Callable[[str, int], None]
"""Called with the name of a tensor in its file, and how many of its bytes have been read so far."""


def ignore_read(name: str, count: int) -> None:
    """An OnRead that does nothing."""


def pack_pairs(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Put two 4-bit values of the last axis (of even length) into a byte, the first in its low half."""
    return values[..., ::2] | np.left_shift(values[..., 1::2], 4, dtype=np.uint8)


class Weights(Protocol):
    """A model's tensors, read when asked for, so that a builder never holds two copies of all."""

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def label(self) -> str:
        """Name the weight format for people ("int4 (Q4_1)", "bf16")."""
        ...

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The token that each logit of a row is for, where spec.draft_outputs; () where logit i is for token i."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a canonical name. Raises ModelRefused when the file lacks it."""
        ...
