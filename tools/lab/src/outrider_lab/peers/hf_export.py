"""Writes a GGUF file's exact values as a Hugging Face directory in float32, for engines that read no GGUF."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from adapters.contract import ModelRefused, Precision
from adapters.decoder.from_safetensors import tensor_names
from adapters.decoder.hf_config import FAMILIES, describe_sizes
from adapters.decoder.source import open_source
from adapters.decoder.spec import DecoderSpec
from adapters.tokenizer_files import META_FILE, TEMPLATE_FILE, TOKENIZER_FILE

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_THETA_TOLERANCE = 1e-4


def write_hf_directory(source: Path, tokenizer: Path, target: Path) -> None:
    """Write config.json, model.safetensors and the prepared `tokenizer` of a GGUF file into the empty `target`.

    Raises ModelRefused for a family or a rope that no plain config.json describes, OSError.
    """
    from safetensors.numpy import save_file

    weights = open_source(source, Precision.FP32)
    meta = json.loads((tokenizer / META_FILE).read_text(encoding="utf-8"))
    config = describe_config(weights.spec) | {"bos_token_id": meta["bos_id"], "eos_token_id": meta["eos_id"]}
    names = tensor_names(weights.spec)
    tensors = {names[canonical][0]: weights.tensor(canonical).float32() for canonical in names}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for file in (TOKENIZER_FILE, TEMPLATE_FILE):
        if (tokenizer / file).is_file():
            shutil.copyfile(tokenizer / file, target / file)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": weights.spec.context_length}
    (target / "tokenizer_config.json").write_text(json.dumps(kind, indent=1), encoding="utf-8")


def describe_config(spec: DecoderSpec) -> dict[str, Any]:
    """Return a decoder as config.json has it. Raises ModelRefused."""
    if spec.family not in _FAMILIES:
        raise ModelRefused(f"a {spec.family} in GGUF is not written as a Hugging Face directory; give that directory")
    architecture = next(name for name, family in FAMILIES.items() if family.name == spec.family)
    config = {
        "architectures": [architecture],
        "model_type": spec.family,
        "dtype": "float32",
        **describe_sizes(spec),
        "hidden_act": "silu",
        "rope_theta": find_rope_theta(spec),
    }
    if max(spec.windows):
        config |= {"sliding_window": max(spec.windows)}
    return config


def find_rope_theta(spec: DecoderSpec) -> float:
    """Return the base of a decoder's rotary frequencies, theta ** (-2 i / head_dim) for i from 0 on.

    Raises ModelRefused where they are scaled, or differ by layer."""
    rope, half = spec.ropes[0], spec.head_dim // 2
    theta = float(rope.inverse_frequencies[-1] ** (-half / (half - 1)))
    plain = (theta ** (-index / half) for index in range(half))
    same = all(
        math.isclose(one, other, rel_tol=_THETA_TOLERANCE)
        for one, other in zip(rope.inverse_frequencies, plain, strict=True)
    )
    if not same or rope.magnitude != 1.0 or len(set(spec.ropes)) > 1:
        raise ModelRefused("the rope of this GGUF file is scaled; give the model as a Hugging Face directory")
    return round(theta, 3)
