"""What a GGUF file's head says of its model: the shape as a DecoderSpec, and that every tensor of it is there.

Nothing here reads weights, so that a file which cannot be served is refused in milliseconds, also while only its first
megabytes are here. Gemma 3 files leave some facts out; these are llama.cpp's (llama-model.cpp). Every sixth layer looks
at all tokens; the other layers have a rope of their own, unscaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapters.contract import ModelRefused
from adapters.decoder.gguf_blocks import can_read, type_name
from adapters.decoder.gguf_keys import (
    find_key,
    read_count,
    read_number,
    refuse_conversion,
    refuse_key,
    refuse_other_architectures,
    refuse_other_files,
    refuse_unread_keys,
)
from adapters.decoder.rope import RopeRefused, extend_context, rope_from
from adapters.decoder.spec import MOST_HEAD_DIM, MOST_LAYERS, DecoderSpec, NotConvertible, Rope
from adapters.gguf_header import GgufArray, GgufHeader, GgufTensor

ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3: what every frequency is divided by."""
# What files of Gemma 3 leave out, by llama.cpp's rules (ADR 0104).
_GEMMA_PERIOD, _GEMMA_LOCAL_BASE, _GEMMA_27B_LAYERS = 6, 10000.0, 62
# What a missing key means, by llama.cpp's rules (ADR 0104).
_DEFAULT_BASE, _DEFAULT_EPSILON = 10000.0, 1e-5
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


@dataclass(frozen=True, slots=True)
class _Family:
    """What the layers of an architecture have. `may_have_bias`: query, key and value of some of its files."""

    may_have_bias: bool = True
    qk_norm: bool = False
    post_norms: bool = False
    rope_factors: bool = True


_FAMILIES = {
    "llama": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(qk_norm=True),
    "gemma3": _Family(may_have_bias=False, qk_norm=True, post_norms=True, rope_factors=False),
}


def tensor_name(canonical: str) -> str:
    layer, _, rest = canonical.rpartition(".")
    return f"blk.{layer}.{_IN_LAYER[rest]}" if layer else _WHOLE[rest]


def read_gguf_spec(header: GgufHeader) -> DecoderSpec:
    """Return the shape of a file's model, without the values of `rope_freqs.weight`.

    Raises ModelRefused, by the key or the tensor: for a file that is no whole model or lacks a tensor, and for one of
    another shape. Raises NotConvertible for an architecture that is not supported, a key that would be passed over, and
    a tensor that is left over or of another type.
    """
    refuse_other_files(header)
    refuse_other_architectures(header)
    spec = _read_shape(header)
    _check_tensors(header, spec)
    return spec


