"""What we compute is what the models' own implementation in `transformers` computes.

`transformers` and torch belong to an extra: `test_transformers_itself` runs where they are installed, the other test
compares with figures that it printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.decoder.hf_config import read_spec
from adapters.hf_directory import open_weights
from tests.support import reference_decoder, tiny_models

TOKENS = [int(token) for token in np.random.default_rng(11).integers(4, 260, 80)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in tiny_models.CONFIGS},
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3-yarn": ("qwen3", {"rope_scaling": YARN}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "mistral-full": ("mistral", {"sliding_window": None}),
}
# The last row's first six logits, as transformers 5.23.0 on torch 2.13.0 (CPU, float32, eager) computed them.
LAST = {
    "llama": [2.41807, 1.75938, -1.03495, 1.16508, 0.53395, -0.82131],
    "llama3": [-0.31404, 0.67561, 0.20473, -1.35242, -1.44189, 1.99815],
    "mistral": [0.82752, -1.42247, 2.5259, -3.8733, 0.5806, -2.42128],
    "qwen2": [-2.83169, -2.1553, 0.76072, 1.21683, 3.31146, -0.08888],
    "qwen3": [-0.16489, 0.04958, 1.79534, -2.59129, 1.15876, -1.1535],
    "gemma": [0.70995, 1.23098, -0.92501, 1.403, -0.06523, 0.16277],
    "gemma2": [1.85575, 1.37058, -0.48688, -0.91371, 0.77454, -1.54262],
    "gemma2-uncapped": [-0.69395, -0.06572, 0.60847, -1.32928, -0.11019, 0.24307],
    "gemma3": [0.78477, 1.69757, 1.36732, -1.0774, 1.07961, -0.3498],
    "qwen2-window": [-1.7159, 0.51454, 0.85446, 0.72998, 3.59061, -0.05642],
    "qwen3-yarn": [1.75456, 1.19909, 2.80094, -1.30425, 0.54437, -2.4786],
    "llama-linear": [-1.14539, -1.47513, -2.25904, 1.13228, 4.25685, -3.82059],
    "mistral-full": [2.07708, 0.75968, 2.50311, -2.39807, -0.40873, 2.50388],
}


def ours(directory: Path) -> np.ndarray:
    return np.asarray(reference_decoder.logits(open_weights(directory), TOKENS))


@pytest.mark.parametrize("variant", VARIANTS)
def test_figures_of_transformers(tmp_path: Path, variant: str) -> None:
    name, changes = VARIANTS[variant]
    logits = ours(tiny_models.write_model(tmp_path, name, **changes))[-1, :6]
    assert logits == pytest.approx(LAST[variant], abs=2e-4)


@pytest.mark.reference
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_itself(tmp_path: Path, variant: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch==2.13.0")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    name, changes = VARIANTS[variant]
    directory = tiny_models.write_model(tmp_path / "model", name, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0].numpy()
    logits = ours(directory)
    assert np.abs(logits - theirs).max() < 2e-4
    # The config as they write it back, with rope_parameters and layer_types, means the same model.
    model.config.save_pretrained(tmp_path / "rewritten")
    rewritten = json.loads((tmp_path / "rewritten" / "config.json").read_text())
    assert read_spec(rewritten, "rewritten") == read_spec(json.loads((directory / "config.json").read_text()), "model")
