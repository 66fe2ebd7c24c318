"""The model in float32 by transformers, loaded from the GGUF file: slow, independent, and only for comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.from_gguf import GgufWeights

_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Reference:
    """transformers' model over a Llama file. `ours` puts the values in its place that the runtimes hold."""

    def __init__(self, path: Path, *, ours: bool = False) -> None:
        """Load the file. Raises ImportError without torch, transformers or accelerate."""
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        ).eval()
        if ours:
            self._model.load_state_dict(self._ours(GgufWeights(path)))

    def _ours(self, weights: GgufWeights) -> dict[str, Any]:
        names = {"model.embed_tokens": "embedding", "model.norm": "final_norm"}
        names["lm_head"] = "embedding" if weights.spec.tied_embeddings else "head"
        for layer in range(weights.spec.layers):
            names |= {f"model.layers.{layer}.{theirs}": f"{layer}.{ours}" for ours, theirs in _NAMES.items()}
        return {
            f"{theirs}.weight": self._torch.from_numpy(weights.tensor(ours).float32()) for theirs, ours in names.items()
        }

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return all rows, shape (tokens, vocabulary)."""
        with self._torch.no_grad():
            rows: NDArray[np.float32] = self._model(self._torch.tensor([list(tokens)])).logits[0].numpy()
        return rows
