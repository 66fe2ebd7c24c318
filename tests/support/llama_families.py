"""What models have that only llama.cpp's library runs: keys and tensors, as published configurations and its converter
name them.

Sizes are cut down. Where a library knows one size only (DeepSeek's latent attention, Qwen 3.5's linear one), that is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gguf import GGMLQuantizationType

Shapes = dict[str, tuple[int, ...]]

VOCABULARY = 288


@dataclass(frozen=True)
class TinyLlama:
    """Sizes of a model. `metadata`: other values of keys of its architecture, or of whole ones (`general.name`); None
    leaves one out. `kind`: of the matrices that may be quantised; `expert_kind`: of experts, where that is another."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 128
    context: int = 2048
    experts: int = 4
    experts_used: int = 2
    expert_mlp: int = 64
    window: int = 32
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0
    expert_kind: GGMLQuantizationType | None = None
    seed: int = 5
    metadata: Mapping[str, Any] | None = None

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Family:
    """An architecture as files name it, how its tokenizer cuts, and what a model of a size has beside the usual."""

    name: str
    pre: str
    describe: Callable[[TinyLlama], tuple[dict[str, Any], Shapes]]
    sizes: Mapping[str, Any] | None = None


def usual_keys(tiny: Any) -> dict[str, Any]:
    """Return the keys that most architectures have, of a TinyLlama or a tiny_gguf.Tiny."""
    return {
        "block_count": tiny.layers,
        "context_length": tiny.context,
        "embedding_length": tiny.hidden,
        "feed_forward_length": tiny.mlp,
        "attention.head_count": tiny.heads,
        "attention.head_count_kv": tiny.kv_heads,
        "attention.key_length": tiny.head_dim,
        "attention.value_length": tiny.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": tiny.head_dim,
        "rope.freq_base": 10000.0,
    }


def _in_layers(tiny: TinyLlama, parts: Shapes) -> Shapes:
    return {f"blk.{layer}.{name}": shape for layer in range(tiny.layers) for name, shape in parts.items()}


def _ends(tiny: TinyLlama, *, tied: bool = False, norm: str = "output_norm") -> Shapes:
    head = {} if tied else {"output.weight": (VOCABULARY, tiny.hidden)}
    return {f"{norm}.weight": (tiny.hidden,), **head}


def _norms(tiny: TinyLlama, *names: str) -> Shapes:
    return {f"{name}.weight": (tiny.hidden,) for name in names}


def _attention(tiny: TinyLlama) -> Shapes:
    return {
        "attn_q.weight": (tiny.query_width, tiny.hidden),
        "attn_k.weight": (tiny.kv_width, tiny.hidden),
        "attn_v.weight": (tiny.kv_width, tiny.hidden),
        "attn_output.weight": (tiny.hidden, tiny.query_width),
    }


def _head_norms(tiny: TinyLlama) -> Shapes:
    return {"attn_q_norm.weight": (tiny.head_dim,), "attn_k_norm.weight": (tiny.head_dim,)}


def _mlp(tiny: TinyLlama, *, gates: int = 1) -> Shapes:
    """The network of each layer; `gates` 0: none, 2: it stands in the same matrix as what it gates."""
    gate: Shapes = {"ffn_gate.weight": (tiny.mlp, tiny.hidden)} if gates == 1 else {}
    up = tiny.mlp * max(1, gates)
    return gate | {"ffn_up.weight": (up, tiny.hidden), "ffn_down.weight": (tiny.hidden, tiny.mlp)}


def _experts(tiny: TinyLlama, width: int, shared: int = 0) -> Shapes:
    """The experts of a layer, each of `width`, and one for all tokens of `shared`."""
    parts: Shapes = {
        "ffn_gate_inp.weight": (tiny.experts, tiny.hidden),
        "ffn_gate_exps.weight": (tiny.experts, width, tiny.hidden),
        "ffn_up_exps.weight": (tiny.experts, width, tiny.hidden),
        "ffn_down_exps.weight": (tiny.experts, tiny.hidden, width),
    }
    if shared:
        parts |= {f"ffn_{side}_shexp.weight": (shared, tiny.hidden) for side in ("gate", "up")}
        parts["ffn_down_shexp.weight"] = (tiny.hidden, shared)
    return parts


