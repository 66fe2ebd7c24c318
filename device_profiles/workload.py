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

    name: str
    architecture: str
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


def vocabulary_fingerprint(tokens: Iterable[str]) -> str:
    """Return a digest of a vocabulary in id order (16 hex digits)."""
    digest = hashlib.blake2b(digest_size=8)
    for token in tokens:
        piece = token.encode("utf-8", "surrogatepass")
        digest.update(len(piece).to_bytes(4, "little"))
        digest.update(piece)
    return digest.hexdigest()
