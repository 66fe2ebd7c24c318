"""From the config.json of a Hugging Face model to a DecoderSpec.

What a family computes is in its class of `transformers` (models/<family>/modeling_<family>.py); files leave out
keys that have a default there, so the defaults are repeated here, per family. Ropes: adapters/decoder/hf_config.py.

The rotary embedding that a config.json describes, wherever its parameters stand in the file.

Both ways of writing are read: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from adapters.contract import ModelRefused
from adapters.decoder.rope import RopeRefused, extend_context, rope_from
from adapters.decoder.spec import MOST_COUNT, MOST_HEAD_DIM, MOST_LAYERS, DecoderSpec, NotConvertible, Rope

_MOST_NUMBER = 1e30  # more is damage
SLIDING = "sliding_attention"
CONFIG_FILE = "config.json"


class ConfigReader:
    """Values of a config by key, checked; what is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str) -> Any:
        """Return a value as it is, None where there is none."""
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, most: int = MOST_COUNT) -> int:
        """Return a whole number from 1. Raises ModelRefused."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.build_refusal(key, f"{value!r} is no whole number from 1 to at most {most}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        """Return a number of zero or more, or above zero where it is to be `positive`. Raises ModelRefused."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_NUMBER:
            raise self.build_refusal(key, f"{value!r} is no number of zero or more")
        if positive and not value:
            raise self.build_refusal(key, "it is 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return whether a key is true; it is not where it is absent. Raises ModelRefused."""
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.build_refusal(key, f"{value!r} is neither true nor false")
        return bool(value)

    def _present(self, key: str, default: float | None) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.build_refusal(key, "it is missing")
        return value

    def build_refusal(self, key: str, reason: str) -> ModelRefused:
        return ModelRefused(f"{self.where}: {key}: {reason}. Choose another model, or mend the file.")

    def refuse_conversion(self, key: str, reason: str) -> NotConvertible:
        return NotConvertible(f"{self.where}: {key}: {reason}.")


def read_ropes(reader: ConfigReader, family: str, kinds: list[str], head_dim: int) -> tuple[Rope, ...]:
    """Return each layer's rope, by the kinds of the layers. Gemma 3 has one for sliding layers and one for the others.

    Raises ModelRefused, by the key.
    """
    by_kind = {kind: _rope_parameters(reader, family, kind) for kind in sorted(set(kinds))}
    made = {}
    for kind, parameters in by_kind.items():
        try:
            made[kind] = rope_from(parameters, head_dim)
        except RopeRefused as error:
            raise reader.build_refusal(_rope_key(reader), str(error)) from error
    return tuple(made[kind] for kind in kinds)


def _rope_key(reader: ConfigReader) -> str:
    """Return which of the two keys counts where both are there: transformers' order."""
    return "rope_parameters" if reader.get("rope_parameters") and not reader.get("rope_scaling") else "rope_scaling"


def _rope_parameters(reader: ConfigReader, family: str, kind: str) -> dict[str, Any]:
    """Return the parameters of the rope of one kind of layer, with those that stand elsewhere in the file."""
    key = _rope_key(reader)
    given = reader.get(key) or {}
    if not isinstance(given, Mapping):
        raise reader.build_refusal(key, "it must be a mapping")
    parameters = given.get(kind, given)
    if not isinstance(parameters, Mapping):
        raise reader.build_refusal(key, f"{kind} must be a mapping")
    if family == "gemma3" and kind == SLIDING and kind not in given:
        parameters = {"rope_theta": reader.get("rope_local_base_freq")}
    context, original = reader.count("max_position_embeddings"), reader.get("original_max_position_embeddings")
    basis = {
        "rope_theta": reader.number("rope_theta", default=10_000.0),
        "partial_rotary_factor": reader.get("partial_rotary_factor"),
        "original_max_position_embeddings": context,
    }
    rope = basis | dict(parameters) | ({} if original is None else {"original_max_position_embeddings": original})
    if "yarn" in (rope.get("rope_type"), rope.get("type")) and rope.get("factor") is None:
        rope["factor"] = context / reader.count("original_max_position_embeddings", default=_whole(rope, context))
    return rope


def _whole(parameters: Mapping[str, Any], default: int) -> int:
    length = parameters["original_max_position_embeddings"]
    return length if isinstance(length, int) and length > 0 else default  # what is none is refused with the rope


def read_context_length(reader: ConfigReader, family: str, kinds: list[str]) -> int:
    """Return how many tokens the model reads: YaRN extends what it was trained with by its factor. Raises
    ModelRefused where that is damage."""
    context = reader.count("max_position_embeddings")
    for kind in set(kinds):
        try:
            context = max(context, extend_context(_rope_parameters(reader, family, kind), context))
        except RopeRefused as error:
            raise reader.build_refusal(_rope_key(reader), str(error)) from error
    return context


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's class fixes. `unit_offset_norms`: norms multiply with 1 + w, and embeddings are scaled with
    sqrt(hidden)."""

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    unit_offset_norms: bool = False


_COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
# What config.json leaves out means this, by transformers' classes (ADR 0104).
_LLAMA: dict[str, Any] = _COMMON | {"max_position_embeddings": 2048}
# As above.
_MISTRAL: dict[str, Any] = _COMMON | {
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
}
# As above.
_QWEN: dict[str, Any] = _COMMON | {"max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096}
_GEMMA: dict[str, Any] = _COMMON | {
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}
# As above.
_GEMMA2: dict[str, Any] = _GEMMA | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: dict[str, Any] = _GEMMA2 | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}

_GEMMA3_FAMILY = Family("gemma3", _GEMMA3, qk_norm=True, post_norms=True, unit_offset_norms=True)
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _LLAMA),
    "MistralForCausalLM": Family("mistral", _MISTRAL),
    "Qwen2ForCausalLM": Family("qwen2", _QWEN, qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", _QWEN | {"head_dim": 128}, qk_norm=True),
    "GemmaForCausalLM": Family("gemma", _GEMMA, unit_offset_norms=True),
    "Gemma2ForCausalLM": Family("gemma2", _GEMMA2, post_norms=True, unit_offset_norms=True),
    "Gemma3ForCausalLM": _GEMMA3_FAMILY,
    # The text half of a model that also sees pictures.
    "Gemma3ForConditionalGeneration": _GEMMA3_FAMILY,
}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family that `architectures` names. Raises NotConvertible for one that is not built in."""
    name = read_architecture(config, where)
    family = FAMILIES.get(name)
    if family is not None:
        return family
    raise NotConvertible(f"{where}: architectures: {name!r} is not one of {', '.join(FAMILIES)}.")


def read_architecture(config: Mapping[str, Any], where: str) -> str:
    """Return the class that a model was saved from. Raises ModelRefused where none is named."""
    named = config.get("architectures")
    if isinstance(named, list) and named:
        return str(named[0])
    raise ModelRefused(f"{where}: it names no architecture. Choose another model.")


def read_text_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the keys of the half that says tokens, with what a family that is built in has where keys are left out.
    Raises ModelRefused where no architecture is named."""
    family = FAMILIES.get(read_architecture(config, where), Family(""))
    nested = config.get("text_config")
    return dict(family.defaults) | dict(config) | (dict(nested) if isinstance(nested, Mapping) else {})


def read_vocabulary_size(config: Mapping[str, Any], where: str) -> int:
    """Return how many tokens a model knows, of whatever family. Raises ModelRefused, by the key."""
    return ConfigReader(read_text_config(config, where), where).count("vocab_size")


def read_spec(config: Mapping[str, Any], where: str) -> tuple[Family, DecoderSpec]:
    """Return the family and the shape that a parsed config.json describes; `where` names it in messages.

    Raises ModelRefused, naming the key, when a value is missing or wrong. Raises NotConvertible for another family, and
    for what a family is not computed with here.
    """
    family = family_of(config, where)
    reader = ConfigReader(read_text_config(config, where), where)
    _refuse_unsupported(reader, family)
    layers, heads, hidden = (
        reader.count("num_hidden_layers", most=MOST_LAYERS),
        reader.count("num_attention_heads"),
        reader.count("hidden_size"),
    )
    head_dim = reader.count("head_dim", default=max(1, hidden // heads), most=MOST_HEAD_DIM)
    if head_dim % 2:
        raise reader.build_refusal("head_dim", f"a rope cannot turn heads of {head_dim} elements in pairs")
    kv_heads = reader.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise reader.build_refusal("num_key_value_heads", f"{heads} heads cannot share {kv_heads} key-value heads")
    kinds = _layer_kinds(reader, family, layers)
    window = reader.count("sliding_window") if SLIDING in kinds else 0
    scalar = reader.number("query_pre_attn_scalar", default=float(head_dim), positive=True)
    vocabulary, tied = reader.count("vocab_size"), reader.flag("tie_word_embeddings")
    ropes = read_ropes(reader, family.name, kinds, head_dim)  # before the context, which follows from what they check
    outputs = reader.count("draft_vocab_size", default=vocabulary, most=vocabulary)
    if outputs != vocabulary and tied:
        raise reader.build_refusal("draft_vocab_size", "an output layer that is the embedding has the whole vocabulary")
    return family, DecoderSpec(
        family=family.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=reader.count("intermediate_size"),
        vocabulary_size=vocabulary,
        context_length=read_context_length(reader, family.name, kinds),
        norm_epsilon=reader.number("rms_norm_eps"),
        activation=_activation(reader, family),
        query_scale=scalar**-0.5,
        ropes=ropes,
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        tied_embeddings=tied,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        embedding_scale=math.sqrt(hidden) if family.unit_offset_norms else 1.0,
        attention_softcap=reader.number("attn_logit_softcapping", default=0.0),
        logit_softcap=reader.number("final_logit_softcapping", default=0.0),
        draft_outputs=0 if outputs == vocabulary else outputs,
    )


def _refuse_unsupported(reader: ConfigReader, family: Family) -> None:
    if reader.get("quantization_config"):
        raise reader.refuse_conversion("quantization_config", "no graph here is made of quantised weights")
    if reader.flag("use_bidirectional_attention"):
        raise reader.build_refusal("use_bidirectional_attention", "only causal attention is supported")
    for key in ("attention_bias", "mlp_bias"):
        if reader.flag(key) and not (key == "attention_bias" and family.qkv_bias):
            raise reader.refuse_conversion(key, f"no graph of {family.name} here has biases")


def _activation(reader: ConfigReader, family: Family) -> Literal["silu", "gelu_tanh"]:
    if family.unit_offset_norms:
        # The first Gemma files say "gelu" in hidden_act and were trained with the tanh approximation.
        name = reader.get("hidden_activation") or "gelu_pytorch_tanh"
    else:
        name = reader.get("hidden_act")
    if name == "silu":
        return "silu"
    if name == "gelu_pytorch_tanh":
        return "gelu_tanh"
    key = "hidden_activation" if family.unit_offset_norms else "hidden_act"
    raise reader.refuse_conversion(key, f"no graph of {family.name} here has the activation {name!r}")


def _layer_kinds(reader: ConfigReader, family: Family, layers: int) -> list[str]:
    """Return "sliding_attention" or "full_attention" for each layer."""
    named = reader.get("layer_types")
    if named is not None:
        known = (SLIDING, "full_attention")
        if not isinstance(named, list) or len(named) != layers or any(kind not in known for kind in named):
            raise reader.build_refusal(
                "layer_types", f"it must name sliding_attention or full_attention {layers} times"
            )
        return list(named)
    if family.name == "mistral":
        sliding = [reader.get("sliding_window") is not None] * layers
    elif family.name in ("qwen2", "qwen3"):
        slides = reader.flag("use_sliding_window") and reader.get("sliding_window") is not None
        first = int(reader.number("max_window_layers")) if slides else layers
        sliding = [layer >= first for layer in range(layers)]
    elif family.post_norms:
        period = reader.count("sliding_window_pattern")
        sliding = [(layer + 1) % period != 0 for layer in range(layers)]
    else:
        sliding = [False] * layers
    return [SLIDING if inside else "full_attention" for inside in sliding]


def describe_sizes(spec: DecoderSpec) -> dict[str, Any]:
    """Return a decoder's sizes by the names that config.json has for them."""
    return {
        "vocab_size": spec.vocabulary_size,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.mlp,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_epsilon,
        "tie_word_embeddings": spec.tied_embeddings,
    }
