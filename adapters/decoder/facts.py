"""A decoder that only a library computes, as its files describe it: sizes, and what it remembers of a text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from adapters.contract import LayerRange

STATE_VALUE_BYTES: Final = 4
"""Of a value of a state: llama.cpp holds them in float32."""


class Memory(StrEnum):
    """What a model remembers of a text. A KV cache can be cut at any position; a state is one of the whole text."""

    KV_CACHE = "kv_cache"
    HYBRID = "hybrid"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What all decoders say of themselves that are run as their files are; sizes as in
    `adapters.decoder.spec.DecoderSizes`.

    `embedding_elements`: weights outside the layers, but for a head of its own, which has `head_elements`. `stored`:
    what the format of most weights is called. `draft_outputs` is 0: such files say all tokens."""

    whole: ClassVar[str] = ""
    fixed_formats: ClassVar[bool] = False
    linked_bytes: ClassVar[int | None] = None
    """What is prepared of one takes at the most, where it is links to its files; None where nothing is linked."""

    family: str
    layers: int
    hidden: int
    heads: int
    mlp: int
    vocabulary_size: int
    context_length: int
    embedding_elements: int
    head_elements: int
    stored: str
    draft_outputs: int = 0

    @property
    def outputs(self) -> int:
        """How many logits a row has."""
        return self.vocabulary_size

    @property
    def all_layers(self) -> LayerRange:
        return LayerRange(0, self.layers)

    @property
    def matrix_elements(self) -> int:
        """How many weights the matrices have together."""
        return self.count_elements(self.all_layers)

    def count_elements(self, layers: LayerRange) -> int:
        first, last = layers.first == 0, layers.end == self.layers
        ends = self.embedding_elements if first or (last and not self.head_elements) else 0
        return ends + (self.head_elements if last else 0) + self.count_layer_elements(layers)

    def count_layer_elements(self, layers: LayerRange) -> int:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFacts(FileFacts):
    """A decoder as its files describe it. Lists have an entry for each layer, without layers that only draft
    (multi-token prediction).

    `kv_heads`, `key_lengths` and `value_lengths`: how many keys a layer keeps of a position, and the elements of a key
    and of a value; all 0 in a layer that keeps none of its own. With latent attention values are a part of keys, and
    their length is 0. `state_elements`: of a layer and a text.

    `layer_elements`: weights of the layer's matrices; `layer_reads`: those that one row meets, fewer where there are
    experts. `weights_bytes`: of the files."""

    memory: Memory
    kv_heads: tuple[int, ...]
    key_lengths: tuple[int, ...]
    value_lengths: tuple[int, ...]
    state_elements: tuple[int, ...]
    layer_elements: tuple[int, ...]
    layer_reads: tuple[int, ...]
    weights_bytes: int

    @property
    def cuts_anywhere(self) -> bool:
        return self.memory is Memory.KV_CACHE

    @property
    def state_bytes(self) -> int:
        """What a text takes beside its KV cache, however long it is."""
        return STATE_VALUE_BYTES * sum(self.state_elements)

    @property
    def read_elements(self) -> int:
        """How many weights a forward of one row reads."""
        return sum(self.layer_reads) + self.vocabulary_size * self.hidden

    @property
    def attention_elements(self) -> int:
        """The elements of all heads' queries, over all layers: of a row's products with a position."""
        sizes = zip(self.kv_heads, self.key_lengths, strict=True)
        return sum(self.heads * length for kv_heads, length in sizes if kv_heads)

    def count_layer_elements(self, layers: LayerRange) -> int:
        return sum(self.layer_elements[layers.first : layers.end])

    def count_kv_elements(self, layers: LayerRange) -> int:
        each = zip(self.kv_heads, self.key_lengths, self.value_lengths, strict=True)
        return sum(heads * (key + value) for heads, key, value in list(each)[layers.first : layers.end])
