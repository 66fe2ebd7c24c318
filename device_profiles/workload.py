"""What a model is, as far as placing and running it goes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder model.

    `bytes_per_token` is the KV cache's cost of one position over all layers, at the loaded KV precision.
    `vocabulary_fingerprint` is equal for two models exactly when every token id means the same bytes. `output_ids`: a
    draft may be able to say a part of the vocabulary only; logit i of its rows is then for token output_ids[i]. Where
    it is empty, logit i is for token i.
    """

    layers: int
    vocabulary_size: int
    context_length: int
    bytes_per_token: int
    vocabulary_fingerprint: str
    output_ids: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """How many logits a row has."""
        return len(self.output_ids) or self.vocabulary_size


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder, in elements, as far as cost and memory depend on them.

    `layer_elements`: weights of one layer, on average; `end_elements`: of embedding and output layer together.
    `read_elements`: those that a forward of one row reads: of the embedding one row, of experts those that are used.
    `kv_elements`: of the KV cache of one position, over all layers; `attention_elements`: of all heads' queries.
    """

    layers: int
    hidden: int
    mlp: int
    vocabulary: int
    layer_elements: int
    end_elements: int
    read_elements: int
    kv_elements: int
    attention_elements: int

    @classmethod
    def dense(
        cls,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        mlp: int,
        vocabulary: int,
        *,
        tied_embeddings: bool = False,
    ) -> DecoderShape:
        """Return the shape of a decoder whose layers have query, key, value and output, and a gated MLP."""
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        layer_elements, head = attention + 3 * hidden * mlp, vocabulary * hidden
        return cls(
            layers,
            hidden,
            mlp,
            vocabulary,
            layer_elements,
            end_elements=head * (1 if tied_embeddings else 2),
            read_elements=layers * layer_elements + head,
            kv_elements=2 * layers * kv_heads * head_dim,
            attention_elements=layers * heads * head_dim,
        )

    @property
    def elements(self) -> int:
        return self.layers * self.layer_elements + self.end_elements

    @property
    def head_elements(self) -> int:
        """What the worker with the last layer holds beside it."""
        return min(self.end_elements, self.vocabulary * self.hidden)

    @property
    def embedding_elements(self) -> int:
        """What the worker with the first layer holds beside it. Where it is the output layer too, both have it."""
        return self.end_elements - self.head_elements or self.head_elements

    @property
    def flops_per_row(self) -> float:
        """Operations of one row: a multiplication and an addition for each weight that it meets."""
        return 2.0 * self.read_elements

    @property
    def attention_flops(self) -> float:
        """Operations of one row for each position before it: a product with its key, and one with its value."""
        return 4.0 * self.attention_elements


def vocabulary_fingerprint(tokens: Iterable[str]) -> str:
    """Return a digest of a vocabulary in id order (16 hex digits)."""
    digest = hashlib.blake2b(digest_size=8)
    for token in tokens:
        piece = token.encode("utf-8", "surrogatepass")
        digest.update(len(piece).to_bytes(4, "little"))
        digest.update(piece)
    return digest.hexdigest()
