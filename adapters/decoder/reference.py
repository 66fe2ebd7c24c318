"""A decoder in plain numpy float32, written from the formulas: what a model says before any number format changed it.

RMS norm arXiv 1910.07467, rotary embedding 2104.09864 (rotate-half), grouped-query attention 2305.13245,
SwiGLU 2002.05202, tanh GELU 1606.08415, soft caps and post norms 2408.00118 (Gemma 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.spec import Rope, Weights

Rows = NDArray[np.float32]


@dataclass(slots=True)
class TextCache:
    """The keys and values of one text so far, for each layer: (kv_heads, positions, head_dim)."""

    keys: dict[int, Rows] = field(default_factory=dict)
    values: dict[int, Rows] = field(default_factory=dict)
    held: int = 0


class Reference:
    """Runs several texts at a time. All weights are kept in float32: four bytes for each of them."""

    def __init__(self, weights: Weights) -> None:
        self.spec = weights.spec
        self._weights = weights
        self._kept: dict[str, Rows] = {}

    def extend(self, texts: Sequence[TextCache], tokens: Sequence[Sequence[int]]) -> list[Rows]:
        """Append tokens to each text and return their logits, (tokens, vocabulary) for each."""
        spec = self.spec
        counts = [len(new) for new in tokens]
        cuts = np.cumsum(counts)[:-1]
        hidden = self._tensor("embedding")[np.concatenate([np.asarray(new) for new in tokens])]
        hidden = hidden * np.float32(spec.embedding_scale)
        for layer in range(spec.layers):
            normed = self._norm(hidden, f"{layer}.attention_norm")
            attended = self._attention(normed, layer, texts, cuts)
            hidden = hidden + (self._norm(attended, f"{layer}.post_attention_norm") if spec.post_norms else attended)
            mlp = self._mlp(self._norm(hidden, f"{layer}.mlp_norm"), layer)
            hidden = hidden + (self._norm(mlp, f"{layer}.post_mlp_norm") if spec.post_norms else mlp)
        for text, count in zip(texts, counts, strict=True):
            text.held += count
        head = self._tensor(spec.head_name)
        logits = _softcap(self._norm(hidden, "final_norm") @ head.T, spec.logit_softcap)
        return [np.asarray(part, np.float32) for part in np.split(logits, cuts)]

    def _tensor(self, name: str) -> Rows:
        if name not in self._kept:
            self._kept[name] = self._weights.tensor(name).float32()
        return self._kept[name]

    def _norm(self, rows: Rows, name: str) -> Rows:
        mean = np.mean(rows * rows, -1, keepdims=True, dtype=np.float32)
        return np.asarray(rows / np.sqrt(mean + np.float32(self.spec.norm_epsilon)) * self._tensor(name), np.float32)

    def _mlp(self, rows: Rows, layer: int) -> Rows:
        gate = rows @ self._tensor(f"{layer}.gate").T
        if self.spec.activation == "silu":
            active = gate / (1 + np.exp(-gate))
        else:
            inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
            active = np.float32(0.5) * gate * (1 + np.tanh(inner))
        return np.asarray((active * (rows @ self._tensor(f"{layer}.up").T)) @ self._tensor(f"{layer}.down").T)

    def _attention(self, rows: Rows, layer: int, texts: Sequence[TextCache], cuts: NDArray[np.intp]) -> Rows:
        spec = self.spec
        query, key, value = (
            np.split(self._heads(rows, layer, role, count), cuts)
            for role, count in (("query", spec.heads), ("key", spec.kv_heads), ("value", spec.kv_heads))
        )
        mixed = [
            self._attend(text, layer, *(part[index].transpose(1, 0, 2) for part in (query, key, value)))
            for index, text in enumerate(texts)
        ]
        return np.asarray(np.concatenate(mixed) @ self._tensor(f"{layer}.output").T)

    def _heads(self, rows: Rows, layer: int, role: str, heads: int) -> Rows:
        spec = self.spec
        projected = rows @ self._tensor(f"{layer}.{role}").T
        if spec.qkv_bias:
            projected = projected + self._tensor(f"{layer}.{role}_bias")
        projected = projected.reshape(len(rows), heads, spec.head_dim)
        if spec.qk_norm and role != "value":
            projected = self._norm(projected, f"{layer}.{role}_norm")
        return projected

    def _attend(self, text: TextCache, layer: int, query: Rows, key: Rows, value: Rows) -> Rows:
        spec, rope, count = self.spec, self.spec.ropes[layer], query.shape[1]
        query, key = _rotate(query, rope, text.held), _rotate(key, rope, text.held)
        if text.held:
            key = np.concatenate([text.keys[layer], key], 1)
            value = np.concatenate([text.values[layer], value], 1)
        text.keys[layer], text.values[layer] = key, value
        shared = spec.heads // spec.kv_heads
        keys, values = np.repeat(key, shared, 0), np.repeat(value, shared, 0)
        scores = _softcap(query @ keys.transpose(0, 2, 1) * np.float32(spec.query_scale), spec.attention_softcap)
        behind = text.held + np.arange(count)[:, None] - np.arange(key.shape[1])[None, :]
        window = spec.windows[layer]
        scores[:, (behind < 0) | ((behind >= window) if window else False)] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (share / share.sum(-1, keepdims=True)) @ values
        return np.asarray(mixed.transpose(1, 0, 2).reshape(count, -1))


def _rotate(rows: Rows, rope: Rope, start: int) -> Rows:
    angles = (start + np.arange(rows.shape[1]))[:, None] * np.array(rope.inverse_frequencies)[None, :]
    cos, sin = (np.tile(part * rope.magnitude, 2).astype(np.float32) for part in (np.cos(angles), np.sin(angles)))
    first, second = np.split(rows, 2, axis=-1)
    return np.asarray(rows * cos + np.concatenate([-second, first], -1) * sin)


def _softcap(rows: Rows, cap: float) -> Rows:
    return np.asarray(np.float32(cap) * np.tanh(rows / np.float32(cap))) if cap else rows
