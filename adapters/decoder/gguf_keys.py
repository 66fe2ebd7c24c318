"""Which metadata keys of a GGUF file say how its model computes, and that none of them is passed over.

llama.cpp reads what changes a computation under the architecture's own name (`llama.rope.freq_base`). Each such key is
either read by `gguf_spec`, or known to change nothing, or known to change nothing at some values, or refused by name.
Keys of other names describe the file, its tokenizer or its training.
"""

from __future__ import annotations

import math

from adapters.contract import ModelRefused
from adapters.decoder.spec import MOST_COUNT, DecoderSpec, NotConvertible
from adapters.gguf_header import GgufArray, GgufHeader, Scalar

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
KINDS = {
    "adapter": "a LoRA adapter, which changes another model. Merge it into that model",
    "mmproj": "the part of a model that sees pictures. Choose the file with the text model",
    "clip-vision": "the part of a model that sees pictures. Choose the file with the text model",
    "imatrix": "statistics for quantising, and no model. Choose the model's file",
    "vocab": "a vocabulary without a model. Choose the model's file",
}
"""What `general.type` calls files that are no whole models."""
_READ = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "expert_count"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "vocab_size"),
        *("rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        "rope.scaling.attn_factor",
    }
)
_READ_BY_FAMILY = {
    "gemma3": frozenset(
        {
            *("rope.freq_base_swa", "final_logit_softcapping", "attention.sliding_window_pattern"),
            *("rope.global.freq_base", "rope.local.freq_base"),
        }
    ),
}
_ALIASES = {"rope.freq_base": "rope.global.freq_base", "rope.freq_base_swa": "rope.local.freq_base"}
"""What Ollama's converter calls some keys of Gemma 3."""
_OF_EXPERTS = frozenset(
    {
        *("expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count"),
        *("expert_weights_scale", "expert_weights_norm", "expert_gating_func", "leading_dense_block_count"),
        *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    }
)
"""How experts are chosen and mixed: nothing where there are none, and files with some are refused before."""
_HARMLESS = _OF_EXPERTS | {"rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}
"""`pooling_type` says how embeddings are made of what is computed."""
_HARMLESS_PREFIXES = {"gemma3": ("mm.", "vision.")}
"""Of the half that sees pictures, which text files name, too. Its tensors are refused where they are there."""
_HEADS_OF_SLIDING = frozenset({"rope.dimension_count_swa", "attention.key_length_swa", "attention.value_length_swa"})
_SAME_SCALE = 1e-6  # files hold it in float32. Bounded by float32's 6e-8.
_IDLE: dict[str, frozenset[int | float | bool | str]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), frozenset({1})),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), frozenset({1})),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), frozenset({0})),
    **dict.fromkeys(("nextn_predict_layers", "attention.shared_kv_layers"), frozenset({0})),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), frozenset({0})),
    "attention.causal": frozenset({True}),
    "use_parallel_residual": frozenset({False}),
    "rope.scaling.yarn_log_multiplier": frozenset({0}),
    "rope.scaling.yarn_beta_fast": frozenset({32}),
    "rope.scaling.yarn_beta_slow": frozenset({1}),
}
"""Keys that this reader applies at no other value than these, with which they change nothing."""


def refuse_other_files(header: GgufHeader) -> None:
    """Refuse what is no whole model: an adapter, a vocabulary. Raises ModelRefused, by the key."""
    name = header.path.name
    kind = header.text("general.type") or "model"
    if kind != "model":
        what = KINDS.get(kind, "no model here. Choose the model's file")
        raise ModelRefused(f"{name}: general.type: {kind!r} is {what}.")
    if not header.tensors:
        raise ModelRefused(f"{name}: it holds a vocabulary and no tensors. Choose the model's file.")
    if not header.text("general.architecture"):
        raise ModelRefused(f"{name}: it lacks general.architecture. Convert the model again.")


def refuse_other_architectures(header: GgufHeader) -> None:
    """Refuse what no graph here is built of. Raises NotConvertible."""
    family = header.text("general.architecture")
    if family not in ARCHITECTURES:
        raise NotConvertible(
            f"{header.path.name}: general.architecture: {family!r} is not one of {', '.join(ARCHITECTURES)}. "
            "Choose another model."
        )


def refuse_unread_keys(header: GgufHeader, spec: DecoderSpec) -> None:
    """Refuse a key that could change what the model computes and that nothing here applies. `spec`: what was read of
    the file, with which a key may agree. Raises NotConvertible, by the key."""
    family = spec.family
    read = _READ | _READ_BY_FAMILY.get(family, frozenset()) | _HARMLESS
    other_half = _HARMLESS_PREFIXES.get(family, ())
    for key, value in header.metadata.items():
        if not key.startswith(f"{family}."):
            continue
        rest = key.removeprefix(f"{family}.")
        if rest in read or rest.startswith(other_half) or _is_idle(rest, value, spec):
            continue
        shown = "a list" if isinstance(value, GgufArray) else repr(value)
        raise NotConvertible(
            f"{header.path.name}: {key}: it is {shown}, and no {family} model here is computed with that. "
            "Choose another model."
        )


def _is_idle(rest: str, value: Scalar | GgufArray, spec: DecoderSpec) -> bool:
    if rest in _HEADS_OF_SLIDING and not any(spec.windows):
        return True
    if isinstance(value, GgufArray):
        return False
    if rest in _HEADS_OF_SLIDING:
        return value == spec.head_dim
    if rest == "attention.scale" and isinstance(value, float):
        return value == 0 or math.isclose(value, spec.query_scale, rel_tol=_SAME_SCALE)
    return value in _IDLE.get(rest, ())


def find_key(header: GgufHeader, family: str, rest: str) -> str:
    """Return the whole key by which a file says a fact: under llama.cpp's name, or where it lacks that under Ollama's
    for a family that has one."""
    key, alias = f"{family}.{rest}", _ALIASES.get(rest, "")
    if (
        key not in header.metadata
        and alias in _READ_BY_FAMILY.get(family, ())
        and f"{family}.{alias}" in header.metadata
    ):
        return f"{family}.{alias}"
    return key


def read_count(header: GgufHeader, key: str, default: int | None = None, least: int = 1, most: int = MOST_COUNT) -> int:
    """Return a whole number; one number for each layer is taken where all are the same. Raises ModelRefused, by the
    key."""
    value = header.metadata.get(key)
    if isinstance(value, GgufArray):
        each = set(header.integers(key) or ())
        if len(each) != 1:
            raise refuse_conversion(header, key, "it differs from layer to layer, which is not supported")
        value = each.pop()
    if value is None:
        value = default
    if value is None:
        raise ModelRefused(f"{header.path.name}: it lacks a positive {key}. Convert the model again.")
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refuse_key(header, key, f"{value!r} is no whole number from {least} to at most {most}")
    return value


def read_number(header: GgufHeader, key: str, default: float) -> float:
    """Return a positive number; 0 is the default where that is 0. Raises ModelRefused, by the key."""
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise refuse_key(header, key, "it is no positive number")
    if value <= 0 and value != default:
        raise refuse_key(header, key, f"{value!r} is no positive number")
    return float(value)


def refuse_key(header: GgufHeader, key: str, reason: str) -> ModelRefused:
    return ModelRefused(_describe(header, key, reason))


def refuse_conversion(header: GgufHeader, key: str, reason: str) -> NotConvertible:
    return NotConvertible(_describe(header, key, reason))


def _describe(header: GgufHeader, key: str, reason: str) -> str:
    return f"{header.path.name}: {key}: {reason}. Convert the model again, or choose another one."
