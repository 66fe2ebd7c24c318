"""Tiny random models of many architectures, exported by optimum-intel: `python optimum_exports.py DIRECTORY`.

Runs in an environment of its own, which has optimum-intel and nothing of ours. Prints a line of JSON for each model:
its name, and why it was not exported ("" where it was).
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from optimum.exporters.openvino import main_export

VOCABULARY = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_SLIDING = ["sliding_attention", "full_attention"] * 2
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, **_EXPERTS}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "phi3": ("Phi3Config", {"head_dim": None, "sliding_window": None}),
    "glm": ("GlmConfig", {"partial_rotary_factor": 0.5}),
    "glm4": ("Glm4Config", {"partial_rotary_factor": 0.5}),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": _SLIDING}
        | {"sliding_window": 24, "rope_scaling": None, "rope_parameters": None},
    ),
    "gemma": ("GemmaConfig", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"tie_word_embeddings": True, "sliding_window": 24, "layer_types": _SLIDING}),
    "gemma3": ("Gemma3TextConfig", {"tie_word_embeddings": True, "sliding_window": 24, "layer_types": _SLIDING}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 1, 1, 0]}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "cohere2": ("Cohere2Config", {"sliding_window": 24, "layer_types": _SLIDING}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
}


def export(name: str, root: Path) -> None:
    """Write a model with random weights, and its export beside it."""
    kind, changes = CONFIGS[name]
    sizes = SIZES | changes
    config = getattr(transformers, kind)(**{key: value for key, value in sizes.items() if value is not None})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    source = root / f"{name}-safetensors"
    model.save_pretrained(source)
    main_export(str(source), root / name, task="text-generation-with-past", convert_tokenizer=False)


def main() -> int:
    """Export every model, or those that are named behind the directory."""
    root = Path(sys.argv[1])
    for name in sys.argv[2:] or CONFIGS:
        why = ""
        try:
            export(name, root)
        except Exception as error:  # the caller says what was expected
            traceback.print_exc()
            why = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        print(json.dumps({"name": name, "why": why}), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
