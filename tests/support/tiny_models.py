"""Tiny random models as Hugging Face directories: config.json and safetensors, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from adapters.decoder.from_safetensors import round_to_bfloat16
from adapters.hf_directory import TARGET_FINGERPRINT

VOCABULARY = 320
CONTROLS = ["<|pad|>", "<|begin|>", "<|im_end|>", "<|im_start|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("t", "he")]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA2 = _GEMMA | {"query_pre_attn_scalar": 24, "sliding_window": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4},
    "llama3": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 16},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "head_dim": ..., "hidden_size": 128},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma": {"architectures": ["GemmaForCausalLM"], "num_key_value_heads": 1} | _GEMMA,
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0}
    | _GEMMA2,
    "gemma2-uncapped": {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 6.0,
    }
    | _GEMMA2,
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    | _GEMMA2,
}


ARCHITECTURES: dict[str, str] = {name: config["architectures"][0] for name, config in CONFIGS.items()}
"""The class that each model's config.json names."""


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model; `...` as a value leaves a key out."""
    family = "llama" if name == "llama3" else name.split("-")[0]
    types = {"gemma3": "gemma3_text"}
    written = BASE | {"model_type": types.get(family, family)} | CONFIGS[name] | changes
    return {key: value for key, value in written.items() if value is not ...}


def tensors_of(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 tensors under the names that the family's files use."""
    rng = np.random.default_rng(seed)
    family = config["architectures"][0].removesuffix("ForCausalLM").lower()
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 2.0 / np.sqrt(columns)).astype(np.float32)

    def vector(size: int, around: float) -> np.ndarray:
        return (around + 0.2 * rng.standard_normal(size)).astype(np.float32)

    norm = 0.0 if family.startswith("gemma") else 1.0
    made = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * np.float32(0.5)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for part, rows, columns in [
            *[("self_attn.q_proj", queries, hidden), ("self_attn.k_proj", keys, hidden)],
            *[("self_attn.v_proj", keys, hidden), ("self_attn.o_proj", hidden, queries)],
            *[("mlp.gate_proj", mlp, hidden), ("mlp.up_proj", mlp, hidden), ("mlp.down_proj", hidden, mlp)],
        ]:
            made[f"{at}{part}.weight"] = matrix(rows, columns)
        if family == "qwen2":
            for part, rows in [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)]:
                made[f"{at}self_attn.{part}.bias"] = vector(rows, 0.0)
        if family in ("qwen3", "gemma3"):
            made |= {f"{at}self_attn.{part}_norm.weight": vector(head, norm) for part in "qk"}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if family in ("gemma2", "gemma3"):
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        made |= {f"{at}{name}.weight": vector(hidden, norm) for name in norms}
    made["model.norm.weight"] = vector(hidden, norm)
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return made


def write_model(directory: Path, name: str, *, kind: str = "F32", shards: int = 1, **changes: Any) -> Path:
    """Write a tiny model and its tokenizer into `directory` and return it. `kind`: F32, F16 or BF16."""
    config = config_of(name, **changes)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    tensors = tensors_of(config)
    if shards == 1:
        _save(tensors, directory / "model.safetensors", kind)
        return directory
    names = list(tensors)
    where: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        _save({key: tensors[key] for key in part}, directory / file, kind)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_reduced(directory: Path, source: Path, kept: np.ndarray, fingerprint: str, **changes: Any) -> Path:
    """Write the model of `source` again with an output layer over the tokens `kept`, as `outrider_lab.distill` exports
    a draft: without a tokenizer, for the vocabulary that `fingerprint` names."""
    directory.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"][kept])
    tensors["d2t"] = kept - np.arange(len(kept))
    config = json.loads((source / "config.json").read_text())
    config |= {"draft_vocab_size": len(kept), TARGET_FINGERPRINT: fingerprint} | changes
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer as Hugging Face models have it: ids below the model's vocabulary, not all used."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = [*CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    library = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    library.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<|begin|>", "eos_token": {"content": "<|im_end|>"}, "add_bos_token": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def _save(tensors: dict[str, np.ndarray], path: Path, kind: str) -> None:
    if kind == "BF16":
        save_bfloat16({name: round_to_bfloat16(values) for name, values in tensors.items()}, path)
    else:
        save_file({name: values.astype({"F32": "f4", "F16": "f2"}[kind]) for name, values in tensors.items()}, path)


def save_bfloat16(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write uint16 bit patterns as BF16, which the library's numpy side cannot do."""
    _write(path, {name: ("BF16", values) for name, values in tensors.items()})


def save_mixed(tensors: dict[str, np.ndarray], path: Path, kinds: dict[str, str]) -> None:
    """Write float32 tensors, each in a kind of its own."""
    made = {"F32": lambda one: one, "F16": lambda one: one.astype("f2"), "BF16": round_to_bfloat16}
    _write(path, {name: (kinds[name], made[kinds[name]](values)) for name, values in tensors.items()})


def _write(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    header, at = {}, 0
    for name, (kind, values) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    head = json.dumps(header).encode()
    raw = b"".join(np.ascontiguousarray(values).tobytes() for _, values in tensors.values())
    path.write_bytes(len(head).to_bytes(8, "little") + head + raw)
