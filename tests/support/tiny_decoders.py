"""Tiny random decoders of transformers, each as a directory: made by the library itself, with a fixed seed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import tiny_models

_BASE: dict[str, Any] = {
    "vocab_size": tiny_models.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DECODERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "norm_topk_prob": True} | _EXPERTS,
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "layer_types": _MIXED,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "phi3": {"model_type": "phi3", "sliding_window": 16, "head_dim": ..., "original_max_position_embeddings": 512},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5},
    "glm": {"model_type": "glm", "partial_rotary_factor": 0.5},
    "olmo2": {"model_type": "olmo2", "head_dim": ...},
    "olmo3": {"model_type": "olmo3", "head_dim": ..., "layer_types": _MIXED, "sliding_window": 16},
    "cohere": {"model_type": "cohere", "head_dim": ..., "logit_scale": 0.5},
    "cohere2": {"model_type": "cohere2", "layer_types": _MIXED, "sliding_window": 16, "logit_scale": 0.5},
    "starcoder2": {"model_type": "starcoder2", "head_dim": ..., "sliding_window": 16, "use_bias": True},
    "granite": {"model_type": "granite", "head_dim": ..., "residual_multiplier": 0.8, "logits_scaling": 2.0},
    "granitemoe": {
        "model_type": "granitemoe",
        "head_dim": ...,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "smollm3": {"model_type": "smollm3", "head_dim": ..., "no_rope_layers": [1, 0, 1]},
    "ernie4_5": {"model_type": "ernie4_5"},
    "exaone4": {"model_type": "exaone4", "layer_types": _MIXED, "sliding_window": 16},
    "llama4_text": {
        "model_type": "llama4_text",
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "attention_chunk_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1],
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "head_dim": ...,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 32,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
    },
    "gpt2": {
        "model_type": "gpt2",
        "head_dim": ...,
        "num_key_value_heads": ...,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
    },
    "gpt_neox": {"model_type": "gpt_neox", "head_dim": ..., "num_key_value_heads": ...},
    "phi": {"model_type": "phi", "head_dim": ...},
    "stablelm": {"model_type": "stablelm", "head_dim": ...},
    "nemotron": {"model_type": "nemotron"},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
}


ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm": "GlmForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "phi": "PhiForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "llama-biased": "LlamaForCausalLM",
}


def write_named(directory: Path, name: str) -> Path:
    """Write a directory that names a decoder's architecture, without the library: its tensors are a Llama's."""
    own: dict[str, Any] = {"attention_bias": True} if name == "llama-biased" else {}
    return tiny_models.write_model(directory, "llama", architectures=[ARCHITECTURES[name]], **own)


def write_named_form(directory: Path, name: str) -> Path:
    """Write a directory that names a decoder's architecture and a quantised form, as "olmo2 awq"."""
    decoder, _, form = name.partition(" ")
    written = write_named(directory, decoder)
    config = json.loads((written / "config.json").read_text())
    (written / "config.json").write_text(json.dumps(config | {"quantization_config": FORMS[form]}))
    return written


