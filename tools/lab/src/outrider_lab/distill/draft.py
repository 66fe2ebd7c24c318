"""The draft in torch: a Llama decoder under Hugging Face's names; its output layer has a part of the vocabulary."""

# torch's types are not installed everywhere, so its classes are Any to mypy.
# mypy: disable-error-code="misc"

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ROPE_THETA = 10_000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in elements. `vocabulary_size` tokens go in, `outputs` of them can come out."""

    vocabulary_size: int
    outputs: int
    hidden: int = 192
    layers: int = 2
    heads: int = 6
    kv_heads: int = 3
    mlp: int = 512

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads

    def config(self, context_length: int) -> dict[str, Any]:
        """Return what a config.json says of it, in Hugging Face's and EAGLE-3's words."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocabulary_size,
            "draft_vocab_size": self.outputs,
            "max_position_embeddings": context_length,
            "rms_norm_eps": NORM_EPSILON,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
        }

    def values(self) -> dict[str, int]:
        return asdict(self)


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, NORM_EPSILON)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, _ = hidden.shape
        size = self.shape.head_dim
        query, key, value = (
            made(hidden).view(batch, length, -1, size).transpose(1, 2)
            for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, turns), _rotate(key, turns)
        groups = self.shape.heads // self.shape.kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class _Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(shape), _Mlp(shape)
        self.input_layernorm, self.post_attention_layernorm = _Norm(shape.hidden), _Norm(shape.hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = hidden + self.drop(self.self_attn(self.input_layernorm(hidden), turns))
        return hidden + self.drop(self.mlp(self.post_attention_layernorm(hidden)))


class _Body(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary_size, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = _Norm(shape.hidden)


class Draft(nn.Module):
    """Logits of the next token, over the outputs. `dropout` is the share dropped of what a layer adds, in training."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Body(shape, dropout)
        self.lm_head = nn.Linear(shape.hidden, shape.outputs, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02 if "proj" not in name else 1.0 / math.sqrt(weight.shape[1]))
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)  # a layer begins by changing nothing

    def compute_hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the normed last hidden states, shape (batch, length, hidden), of tokens (batch, length)."""
        turns = _turns(tokens.shape[1], self.shape.head_dim)
        hidden = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden, turns)
        return self.model.norm(hidden)


def _turns(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of rotate-half position embedding, both (length, size)."""
    frequencies = ROPE_THETA ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    twice = torch.cat([angles, angles], dim=-1)
    return twice.cos(), twice.sin()


def _rotate(part: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = part.chunk(2, dim=-1)
    return part * turns[0].to(part.dtype) + torch.cat([-second, first], dim=-1) * turns[1].to(part.dtype)
