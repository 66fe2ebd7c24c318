"""Tiny random EAGLE-3 heads, each as a directory: the tensors of the published ones, written without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support import tiny_models

LAYERS = (0, 1, 2)
"""Whose outputs they read."""


def write_head(
    directory: Path, says: Sequence[int], *, hidden: int = 64, seed: int = 0, layer: str = "midlayer", **changes: Any
) -> Path:
    """Write a head that can say these tokens, in ascending order, and return its directory. `layer`: what its file
    calls its only one."""
    heads, kv_heads, size, mlp = 4, 2, 16, 96
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 1.6 / np.sqrt(columns)).astype(np.float32)

    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors: dict[str, Any] = {f"{layer}.{name}.weight": np.ones(hidden, np.float32) for name in names}
    for part, rows, columns in [
        *[("self_attn.q_proj", heads * size, 2 * hidden), ("self_attn.k_proj", kv_heads * size, 2 * hidden)],
        *[("self_attn.v_proj", kv_heads * size, 2 * hidden), ("self_attn.o_proj", hidden, heads * size)],
        *[("mlp.gate_proj", mlp, hidden), ("mlp.up_proj", mlp, hidden), ("mlp.down_proj", hidden, mlp)],
    ]:
        tensors[f"{layer}.{part}.weight"] = matrix(rows, columns)
    tensors["fc.weight"], tensors["lm_head.weight"] = matrix(hidden, len(LAYERS) * hidden), matrix(len(says), hidden)
    tensors["norm.weight"] = np.ones(hidden, np.float32)
    ids = np.array(says, np.int64)
    tensors["d2t"] = ids - np.arange(len(ids))
    tensors["t2d"] = np.isin(np.arange(tiny_models.VOCABULARY), ids)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "vocab_size": tiny_models.VOCABULARY,
        "draft_vocab_size": len(says),
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    }
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory
