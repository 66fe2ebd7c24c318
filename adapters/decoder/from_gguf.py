"""Reads a GGUF file of a Llama, Qwen2, Qwen3 or Gemma 3 model as `Weights`. Formats: adapters/decoder/gguf_blocks.py.

Llama files store query and key rows interleaved, for llama.cpp's rope; they are put back in rotate-half order. Gemma 3
files leave some facts out; these are fixed in llama.cpp (llama-model.cpp). Every sixth layer looks at all tokens; the
other layers have a rope of their own, unscaled. Norms are stored as the factor that is multiplied with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ModelRefused
from adapters.decoder.gguf_blocks import (
    KEPT,
    ROUNDED,
    exact_matrix,
    label_of,
    matrix,
    matrix_in_8_bits,
    matrix_with_whole_zeros,
    vector,
)
from adapters.decoder.rope import rope_from
from adapters.decoder.spec import DecoderSpec, Dense, Grouped, Rope, Tensor
from adapters.gguf_header import GgufHeader, GgufTensor, read_header

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
_GEMMA_PERIOD, _GEMMA_LOCAL_BASE, _GEMMA_27B_LAYERS = 6, 10000.0, 62
_WHOLE = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_IN_LAYER = {
    "attention_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "query_bias": "attn_q.bias",
    "key_bias": "attn_k.bias",
    "value_bias": "attn_v.bias",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
    "output": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_attention_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3: what every frequency is divided by
_INTERLEAVED = ("query", "key", "query_bias", "key_bias")


Values = Literal["kept", "whole zeros", "8 bits", "exact"]
_READERS = {
    "kept": matrix,
    "whole zeros": matrix_with_whole_zeros,
    "8 bits": matrix_in_8_bits,
    "exact": exact_matrix,
}


class GgufWeights:
    """The weights of one file; a tensor is read when asked for.

    `values`: "kept" as the file has them, 4-bit formats in 4 bits with "whole zeros", all quantised matrices in
    "8 bits", or all "exact", in full.
    """

    def __init__(self, path: Path, values: Values = "kept") -> None:
        """Read the head. Raises ModelRefused for a damaged file, or a model that the spec cannot describe."""
        self._matrix = _READERS[values]
        self._header = read_header(path)
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}
        self._data: NDArray[np.uint8] = np.memmap(path, np.uint8, "r", self._header.data_offset)
        self.spec = self._read_spec()
        self._refuse_unread()
        self.stored = _largest(self._header)
        self.label = label_of(self.stored, self._list_rounded_kinds() if values == "whole zeros" else ())
        self.output_ids: tuple[int, ...] = ()

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a canonical name. Raises ModelRefused when the file lacks it or its shape is off."""
        layer, _, rest = name.rpartition(".")
        stored = self._find_tensor(f"blk.{layer}.{_IN_LAYER[rest]}" if layer else _WHOLE[rest])
        expected = self.spec.shape_of(name)
        if stored.shape[::-1] != expected:
            raise self._build_refusal(f"{stored.name} has the shape {stored.shape[::-1]}, not {expected}")
        found = self._decode_tensor(stored)
        if self.spec.family == "llama" and rest in _INTERLEAVED:
            return _rotate_half(found, self.spec.heads if "query" in rest else self.spec.kv_heads)
        return found

    def _list_rounded_kinds(self) -> list[int]:
        return sorted({tensor.kind for tensor in self._header.tensors if tensor.kind in ROUNDED})

    @property
    def held_bytes(self) -> int:
        """Return what the tensors take as "kept": more than in the file where 8 bits hold fewer."""
        return sum(_count_held_bytes(tensor) for tensor in self._header.tensors)

    def _decode_tensor(self, stored: GgufTensor) -> Tensor:
        raw = self._data[stored.offset : stored.offset + stored.size]
        try:
            if len(stored.shape) == 1:
                return Dense(vector(stored.kind, raw))
            return self._matrix(stored.kind, raw, stored.shape[1])
        except (ModelRefused, KeyError) as error:
            raise self._build_refusal(f"{stored.name}: {error}") from error

    def _find_tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise self._build_refusal(f"it lacks the tensor {name}")
        return self._tensors[name]

    def _build_refusal(self, reason: str) -> ModelRefused:
        return ModelRefused(f"{self._header.path.name}: {reason}. Convert the model again, or choose another one.")

    def _read_spec(self) -> DecoderSpec:
        header = self._header
        family = header.text("general.architecture") or ""
        if family not in ARCHITECTURES:
            raise self._build_refusal(f"the architecture {family!r} is not one of {', '.join(ARCHITECTURES)}")
        self._refuse_variants(family)
        layers, hidden = self._count(f"{family}.block_count"), self._count(f"{family}.embedding_length")
        heads = self._count(f"{family}.attention.head_count")
        head_dim = header.integer(f"{family}.attention.key_length") or hidden // heads
        rope = self._rope(family, head_dim)
        spec = DecoderSpec(
            family=family,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=header.integer(f"{family}.attention.head_count_kv") or heads,
            head_dim=head_dim,
            mlp=self._count(f"{family}.feed_forward_length"),
            vocabulary_size=self._find_tensor("token_embd.weight").shape[-1],
            context_length=self._count(f"{family}.context_length"),
            norm_epsilon=self._number(f"{family}.attention.layer_norm_rms_epsilon", 0.0) or 1e-5,
            activation="silu",
            query_scale=1.0 / math.sqrt(head_dim),
            ropes=(rope,) * layers,
            windows=(header.integer(f"{family}.attention.sliding_window") or 0,) * layers,
            tied_embeddings="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            post_norms="blk.0.post_attention_norm.weight" in self._tensors,
        )
        return _as_gemma(spec) if family == "gemma3" else spec

    def _refuse_variants(self, family: str) -> None:
        """Refuse what the spec has no words for: experts, a rope over a part of the head, unequal heads."""
        header = self._header
        if (header.integer(f"{family}.expert_count") or 0) > 0:
            raise self._build_refusal("it is a mixture of experts, which is not supported")
        width = header.integer(f"{family}.attention.key_length")
        turned = header.integer(f"{family}.rope.dimension_count")
        if width != header.integer(f"{family}.attention.value_length"):
            raise self._build_refusal("its key and value heads differ in size, which is not supported")
        hidden, heads = self._count(f"{family}.embedding_length"), self._count(f"{family}.attention.head_count")
        if turned not in (None, width or hidden // heads):
            raise self._build_refusal(f"its rope turns {turned} dimensions, not the whole head")

    def _refuse_unread(self) -> None:
        """A tensor that nobody would read changes what the model computes: refuse the file by the tensor's name."""
        known = {*_WHOLE.values(), _ROPE_FACTORS}
        known.update(f"blk.{layer}.{name}" for layer in range(self.spec.layers) for name in _IN_LAYER.values())
        unread = [name for name in self._tensors if name not in known]
        if unread:
            raise self._build_refusal(
                f"it has the tensor {unread[0]}, which a {self.spec.family} model does not have here"
            )

    def _rope(self, family: str, head_dim: int) -> Rope:
        base = self._number(f"{family}.rope.freq_base", 10000.0)
        kind = self._header.text(f"{family}.rope.scaling.type") or "none"
        if kind not in ("none", "linear"):
            raise self._build_refusal(
                f"its rope is scaled by {kind!r}; supported are none, linear and Llama 3's factors"
            )
        parameters = {"rope_theta": base, "rope_type": "default"}
        if kind == "linear":
            parameters |= {"rope_type": "linear", "factor": self._number(f"{family}.rope.scaling.factor", 1.0)}
        rope = rope_from(parameters, head_dim)
        if _ROPE_FACTORS not in self._tensors:
            return rope
        factors = self._decode_tensor(self._tensors[_ROPE_FACTORS])
        assert isinstance(factors, Dense)  # noqa: S101  # one axis is never grouped
        return Rope(tuple((np.array(rope.inverse_frequencies) / factors.values).tolist()))

    def _count(self, key: str) -> int:
        value = self._header.integer(key)
        if value is None or value < 1:
            raise self._build_refusal(f"it lacks a positive {key}")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._header.metadata.get(key, default)
        if (isinstance(value, (int, float)) and value > 0) or value == default:
            return float(value)
        raise self._build_refusal(f"{key} is no positive number")


def _as_gemma(spec: DecoderSpec) -> DecoderSpec:
    """Add what every Gemma 3 model has and its file does not say."""
    local = rope_from({"rope_theta": _GEMMA_LOCAL_BASE, "rope_type": "default"}, spec.head_dim)
    sliding = [(layer + 1) % _GEMMA_PERIOD != 0 for layer in range(spec.layers)]
    query_dim = spec.hidden // spec.heads if spec.layers == _GEMMA_27B_LAYERS else spec.head_dim
    return replace(
        spec,
        activation="gelu_tanh",
        query_scale=1.0 / math.sqrt(query_dim),
        ropes=tuple(local if slides else rope for slides, rope in zip(sliding, spec.ropes, strict=True)),
        windows=tuple(window if slides else 0 for slides, window in zip(sliding, spec.windows, strict=True)),
        embedding_scale=math.sqrt(spec.hidden),
    )


def _rotate_half(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from interleaved pairs (0, half, 1, half + 1, ...) to halves."""

    def reorder_rows(rows: NDArray[Any]) -> NDArray[Any]:
        split = rows.reshape(heads, -1, 2, *rows.shape[1:])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)

    if isinstance(tensor, Dense):
        return Dense(reorder_rows(tensor.values), tensor.bfloat16)
    values, scales, zeros = (reorder_rows(part) for part in (tensor.values, tensor.scales, tensor.zeros))
    return Grouped(values, scales, zeros, tensor.bits, tensor.group_size)


def _count_held_bytes(tensor: GgufTensor) -> int:
    if len(tensor.shape) == 1 or tensor.kind in KEPT:
        return tensor.size
    return math.prod(tensor.shape) * 9 // 8  # 8 bits, and a scale of 16 bits for 32 values, rounded up


def _largest(header: GgufHeader) -> int:
    """Return the tensor type that holds most of the matrices' elements."""
    sizes: dict[int, int] = {}
    for kind, elements in _matrices(header):
        sizes[kind] = sizes.get(kind, 0) + elements
    if not sizes:
        raise ModelRefused(f"{header.path.name}: it holds no matrices. Choose the model's file.")
    return max(sizes, key=sizes.__getitem__)


def _matrices(header: GgufHeader) -> Iterator[tuple[int, int]]:
    """Yield (type, elements) of the layers' matrices; of all matrices where there are no layers'."""
    for tensor in header.tensors:
        if len(tensor.shape) == 2 and tensor.name.startswith("blk."):
            yield tensor.kind, math.prod(tensor.shape)
