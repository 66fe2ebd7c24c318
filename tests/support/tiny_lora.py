"""LoRA adapters of tiny random models, in both forms of files, and the weights that a model has with one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import save_file

from tests.support.tiny_gguf import Arrays, Tiny, add_value

RANK, ALPHA = 4, 8.0
_PEFT = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def draw_pairs(arrays: Arrays, seed: int = 1, rank: int = RANK) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return random matrices for every weight of the layers: (rank, inputs) and (outputs, rank)."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            (rng.standard_normal((rank, values.shape[1])) * 0.05).astype(np.float32),
            (rng.standard_normal((values.shape[0], rank)) * 0.3).astype(np.float32),
        )
        for name, values in arrays.items()
        if name.startswith("blk.") and values.ndim == 2
    }


def merge(arrays: Arrays, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Arrays:
    """Return a model's tensors with an adapter added to them."""
    return {
        name: values + ALPHA / pairs[name][0].shape[0] * pairs[name][1] @ pairs[name][0] if name in pairs else values
        for name, values in arrays.items()
    }


def write_lora(
    path: Path,
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    family: str = "llama",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter as a GGUF file, with other `metadata`."""
    writer = GGUFWriter(str(path), family)
    usual = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": ALPHA}
    for key, value in (usual | dict(metadata or {})).items():
        add_value(writer, key, value)
    for name, (narrow, wide) in pairs.items():
        writer.add_tensor(f"{name}.lora_a", narrow)
        writer.add_tensor(f"{name}.lora_b", wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_peft(
    directory: Path,
    tiny: Tiny,
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write the same adapter as PEFT does, with other keys of its `config`: rows of queries and keys in halves."""
    modules = {}
    for name, (narrow, wide) in pairs.items():
        _, layer, weight, _ = name.split(".")
        heads = {"attn_q": tiny.heads, "attn_k": tiny.kv_heads}.get(weight) if tiny.family == "llama" else None
        halves = wide.reshape(heads, -1, 2, wide.shape[1]).swapaxes(1, 2).reshape(wide.shape) if heads else wide
        modules[f"model.layers.{layer}.{_PEFT[weight]}"] = (narrow, np.ascontiguousarray(halves))
    return write_modules(directory, modules, config)


def write_modules(
    directory: Path, modules: Mapping[str, tuple[np.ndarray, np.ndarray]], config: Mapping[str, Any] | None = None
) -> Path:
    """Write an adapter of modules of transformers as PEFT does, with other keys of its `config`."""
    directory.mkdir()
    sides = {"A": 0, "B": 1}
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": pair[place]
        for module, pair in modules.items()
        for side, place in sides.items()
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(usual | dict(config or {})))
    return directory
