"""The draft as a Hugging Face directory that every adapter loads: config.json and model.safetensors.

EAGLE-3's names: `draft_vocab_size` in the config, and the tensor `d2t`, which says for each output how far the token
that it means lies above the output's own number. `target_vocabulary_fingerprint` stands for a tokenizer: the draft
speaks its target's ids and is never served by itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.source import open_source
from adapters.hf_directory import TARGET_FINGERPRINT
from orchestrator.generating.data import DataError, TargetFacts

if TYPE_CHECKING:
    from outrider_lab.distill.train import State


def write_draft(state: State, facts: TargetFacts, directory: Path) -> int:
    """Write the draft, its weights in bfloat16, and return its bytes. Raises DataError where a model stands there
    that is not a draft."""
    import torch
    from safetensors.torch import save_file

    config_file = directory / "config.json"
    if config_file.exists() and TARGET_FINGERPRINT not in config_file.read_text(encoding="utf-8"):
        raise DataError(f"{directory} holds a model that is no draft: give another directory")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in state.draft.state_dict().items()}
    tensors["d2t"] = torch.from_numpy(state.outputs - np.arange(len(state.outputs)))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config_file.write_text(json.dumps(_config(state, facts), indent=1) + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in directory.iterdir())


def _config(state: State, facts: TargetFacts) -> dict[str, Any]:
    return state.draft.shape.config(facts.context_length) | {
        "torch_dtype": "bfloat16",
        TARGET_FINGERPRINT: facts.vocabulary_fingerprint,
        "eos_token_id": facts.end_ids,
        "distilled": {"target": facts.name, "steps": state.step},
    }


def dense_embedding(source: Path) -> NDArray[np.float32]:
    """Return a model's embedding, shape (vocabulary, hidden). Raises ModelRefused."""
    return np.asarray(open_source(source).tensor("embedding").float32(), np.float32)
