"""What the heads of a model directory say of any decoder that transformers runs on torch, whatever its class computes.

Sizes come from the tensors where these show them, and from config.json else. What a model keeps of a position follows
from its config; the loaded model's own layers are counted once more (adapters/torch_device/any_decoder.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Final

from adapters.contract import ModelRefused
from adapters.decoder.facts import DecoderFacts, Memory
from adapters.decoder.hf_config import ConfigReader, read_architecture, read_text_config
from adapters.decoder.spec import MOST_LAYERS
from adapters.packed_weights import PACKED_FORMS
from adapters.safetensors_file import Stored
from device_profiles.units import MIB

_KEPT_LAYERS: Final = ("full_attention", "sliding_attention", "chunked_attention")
"""The kinds of layers, in `layer_types`, that keep keys and values and nothing else."""
_STATES: Final = re.compile(
    r"\.(mamba|linear_attn|ssm|rglru|time_mix\w*|short_conv|conv|conv1d|A_log|a_log|dt_bias|recurrent_\w+)(\.|$)"
)
"""Tensors of layers that have a state: state-space models, linear attention, short convolutions, RWKV."""
_IN_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)")
_PROJECTION: Final = re.compile(
    r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(?:self_attn|attn|attention)\.([kv])_proj\.weight(?:_packed)?$"
)
_HEADS: Final = re.compile(r"(?:^|\.)(lm_head|embed_out|output_layer)\.")
OTHER_HALVES: Final = re.compile(
    r"(?:^|\.)(vision\w*|visual|multi_modal_projector|patch_merger|audio\w*|embed_vision|embed_audio|mm_projector)\."
)
"""Tensors of the halves of a model that see and hear."""
_EXPERTS: Final = re.compile(r"\.experts(\.|$)")
_ALIASES: Final = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "moe_intermediate_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
}
"""What some families call these keys."""
_ORIGINAL: Final = "original_max_position_embeddings"
_PACKED: Final = ("qweight", "weight_packed", "qzeros", "blocks")
"""Tensors whose elements hold several weights each."""
_USUAL_BITS: Final = 4
"""Of weights that are packed, where a checkpoint does not say it in one number."""
_SCALES: Final = re.compile(r"(scales?|scale_inv|zero_point|zeros|g_idx|shape|absmax|quant_map|quant_state\..*)$")
"""Tensors beside quantised matrices, which are no weights."""
_ELEMENT_BITS: Final = {"F64": 64, "F32": 32, "I64": 64, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16}
"""Bits of an element of a file, where it has more than eight."""
_LABELS: Final = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_GPU_ONLY: Final = ("fbgemm_fp8", "fp_quant", "higgs", "eetq", "spqr", "quip")
"""Quantised forms whose kernels in transformers are those of GPUs."""
_ACCELERATE: Final = "accelerate"
BITSANDBYTES: Final = "bitsandbytes"
_PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    "compressed-tensors": ("compressed_tensors",),
    "awq": ("gptqmodel", _ACCELERATE),
    "gptq": ("optimum", "gptqmodel"),
    BITSANDBYTES: ("bitsandbytes", _ACCELERATE),
    "fp8": (_ACCELERATE,),
    "torchao": ("torchao", _ACCELERATE),
    "auto-round": ("auto_round",),
    "hqq": ("hqq", _ACCELERATE),
    "quanto": ("optimum", _ACCELERATE),
    "aqlm": ("aqlm", _ACCELERATE),
    "vptq": ("vptq", _ACCELERATE),
}
"""What transformers' integration of a quantised form imports (transformers/quantizers/quantizer_*.py of 5.23)."""
GGUF_WAY_OUT: Final = (
    "llama.cpp's library may serve it, without drafts: convert it with convert_hf_to_gguf.py, and set adapter: "
    "llama_cpp."
)
LOADED_WHOLE: Final = "transformers' own class runs this model, and is loaded whole, on one device"
# What is prepared of such a model takes at the most: links to its weights, and its small files.
_LINKS_BYTES: Final = 64 * MIB
WIDENED: Final = (BITSANDBYTES, "compressed-tensors", "fp8", "mxfp4", *PACKED_FORMS)
"""Forms that are widened to the activations' format on processors: those that transformers and its integrations widen,
and those that `adapters.packed_weights` reads, for which no package is needed there."""
_PROCESSOR: Final = ("", "cpu")
"""A kind of device that is not known yet, or a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts(DecoderFacts):
    """A decoder that transformers' own class computes. `stored`: the format of its matrices, or how they are
    quantised. `quantised`: the name of that form, "" where they are not."""

    whole: ClassVar[str] = f"{LOADED_WHOLE}; leave shards out"
    linked_bytes: ClassVar[int | None] = _LINKS_BYTES

    quantised: str = ""

    @property
    def held_bytes(self) -> int:
        """About what its weights take where a processor holds them in 16 bits."""
        return max(self.weights_bytes, 2 * self.matrix_elements) if self.quantised in WIDENED else self.weights_bytes


def read_directory_facts(config: Mapping[str, Any], tensors: Mapping[str, Stored], where: str) -> DirectoryFacts:
    """Return the facts of a directory by its config.json and the heads of its safetensors; `where` names it.

    Raises ModelRefused, by the key or the tensor: for what is no decoder of text, for a model whose state is no KV
    cache, and for damaged numbers.
    """
    reader = check_directory_config(config, where)
    tensors = {name: stored for name, stored in tensors.items() if not OTHER_HALVES.search(name)}
    layers, heads = reader.count("num_hidden_layers", most=MOST_LAYERS), reader.count("num_attention_heads")
    hidden = reader.count("hidden_size")
    if state := next(filter(_STATES.search, tensors), None):
        raise _build_state_refusal(where, state)
    kept = _read_kv(reader, tensors, layers, heads, hidden)
    bits = read_quantisation(config, where).get("bits")
    elements, reads, outside, head = _count_weights(
        reader, tensors, layers, bits if isinstance(bits, int) and 0 < bits <= 8 else _USUAL_BITS
    )
    if not sum(elements):
        raise ModelRefused(f"{where}: it has no tensors of layers that are known here. Choose another model.")
    form = read_quantised_form(config, where)
    vocabulary = reader.count("vocab_size")
    return DirectoryFacts(
        family=read_architecture(config, where),
        layers=layers,
        hidden=hidden,
        heads=heads,
        mlp=reader.count("intermediate_size", default=4 * hidden),
        vocabulary_size=vocabulary,
        context_length=_read_context(reader),
        memory=Memory.KV_CACHE,
        kv_heads=tuple(kv_heads for kv_heads, _, _ in kept),
        key_lengths=tuple(key for _, key, _ in kept),
        value_lengths=tuple(value for _, _, value in kept),
        state_elements=(0,) * layers,
        layer_elements=elements,
        layer_reads=reads,
        embedding_elements=outside,
        head_elements=head,
        weights_bytes=sum(_count_bytes(stored) for stored in tensors.values()),
        stored=form or _label(tensors),
        quantised=form,
    )


def check_directory_config(config: Mapping[str, Any], where: str) -> ConfigReader:
    """Check all that a config.json says without the heads of the weights, and return what reads it. Raises
    ModelRefused as `read_directory_facts` does."""
    values = read_text_config(config, where)
    for name, others in _ALIASES.items():
        if values.get(name) is None:
            values[name] = next((values[other] for other in others if values.get(other) is not None), None)
    reader = ConfigReader(values, where)
    _refuse_other_models(reader, read_architecture(config, where))
    layers = reader.count("num_hidden_layers", most=MOST_LAYERS)
    kinds = reader.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) >= layers):
        raise reader.build_refusal("layer_types", f"it does not name a kind for each of {layers} layers")
    other = next((kind for kind in kinds or () if kind not in _KEPT_LAYERS), None)
    if other is not None:
        raise _build_state_refusal(where, f"layer_types: {other!r}")
    return reader


def read_quantised_form(config: Mapping[str, Any], where: str) -> str:
    """Return how a model's weights are quantised, by transformers' name, "" where they are not. Raises ModelRefused."""
    given = read_quantisation(config, where)
    method = given.get("quant_method")
    if method is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = BITSANDBYTES
    if given and (not isinstance(method, str) or not method):
        raise ModelRefused(f"{where}: quantization_config: it names no quant_method. Choose another model.")
    return method or ""


def read_quantisation(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a model's `quantization_config`, empty where it has none. Raises ModelRefused."""
    given = config.get("quantization_config") or read_text_config(config, where).get("quantization_config") or {}
    if not isinstance(given, Mapping):
        raise ModelRefused(f"{where}: quantization_config: it is no table. Choose another model.")
    return given