def _expert_keys(tiny: TinyLlama) -> dict[str, Any]:
    return {"expert_count": tiny.experts, "expert_used_count": tiny.experts_used}


def _biases(parts: Shapes, *names: str) -> Shapes:
    """Return a bias for each of these matrices of a layer; those of experts have one for each expert."""
    shapes = {name: parts[f"{name}.weight"] for name in names}
    return {f"{name}.bias": shape[:-1] for name, shape in shapes.items()}


def _describe_qwen3moe(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    parts = _norms(tiny, "attn_norm", "ffn_norm") | _attention(tiny) | _head_norms(tiny)
    keys = _expert_keys(tiny) | {"expert_feed_forward_length": tiny.expert_mlp}
    return keys, _ends(tiny) | _in_layers(tiny, parts | _experts(tiny, tiny.expert_mlp))


def _describe_mixtral(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    parts = _norms(tiny, "attn_norm", "ffn_norm") | _attention(tiny) | _experts(tiny, tiny.mlp)
    return _expert_keys(tiny), _ends(tiny) | _in_layers(tiny, parts)


def _describe_gpt_oss(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    parts = _norms(tiny, "attn_norm", "post_attention_norm") | _attention(tiny) | _experts(tiny, tiny.expert_mlp)
    parts |= _biases(parts, "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp")
    parts |= _biases(parts, "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    parts["attn_sinks.weight"] = (tiny.heads,)
    keys = _expert_keys(tiny) | {"expert_feed_forward_length": tiny.expert_mlp}
    keys |= {"attention.sliding_window": tiny.window, "rope.freq_base": 150000.0}
    keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    keys["rope.scaling.original_context_length"] = tiny.context // 4
    return keys, _ends(tiny) | _in_layers(tiny, parts)


def _describe_phi3(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    parts = _norms(tiny, "attn_norm", "ffn_norm") | _mlp(tiny, gates=2)
    parts["attn_qkv.weight"] = (tiny.query_width + 2 * tiny.kv_width, tiny.hidden)
    parts["attn_output.weight"] = (tiny.hidden, tiny.query_width)
    keys: dict[str, Any] = {"attention.sliding_window": tiny.window, "attention.key_length": None}
    keys |= {"attention.value_length": None, "rope.scaling.original_context_length": tiny.context}
    return keys, _ends(tiny) | _in_layers(tiny, parts)


def _describe_glm4(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    norms = _norms(tiny, "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    parts = norms | _attention(tiny) | _mlp(tiny, gates=2)
    parts |= _biases(parts, "attn_q", "attn_k", "attn_v")
    return {"rope.dimension_count": tiny.head_dim // 2}, _ends(tiny) | _in_layers(tiny, parts)


def _describe_gemma2(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    norms = _norms(tiny, "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    keys: dict[str, Any] = {"attention.sliding_window": tiny.window, "rope.dimension_count": None}
    keys |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return keys, _ends(tiny, tied=True) | _in_layers(tiny, norms | _attention(tiny) | _mlp(tiny))


def _describe_gemma3(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    _, shapes = _describe_gemma2(tiny)
    keys = {"attention.sliding_window": tiny.window, "rope.freq_base": 1e6, "rope.dimension_count": None}
    return keys, shapes | _in_layers(tiny, _head_norms(tiny))


def _describe_gemma4(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    """Windows in every other layer; full layers have heads of twice the size, the second half of the layers looks at
    the keys of the first."""
    slides, beside = [layer % 2 == 0 for layer in range(tiny.layers)], 32
    norms = _norms(tiny, "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "post_norm")
    full = replace(tiny, head_dim=2 * tiny.head_dim)
    shapes = _ends(tiny, tied=True) | _in_layers(tiny, norms | _mlp(tiny))
    for layer, sliding in enumerate(slides):
        size = tiny if sliding else full
        parts = _attention(size) | _head_norms(size) | {"layer_output_scale.weight": (1,)}
        parts |= {"inp_gate.weight": (beside, tiny.hidden), "proj.weight": (tiny.hidden, beside)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    shapes["rope_freqs.weight"] = (full.head_dim // 2,)
    shapes["per_layer_token_embd.weight"] = (VOCABULARY, beside * tiny.layers)
    shapes["per_layer_model_proj.weight"] = (beside * tiny.layers, tiny.hidden)
    shapes["per_layer_proj_norm.weight"] = (beside,)
    keys = {
        "attention.sliding_window": tiny.window,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": tiny.layers // 2,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": tiny.head_dim,
        "attention.value_length_swa": tiny.head_dim,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": tiny.head_dim,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "embedding_length_per_layer_input": beside,
        "final_logit_softcapping": 30.0,
    }
    return keys, shapes


def _describe_llama4(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    """Experts in every other layer, one of them for each token and one for all."""
    shapes = _ends(tiny)
    for layer in range(tiny.layers):
        network = _experts(tiny, tiny.expert_mlp, tiny.expert_mlp) if layer % 2 else _mlp(tiny)
        parts = _norms(tiny, "attn_norm", "ffn_norm") | _attention(tiny) | network
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    keys = _expert_keys(tiny) | {"expert_used_count": 1, "interleave_moe_layer_step": 2}
    return keys | {"expert_feed_forward_length": tiny.expert_mlp, "attention.chunk_size": 8192}, shapes


_RANK, _ROTATED, _NOPE = 512, 64, 128


def _describe_deepseek2(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    """Latent attention: one key of 576 for all heads, of which values are the first 512; the first layer is dense."""
    query_rank = 64
    latent = {
        "attn_q_a.weight": (query_rank, tiny.hidden),
        "attn_q_a_norm.weight": (query_rank,),
        "attn_q_b.weight": (tiny.heads * (_NOPE + _ROTATED), query_rank),
        "attn_kv_a_mqa.weight": (_RANK + _ROTATED, tiny.hidden),
        "attn_kv_a_norm.weight": (_RANK,),
        "attn_k_b.weight": (tiny.heads, _RANK, _NOPE),
        "attn_v_b.weight": (tiny.heads, _NOPE, _RANK),
        "attn_output.weight": (tiny.hidden, tiny.heads * _NOPE),
    }
    shapes = _ends(tiny)
    for layer in range(tiny.layers):
        network = _experts(tiny, tiny.expert_mlp, tiny.expert_mlp) if layer else _mlp(tiny)
        parts = _norms(tiny, "attn_norm", "ffn_norm") | latent | network
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    keys = _expert_keys(tiny) | {
        "attention.head_count_kv": 1,
        "attention.key_length": _RANK + _ROTATED,
        "attention.value_length": _RANK,
        "attention.key_length_mla": _NOPE + _ROTATED,
        "attention.value_length_mla": _NOPE,
        "attention.kv_lora_rank": _RANK,
        "attention.q_lora_rank": query_rank,
        "rope.dimension_count": _ROTATED,
        "leading_dense_block_count": 1,
        "expert_feed_forward_length": tiny.expert_mlp,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
    }
    return keys, shapes


def _describe_starcoder2(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    parts = _norms(tiny, "attn_norm", "ffn_norm") | _attention(tiny) | _mlp(tiny, gates=0)
    parts |= _biases(parts, "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    parts |= {"attn_norm.bias": (tiny.hidden,), "ffn_norm.bias": (tiny.hidden,)}
    keys = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
    return keys, _ends(tiny) | {"output_norm.bias": (tiny.hidden,)} | _in_layers(tiny, parts)


def _describe_olmo2(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    parts = _norms(tiny, "post_attention_norm", "post_ffw_norm") | _attention(tiny) | _mlp(tiny)
    parts |= {"attn_q_norm.weight": (tiny.query_width,), "attn_k_norm.weight": (tiny.kv_width,)}
    return {}, _ends(tiny) | _in_layers(tiny, parts)


def _describe_granite(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    parts = _norms(tiny, "attn_norm", "ffn_norm") | _attention(tiny) | _mlp(tiny)
    keys = {"logit_scale": 8.0, "residual_scale": 0.22, "embedding_scale": 12.0, "attention.scale": 0.25}
    return keys, _ends(tiny) | _in_layers(tiny, parts)


def _describe_seed_oss(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    parts = _norms(tiny, "attn_norm", "post_attention_norm") | _attention(tiny) | _mlp(tiny)
    return {}, _ends(tiny) | _in_layers(tiny, parts | _biases(parts, "attn_q", "attn_k", "attn_v"))


def _describe_smollm3(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    """As Llama's; the library turns nothing in each fourth layer."""
    return {}, _ends(tiny) | _in_layers(tiny, _norms(tiny, "attn_norm", "ffn_norm") | _attention(tiny) | _mlp(tiny))


def _describe_glm4moe(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    """The first layer is dense; the others have an expert for all tokens, too."""
    shapes = _ends(tiny)
    for layer in range(tiny.layers):
        network = _experts(tiny, tiny.expert_mlp, tiny.expert_mlp) if layer else _mlp(tiny)
        parts = _norms(tiny, "attn_norm", "post_attention_norm") | _attention(tiny) | network
        parts |= _biases(parts, "attn_q", "attn_k", "attn_v")
        parts |= {"exp_probs_b.bias": (tiny.experts,)} if layer else {}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    keys = _expert_keys(tiny) | {"expert_feed_forward_length": tiny.expert_mlp, "expert_shared_count": 1}
    keys |= {"leading_dense_block_count": 1, "expert_weights_scale": 1.0, "expert_weights_norm": True}
    return keys | {"expert_gating_func": 2, "rope.dimension_count": tiny.head_dim // 2}, shapes


def _describe_lfm2(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    """Short convolutions in all layers but every second, which has attention."""
    steps, shapes = 3, _ends(tiny, tied=True, norm="token_embd_norm")
    heads = [tiny.kv_heads if layer % 2 else 0 for layer in range(tiny.layers)]
    convolution = {
        "shortconv.conv.weight": (tiny.hidden, steps),
        "shortconv.in_proj.weight": (3 * tiny.hidden, tiny.hidden),
        "shortconv.out_proj.weight": (tiny.hidden, tiny.hidden),
    }
    for layer, there in enumerate(heads):
        parts = _norms(tiny, "attn_norm", "ffn_norm") | _mlp(tiny)
        parts |= _attention(tiny) | _head_norms(tiny) if there else convolution
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    return {"attention.head_count_kv": heads, "shortconv.l_cache": steps}, shapes


def _describe_mamba(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    inner, state, steps, rank = 2 * tiny.hidden, 16, 4, 4
    parts = _norms(tiny, "attn_norm") | {
        "ssm_in.weight": (2 * inner, tiny.hidden),
        "ssm_conv1d.weight": (inner, steps),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (rank + 2 * state, inner),
        "ssm_dt.weight": (inner, rank),
        "ssm_dt.bias": (inner,),
        "ssm_a": (inner, state),
        "ssm_d": (inner,),
        "ssm_out.weight": (tiny.hidden, inner),
    }
    keys: dict[str, Any] = dict.fromkeys(key for key in usual_keys(tiny) if key.startswith(("attention.", "rope.")))
    keys |= {"ssm.conv_kernel": steps, "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": rank}
    keys |= {"attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count": 0, "feed_forward_length": 0}
    return keys, _ends(tiny) | _in_layers(tiny, parts)


def _describe_qwen35(tiny: TinyLlama, interval: int = 2) -> tuple[dict[str, Any], Shapes]:
    """Linear attention in all layers but each last of an interval, whose queries are gated."""
    size, groups, value_heads, steps = 128, 1, 2, 4
    keys_width, values_width = size * groups, size * value_heads
    linear = {
        "attn_qkv.weight": (2 * keys_width + values_width, tiny.hidden),
        "attn_gate.weight": (values_width, tiny.hidden),
        "ssm_conv1d.weight": (2 * keys_width + values_width, steps),
        "ssm_dt.bias": (value_heads,),
        "ssm_a": (value_heads,),
        "ssm_beta.weight": (value_heads, tiny.hidden),
        "ssm_alpha.weight": (value_heads, tiny.hidden),
        "ssm_norm.weight": (size,),
        "ssm_out.weight": (tiny.hidden, values_width),
    }
    gated = _attention(tiny) | _head_norms(tiny) | {"attn_q.weight": (2 * tiny.query_width, tiny.hidden)}
    shapes = _ends(tiny)
    for layer in range(tiny.layers):
        parts = _norms(tiny, "attn_norm", "post_attention_norm") | _mlp(tiny)
        parts |= linear if (layer + 1) % interval else gated
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    keys: dict[str, Any] = {"full_attention_interval": interval, "rope.dimension_sections": [2, 1, 1, 0]}
    keys |= {"ssm.conv_kernel": steps, "ssm.inner_size": values_width, "ssm.state_size": size}
    keys |= {"ssm.time_step_rank": value_heads, "ssm.group_count": groups, "rope.dimension_count": tiny.head_dim // 2}
    return keys, shapes


def _describe_qwen35moe(tiny: TinyLlama, interval: int = 2) -> tuple[dict[str, Any], Shapes]:
    """The same with experts, one of them shared."""
    keys, shapes = _describe_qwen35(tiny, interval)
    shapes = {name: shape for name, shape in shapes.items() if ".ffn_" not in name}
    parts = _experts(tiny, tiny.expert_mlp, tiny.expert_mlp) | {"ffn_gate_inp_shexp.weight": (tiny.hidden,)}
    shapes |= _in_layers(tiny, parts)
    more = {"expert_feed_forward_length": tiny.expert_mlp, "expert_shared_feed_forward_length": tiny.expert_mlp}
    return keys | _expert_keys(tiny) | more, shapes


def _describe_qwen3next(tiny: TinyLlama) -> tuple[dict[str, Any], Shapes]:
    """The same, with beta and alpha in one matrix."""
    keys, shapes = _describe_qwen35moe(tiny, interval=4)
    found: Shapes = {}
    for name, shape in shapes.items():
        if name.endswith("ssm_alpha.weight"):
            found[name.replace("ssm_alpha", "ssm_ba")] = (2 * shape[0], shape[1])
        elif not name.endswith("ssm_beta.weight"):
            found[name] = shape
    return {key: value for key, value in keys.items() if key != "rope.dimension_sections"}, found


FAMILIES = {
    "qwen3moe": Family("qwen3moe", "qwen2", _describe_qwen3moe),
    "mixtral": Family("llama", "llama-bpe", _describe_mixtral),
    "gpt-oss": Family("gpt-oss", "gpt-4o", _describe_gpt_oss),
    "phi3": Family("phi3", "gpt-2", _describe_phi3),
    "glm4": Family("glm4", "glm4", _describe_glm4),
    "gemma2": Family("gemma2", "gpt-2", _describe_gemma2, {"layers": 26}),  # ik_llama.cpp knows it by that
    "gemma3": Family("gemma3", "gpt-2", _describe_gemma3, {"layers": 6, "seed": 2}),
    "gemma4": Family("gemma4", "gpt-2", _describe_gemma4, {"layers": 4}),
    "llama4": Family("llama4", "llama4", _describe_llama4, {"layers": 4}),
    "deepseek2": Family("deepseek2", "deepseek-v3", _describe_deepseek2),
    "starcoder2": Family("starcoder2", "starcoder", _describe_starcoder2),
    "olmo2": Family("olmo2", "dbrx", _describe_olmo2),
    "granite": Family("granite", "refact", _describe_granite),
    "seed_oss": Family("seed_oss", "seed-coder", _describe_seed_oss),
    "smollm3": Family("smollm3", "smaug-bpe", _describe_smollm3, {"layers": 4}),
    "glm4moe": Family("glm4moe", "glm4", _describe_glm4moe),
    "lfm2": Family("lfm2", "lfm2", _describe_lfm2),
    "qwen35": Family("qwen35", "qwen35", _describe_qwen35),
    "qwen35moe": Family("qwen35moe", "qwen35", _describe_qwen35moe),
    "qwen3next": Family("qwen3next", "qwen2", _describe_qwen3next, {"layers": 4}),
    "mamba": Family("mamba", "olmo", _describe_mamba),
}