def write_decoder(directory: Path, name: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny decoder and its tokenizer into `directory` and return it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    written = {**_BASE, **DECODERS[name], **changes}
    settings = {key: value for key, value in written.items() if value is not ...}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(network)
    network.save_pretrained(directory)
    tiny_models.write_tokenizer(directory)
    return directory


def write_seeing_decoder(directory: Path) -> Path:
    """Write a tiny Mistral Small 3, with the half that sees, and return it. Its output layer is the embedding."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    half = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sees = {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16} | half
    config = AutoConfig.for_model("mistral3", text_config=_BASE | {"model_type": "mistral"}, vision_config=sees)
    torch.manual_seed(0)
    network = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _draw(network)
    network.save_pretrained(directory)
    tiny_models.write_tokenizer(directory)
    return directory


def _draw(network: Any) -> None:
    """Give a network weights of a size at which its texts vary; the library's own first ones are all but zero."""
    import torch

    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.6 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


def quantise(directory: Path, form: str) -> Path:
    """Quantise a tiny decoder's layers in its files, as checkpoints of the hub are written, and return a copy of it
    beside that has the same weights in float32. `form` is of FORMS; mxfp4 is of experts alone."""
    from safetensors.torch import load_file, save_file

    whole = Path(shutil.copytree(directory, directory.with_name(f"{directory.name}-whole")))
    if form.startswith("bitsandbytes"):
        _quantise_by_library(directory, whole, form)
        return whole
    path = directory / "model.safetensors"
    suffixes = ("experts.gate_up_proj", "experts.down_proj") if form == "mxfp4" else ("proj.weight",)
    packed = load_file(path)
    dense = dict(packed)
    for name in [name for name in packed if name.endswith(suffixes)]:
        parts, dense[name] = _PACKERS[form](name, packed.pop(name))
        packed |= parts
    for tensors, place in ((packed, path), (dense, whole / path.name)):
        save_file({name: values.contiguous() for name, values in tensors.items()}, place, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": FORMS[form]}))
    return whole


def _quantise_by_library(directory: Path, whole: Path, form: str) -> None:
    """Let bitsandbytes quantise a decoder's directory, and write what it makes of that again into another one."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(**FORMS[form])
    options = {"quantization_config": config, "dtype": torch.float32, "device_map": {"": "cpu"}}
    network = AutoModelForCausalLM.from_pretrained(whole, **options)
    network.save_pretrained(directory)
    network.dequantize(torch.float32).save_pretrained(whole)


def _pack_fp8(name: str, values: Any) -> tuple[dict[str, Any], Any]:
    """Return tensors of (outputs, inputs) in tiles with a scale each, and the weights that these stand for."""
    import torch

    tiles = values.view(len(values) // _BLOCK, _BLOCK, -1, _BLOCK)
    scales = tiles.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    rounded = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    dense = rounded.float() * scales[:, None, :, None]
    return {name: rounded.view_as(values), f"{name}_scale_inv": scales}, dense.view_as(values)


def _pack_rows(name: str, values: Any) -> tuple[dict[str, Any], Any]:
    """The same in 8 bits with a scale for each output."""
    import torch

    scales = values.abs().amax(dim=1, keepdim=True) / 127
    rounded = (values / scales).round().to(torch.int8)
    return {name: rounded, f"{name}_scale": scales}, rounded.float() * scales


def _pack_in_words(name: str, values: Any) -> tuple[dict[str, Any], Any]:
    """The same in 4 bits, eight inputs in a word, with a scale for each group of them."""
    import torch

    parts = values.view(len(values), -1, _GROUP)
    scales = parts.abs().amax(dim=2) / 7
    rounded = (parts / scales[:, :, None]).round()
    words = _pack_words((rounded + 8).view_as(values), tuple(range(8)), 4)
    layer = name.removesuffix("weight")
    packed = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(values.shape)}
    return {f"{layer}{end}": tensor for end, tensor in packed.items()}, (rounded * scales[:, :, None]).view_as(values)


def _pack_words(values: Any, order: tuple[int, ...], bits: int) -> Any:
    """Pack the last axis, so many values into a word of 32 bits, in this order from the lowest bits on."""
    import torch

    parts = values.to(torch.int64).view(*values.shape[:-1], -1, len(order))
    words = sum(parts[..., place] << (bits * at) for at, place in enumerate(order))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _quantise_groups(values: Any, bits: int, groups: Any) -> tuple[Any, Any, Any, Any]:
    """Return values (inputs, outputs), zeros and scales (groups, outputs), and what they stand for: each group of
    inputs has a least and a largest value."""
    import torch

    columns, most = values.t(), (1 << bits) - 1
    parts = [columns[groups == group] for group in range(int(groups.max()) + 1)]
    low = torch.stack([part.amin(dim=0) for part in parts]).clamp(max=0)
    high = torch.stack([part.amax(dim=0) for part in parts]).clamp(min=0)
    scales = ((high - low) / most).half().float()
    zeros = (-low / scales).round().clamp(0, most)
    rounded = (columns / scales[groups] + zeros[groups]).round().clamp(0, most)
    return rounded, zeros, scales, ((rounded - zeros[groups]) * scales[groups]).t()


def _pack_awq(name: str, values: Any) -> tuple[dict[str, Any], Any]:
    """As AutoAWQ does (`gemm`): eight outputs in a word, in its own order."""
    import torch

    groups = torch.arange(values.shape[1]) // _GROUP
    rounded, zeros, scales, dense = _quantise_groups(values, 4, groups)
    layer, order = name.removesuffix(".weight"), (0, 2, 4, 6, 1, 3, 5, 7)
    words = {"qweight": _pack_words(rounded, order, 4), "qzeros": _pack_words(zeros, order, 4), "scales": scales.half()}
    return {f"{layer}.{end}": tensor for end, tensor in words.items()}, dense


def _pack_gptq(name: str, values: Any, *, bits: int = 4, less: int = 1) -> tuple[dict[str, Any], Any]:
    """As AutoGPTQ does: inputs in words, zeros less one, and groups of inputs that do not lie side by side."""
    import torch

    groups = (torch.arange(values.shape[1]) * 7 % values.shape[1]) // _GROUP
    rounded, zeros, scales, dense = _quantise_groups(values, bits, groups)
    layer, order = name.removesuffix(".weight"), tuple(range(32 // bits))
    words = {
        "qweight": _pack_words(rounded.t(), order, bits).t(),
        "qzeros": _pack_words((zeros - less) % (1 << bits), order, bits),
        "scales": scales.half(),
        "g_idx": groups.to(torch.int32),
    }
    return {f"{layer}.{end}": tensor for end, tensor in words.items()}, dense


_BLOCK, _GROUP = 16, 32


def _name_scheme(form: str, **weights: Any) -> dict[str, Any]:
    """Return the configuration of compressed-tensors for linear layers that all have these weights."""
    scheme = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, "dynamic": False} | weights}
    shared = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return shared | {"format": form, "config_groups": {"group_0": scheme}}


FORMS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": False, "desc_act": True},
    "gptq-v2-8": {"quant_method": "gptq", "bits": 8, "group_size": _GROUP, "checkpoint_format": "gptq_v2"},
    "bitsandbytes-4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "bitsandbytes-8": {"load_in_8bit": True},
    "compressed-tensors": _name_scheme("int-quantized", num_bits=8, strategy="channel"),
    "compressed-tensors-4": _name_scheme("pack-quantized", num_bits=4, strategy="group", group_size=_GROUP),
}
# The values of OCP's MXFP4 (E2M1), by their pattern.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _pack_mxfp4(name: str, values: Any) -> tuple[dict[str, Any], Any]:
    """Pack (experts, inputs, outputs) into pairs of patterns by blocks of 32 inputs, with an exponent for each."""
    import torch

    blocks = values.transpose(1, 2).reshape(len(values), values.shape[2], -1, 32)
    exponents = torch.ceil(torch.log2(blocks.abs().amax(dim=-1) / _E2M1[-1]))
    scaled = blocks / torch.exp2(exponents)[..., None]
    patterns = (scaled.abs()[..., None] - torch.tensor(_E2M1)).abs().argmin(dim=-1) + 8 * (scaled < 0)
    parts = {
        f"{name}_blocks": (patterns[..., ::2] | patterns[..., 1::2] << 4).to(torch.uint8),
        f"{name}_scales": (exponents + 127).to(torch.uint8),
    }
    signed = torch.tensor((*_E2M1, *(-value for value in _E2M1)))[patterns] * torch.exp2(exponents)[..., None]
    return parts, signed.reshape(len(values), values.shape[2], -1).transpose(1, 2)


_PACKERS: dict[str, Callable[[str, Any], tuple[dict[str, Any], Any]]] = {
    "fp8": _pack_fp8,
    "mxfp4": _pack_mxfp4,
    "compressed-tensors": _pack_rows,
    "compressed-tensors-4": _pack_in_words,
    "awq": _pack_awq,
    "gptq": _pack_gptq,
    "gptq-v2-8": partial(_pack_gptq, bits=8, less=0),
}