def refuse_form(form: str, device: str, where: str) -> None:
    """Refuse a quantised form that the packages here or the kind of device ("cpu" or "cuda"; "" where it is not known)
    do not run. Raises ModelRefused, which names what is missing."""
    if form in _GPU_ONLY and device == "cpu":
        raise ModelRefused(
            f"{where}: quantization_config: transformers runs {form} on GPUs alone. Choose the model's weights in 16 "
            "bits, or a CUDA device."
        )
    needed = () if form in PACKED_FORMS and device in _PROCESSOR else _PACKAGES.get(form, ())
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        names = " ".join(name.replace("_", "-") for name in missing)
        raise ModelRefused(
            f"{where}: quantization_config: {form} needs {' and '.join(missing)}, which is not installed: "
            f"pip install {names}"
        )


def refuse_without_transformers(why: str) -> None:
    """Refuse what only transformers computes, `why` so, where it is not installed. Raises ModelRefused."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ModelRefused(f"{why} transformers' own class runs it on torch: outrider extras install torch")


def _refuse_other_models(reader: ConfigReader, architecture: str) -> None:
    if reader.flag("is_encoder_decoder"):
        raise reader.build_refusal("is_encoder_decoder", "only decoders are served")
    if not architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        why = f"{architecture!r} is no decoder that says tokens"
        if reader.get("auto_map"):
            why += "; code in the model's repository (auto_map) may be, and is never run"
        raise reader.build_refusal("architectures", why)
    if reader.get("use_bidirectional_attention") in (True, "all"):
        raise reader.build_refusal("use_bidirectional_attention", "only causal attention is supported")


def _build_state_refusal(where: str, what: str) -> ModelRefused:
    return ModelRefused(
        f"{where}: {what}: such a layer keeps more of a text than keys and values (a state, an index), and is not run "
        f"over a paged KV cache. {GGUF_WAY_OUT}"
    )


def _read_context(reader: ConfigReader) -> int:
    """Return how many tokens are served. LongRoPE has other frequencies from some length on, for all texts of a forward
    at once: only what comes before follows from a text alone."""
    context = reader.count("max_position_embeddings")
    rope = reader.get("rope_parameters") or reader.get("rope_scaling")
    kinds = (rope.get("rope_type"), rope.get("type")) if isinstance(rope, Mapping) else ()
    if not isinstance(rope, Mapping) or not ("longrope" in kinds or "su" in kinds):
        return context
    original = reader.get(_ORIGINAL) or rope.get(_ORIGINAL) or context
    return min(context, ConfigReader({_ORIGINAL: original}, reader.where).count(_ORIGINAL))


def _read_kv(
    reader: ConfigReader, tensors: Mapping[str, Stored], layers: int, heads: int, hidden: int
) -> list[tuple[int, int, int]]:
    """Return how many keys each layer keeps of a position, and the elements of a key and of a value: by the layer's
    projections where it has some, as families have other keys for them in config.json. With latent attention (DeepSeek)
    transformers keeps keys expanded."""
    if reader.get("kv_lora_rank"):
        key = reader.count("qk_nope_head_dim") + reader.count("qk_rope_head_dim")
        return [(heads, key, reader.count("v_head_dim", default=key))] * layers
    kv_heads = 1 if reader.get("multi_query") is True else reader.count("num_key_value_heads", default=heads)
    head_dim = reader.count("head_dim", default=max(1, hidden // heads))
    kept = [(kv_heads, head_dim, reader.count("v_head_dim", default=head_dim))] * layers
    rows: dict[int, dict[str, int]] = {}
    for name, stored in tensors.items():
        match = _PROJECTION.search(name)
        if match and int(match[1]) < layers and len(stored.shape) == 2 and stored.kind != "U8":
            rows.setdefault(int(match[1]), {})[match[2]] = stored.shape[0]
    for layer, own in rows.items():
        if keys := own.get("k"):  # without a projection of values these are the keys
            count = kv_heads if keys % kv_heads == own.get("v", keys) % kv_heads == 0 else 1
            kept[layer] = (count, keys // count, own.get("v", keys) // count)
    return kept


def _count_weights(
    reader: ConfigReader, tensors: Mapping[str, Stored], layers: int, bits: int
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Return the weights of each layer's matrices, how many of these one row meets, those outside layers, and those of
    a head of its own. `bits`: of a weight that is packed."""
    elements, routed, outside, head = [0] * layers, [0] * layers, 0, 0
    for name, stored in tensors.items():
        if len(stored.shape) < 2 or _SCALES.search(name):
            continue
        count = _count_elements(stored, bits)
        match = _IN_LAYER.search(name)
        if match is None:
            is_head = bool(_HEADS.search(name))
            head += count if is_head else 0
            outside += 0 if is_head else count
        elif (layer := int(match[1])) < layers:  # those behind are for drafting alone (multi-token prediction)
            elements[layer] += count
            routed[layer] += count if _EXPERTS.search(name) else 0
    share = _read_share(reader)
    reads = [whole - of_experts + round(share * of_experts) for whole, of_experts in zip(elements, routed, strict=True)]
    return tuple(elements), tuple(reads), outside, head


def _read_share(reader: ConfigReader) -> float:
    """Return which part of a layer's experts a row meets."""
    counts = [reader.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")]
    experts = next((count for count in counts if isinstance(count, int) and count > 0), 0)
    used = reader.get("num_experts_per_tok") or reader.get("moe_top_k") or 0
    return min(1.0, used / experts) if experts and isinstance(used, int) and used > 0 else 1.0


def _count_elements(stored: Stored, bits: int) -> int:
    """Return how many weights a tensor holds; those that are packed have so many bits."""
    count = math.prod(stored.shape)
    packed = stored.name.endswith(_PACKED) or (stored.kind == "U8" and stored.name.endswith("weight"))
    return count * _ELEMENT_BITS.get(stored.kind, 8) // bits if packed else count


def _count_bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * _ELEMENT_BITS.get(stored.kind, 8) // 8


def _label(tensors: Mapping[str, Stored]) -> str:
    kinds: Sequence[str] = sorted({stored.kind for stored in tensors.values() if len(stored.shape) > 1})
    return "+".join(_LABELS.get(kind, kind.lower()) for kind in kinds)
