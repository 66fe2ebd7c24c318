"""A decoder in plain numpy float32, written from the formulas, to compare runtimes with.

RMS norm arXiv 1910.07467, rotary embedding 2104.09864 (rotate-half), grouped-query attention 2305.13245,
SwiGLU 2002.05202, tanh GELU 1606.08415, soft caps and post norms 2408.00118 (Gemma 2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.spec import DecoderSpec, Grouped, Rope, Tensor, Weights

Rows = NDArray[np.floating]


def logits(weights: Weights, tokens: Sequence[int]) -> Rows:
    """Return the logits of every position, shape (tokens, vocabulary)."""
    spec = weights.spec

    def w(name: str) -> Rows:
        return plain(weights, name)

    hidden: Rows = w("embedding")[list(tokens)] * np.float32(spec.embedding_scale)
    for layer in range(spec.layers):
        attended = _attention(weights, _norm(hidden, w(f"{layer}.attention_norm"), spec), layer)
        hidden = hidden + (_norm(attended, w(f"{layer}.post_attention_norm"), spec) if spec.post_norms else attended)
        inner = _norm(hidden, w(f"{layer}.mlp_norm"), spec)
        mlp = (_active(inner @ w(f"{layer}.gate").T, spec) * (inner @ w(f"{layer}.up").T)) @ w(f"{layer}.down").T
        hidden = hidden + (_norm(mlp, w(f"{layer}.post_mlp_norm"), spec) if spec.post_norms else mlp)
    out = _norm(hidden, w("final_norm"), spec) @ w("embedding" if spec.tied_embeddings else "head").T
    return _softcap(out, spec.logit_softcap)


def plain(weights: Weights, name: str) -> Rows:
    """Return one tensor as float32."""
    return plain_values(weights.tensor(name))


def plain_values(tensor: Tensor) -> Rows:
    """Return a tensor's values as float32."""
    if isinstance(tensor, Grouped):
        shape = (*tensor.scales.shape, tensor.group_size)
        values = tensor.values.reshape(shape).astype(np.float32) - tensor.zeros[..., None].astype(np.float32)
        return (values * tensor.scales[..., None].astype(np.float32)).reshape(tensor.values.shape)
    if tensor.bfloat16:
        return (tensor.values.astype(np.uint32) << 16).view(np.float32)
    return tensor.values.astype(np.float32)


def _attention(weights: Weights, hidden: Rows, layer: int) -> Rows:
    spec, count = weights.spec, len(hidden)

    def heads(role: str, number: int) -> Rows:
        rows: Rows = hidden @ plain(weights, f"{layer}.{role}").T
        if spec.qkv_bias:
            rows = rows + plain(weights, f"{layer}.{role}_bias")
        rows = rows.reshape(count, number, spec.head_dim)
        if spec.qk_norm and role != "value":
            rows = _norm(rows, plain(weights, f"{layer}.{role}_norm"), spec)
        return rows.transpose(1, 0, 2) if role == "value" else _rotate(rows.transpose(1, 0, 2), spec.ropes[layer])

    query = heads("query", spec.heads)
    key, value = (np.repeat(heads(role, spec.kv_heads), spec.heads // spec.kv_heads, 0) for role in ("key", "value"))
    scores = _softcap(query @ key.transpose(0, 2, 1) * np.float32(spec.query_scale), spec.attention_softcap)
    behind = np.arange(count)[:, None] - np.arange(count)[None, :]
    window = spec.windows[layer]
    seen: NDArray[np.bool_] = (behind >= 0) & ((behind < window) if window else True)
    scores[:, ~seen] = -np.inf
    share = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (share / share.sum(-1, keepdims=True)) @ value
    return mixed.transpose(1, 0, 2).reshape(count, -1) @ plain(weights, f"{layer}.output").T


def _rotate(rows: Rows, rope: Rope) -> Rows:
    angles = np.arange(rows.shape[1])[:, None] * np.array(rope.inverse_frequencies)[None, :]
    cos, sin = (np.tile(part * rope.magnitude, 2).astype(np.float32) for part in (np.cos(angles), np.sin(angles)))
    first, second = np.split(rows, 2, axis=-1)
    return rows * cos + np.concatenate([-second, first], -1) * sin


def _norm(rows: Rows, weight: Rows, spec: DecoderSpec) -> Rows:
    mean = np.mean(rows * rows, -1, keepdims=True, dtype=np.float32)
    return rows / np.sqrt(mean + np.float32(spec.norm_epsilon)) * weight


def _active(rows: Rows, spec: DecoderSpec) -> Rows:
    if spec.activation == "silu":
        return rows / (1 + np.exp(-rows))
    return 0.5 * rows * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (rows + np.float32(0.044715) * rows**3)))


def _softcap(rows: Rows, cap: float) -> Rows:
    return np.float32(cap) * np.tanh(rows / np.float32(cap)) if cap else rows