def _read_shape(header: GgufHeader) -> DecoderSpec:
    family = header.text("general.architecture") or ""
    facts, tensors = _FAMILIES[family], {tensor.name: tensor for tensor in header.tensors}
    if read_count(header, f"{family}.expert_count", 0, least=0):
        raise refuse_conversion(header, f"{family}.expert_count", "it is a mixture of experts, which is not supported")
    layers = read_count(header, f"{family}.block_count", most=MOST_LAYERS)
    hidden = read_count(header, f"{family}.embedding_length")
    heads = read_count(header, f"{family}.attention.head_count")
    kv_heads = read_count(header, f"{family}.attention.head_count_kv", heads)
    if heads % kv_heads:
        raise refuse_key(header, f"{family}.attention.head_count_kv", f"{heads} heads cannot share {kv_heads}")
    head_dim = _read_head_dim(header, family, max(1, hidden // heads))
    rope, context = _read_rope(header, family, head_dim)
    epsilon = f"{family}.attention.layer_norm_rms_epsilon"
    spec = DecoderSpec(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=read_count(header, f"{family}.feed_forward_length"),
        vocabulary_size=read_vocabulary_size(header, tensors),
        context_length=context,
        norm_epsilon=read_number(header, epsilon, 0.0) or _DEFAULT_EPSILON,
        activation="silu",
        query_scale=1.0 / math.sqrt(head_dim),
        ropes=(rope,) * layers,
        windows=(read_count(header, f"{family}.attention.sliding_window", 0, least=0),) * layers,
        tied_embeddings=_WHOLE["head"] not in tensors,
        qkv_bias=facts.may_have_bias and "blk.0.attn_q.bias" in tensors,
        qk_norm=facts.qk_norm,
        post_norms=facts.post_norms,
    )
    spec = _as_gemma(header, spec) if family == "gemma3" else spec
    refuse_unread_keys(header, spec)
    return spec


def _read_head_dim(header: GgufHeader, family: str, default: int) -> int:
    """Return the size of the heads: one, for keys, values and what the rope turns."""
    key, value, turned = f"{family}.attention.key_length", f"{family}.attention.value_length", "rope.dimension_count"
    head_dim = read_count(header, key, default, most=MOST_HEAD_DIM)
    values = read_count(header, value, default)
    if values != head_dim:
        why = f"it is {values}, and {key} is {head_dim}: heads that differ in size are not supported"
        raise refuse_conversion(header, value, why)
    dimensions = read_count(header, f"{family}.{turned}", head_dim)
    if dimensions != head_dim or head_dim % 2:
        what = f"its rope turns {dimensions} dimensions, not the whole head of {head_dim}"
        raise refuse_conversion(
            header, f"{family}.{turned}", what if dimensions != head_dim else f"{what}, which is odd"
        )
    return head_dim


def read_vocabulary_size(header: GgufHeader, tensors: Mapping[str, GgufTensor]) -> int:
    """Return how many tokens a model knows. Raises ModelRefused where its embedding and its tokenizer differ."""
    embedding = _find_tensor(header, tensors, _WHOLE["embedding"])
    rows = embedding.shape[-1]
    tokens = header.length("tokenizer.ggml.tokens")
    if tokens is not None and tokens != rows:
        raise refuse_key(
            header, "tokenizer.ggml.tokens", f"it has {tokens} tokens and {embedding.name} has {rows} rows"
        )
    return rows


def _read_rope(header: GgufHeader, family: str, head_dim: int) -> tuple[Rope, int]:
    """Return the rope, and how many tokens the model reads.

    llama.cpp's rules: a scaling without a type is linear, and `rope.scale_linear` is its factor in old files.
    """
    at = f"{family}.rope.scaling."
    kind = header.text(f"{at}type") or "linear"
    if kind not in ("none", "linear", "yarn") or (kind == "yarn" and family == "gemma3"):
        supported = "none and linear" if family == "gemma3" else "none, linear, yarn and Llama 3's factors"
        raise refuse_conversion(header, f"{at}type", f"its rope is scaled by {kind!r}; supported are {supported}")
    given = f"{at}factor" if f"{at}factor" in header.metadata else f"{family}.rope.scale_linear"
    factor = read_number(header, given, 0.0) or 1.0
    trained = read_count(header, f"{family}.context_length")
    original = read_count(header, f"{at}original_context_length", 0, least=0) or trained
    base = read_number(header, find_key(header, family, "rope.freq_base"), _DEFAULT_BASE)
    parameters: dict[str, Any] = {"rope_theta": base, "rope_type": "default" if kind == "none" else kind}
    parameters |= {"factor": factor, "original_max_position_embeddings": original}
    try:
        rope = rope_from(parameters, head_dim)
        context = extend_context(parameters, trained)
    except RopeRefused as error:
        raise refuse_key(header, f"{family}.rope", str(error)) from error
    attention_factor = read_number(header, f"{at}attn_factor", 0.0) or 1.0
    if attention_factor != 1.0 and family == "gemma3":
        raise refuse_conversion(header, f"{at}attn_factor", "it is not supported where ropes differ by layer")
    rope = replace(rope, magnitude=rope.magnitude * attention_factor)
    return rope, context


def _as_gemma(header: GgufHeader, spec: DecoderSpec) -> DecoderSpec:
    """Add what every Gemma 3 model has and its file need not say."""
    base = read_number(header, find_key(header, "gemma3", "rope.freq_base_swa"), _GEMMA_LOCAL_BASE)
    local = rope_from({"rope_theta": base, "rope_type": "default"}, spec.head_dim)
    sliding = _read_sliding_layers(header, spec)
    query_dim = spec.hidden // spec.heads if spec.layers == _GEMMA_27B_LAYERS else spec.head_dim
    return replace(
        spec,
        activation="gelu_tanh",
        query_scale=1.0 / math.sqrt(query_dim),
        ropes=tuple(local if slides else rope for slides, rope in zip(sliding, spec.ropes, strict=True)),
        windows=tuple(window if slides else 0 for slides, window in zip(sliding, spec.windows, strict=True)),
        embedding_scale=math.sqrt(spec.hidden),
        logit_softcap=read_number(header, "gemma3.final_logit_softcapping", 0.0),
    )


def _read_sliding_layers(header: GgufHeader, spec: DecoderSpec) -> list[bool]:
    """Return which layers have the window: by a period, as llama.cpp counts, or by a list with a word for each."""
    key = "gemma3.attention.sliding_window_pattern"
    if not any(spec.windows):
        return [False] * spec.layers
    if isinstance(header.metadata.get(key), GgufArray):
        named = header.flags(key) or []
        if len(named) != spec.layers:
            raise refuse_key(header, key, f"it names {len(named)} layers, and there are {spec.layers}")
        return named
    period = read_count(header, key, _GEMMA_PERIOD, least=0)
    return [period == 0 or layer % period < period - 1 for layer in range(spec.layers)]


def _check_tensors(header: GgufHeader, spec: DecoderSpec) -> None:
    """See that each tensor of the spec is there, of its shape, in a type that can be read, and that there is no other:
    one that nobody reads changes what the model computes."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    known = {tensor_name(canonical): spec.shape_of(canonical) for canonical in spec.list_tensors()}
    if ROPE_FACTORS in tensors and _FAMILIES[spec.family].rope_factors:
        known[ROPE_FACTORS] = (spec.head_dim // 2,)
    for name, shape in known.items():
        stored = _find_tensor(header, tensors, name)
        if stored.shape[::-1] != shape:
            raise _refuse_tensor(stored.path, f"{name} has the shape {stored.shape[::-1]}, not {shape}")
        if not can_read(stored.kind, len(shape)):
            what = f"{name} is of the type {type_name(stored.kind)}, which cannot be read here"
            raise NotConvertible(_describe_tensor(stored.path, what))
    unread = next((tensor for name, tensor in tensors.items() if name not in known), None)
    if unread:
        what = f"it has the tensor {unread.name}, which a {spec.family} model does not have here"
        raise NotConvertible(_describe_tensor(unread.path, what))


def _find_tensor(header: GgufHeader, tensors: Mapping[str, GgufTensor], name: str) -> GgufTensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise _refuse_tensor(header.path, f"it lacks the tensor {name}")
    return tensor


def _refuse_tensor(file: Path, reason: str) -> ModelRefused:
    return ModelRefused(_describe_tensor(file, reason))


def _describe_tensor(file: Path, reason: str) -> str:
    return f"{file.name}: {reason}. Convert the model again, or choose another one."
