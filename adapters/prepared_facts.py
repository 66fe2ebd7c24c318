"""What `prepare` writes down of a model beside its weights, and `load` reads: spec.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.contract import ModelRefused
from adapters.decoder.source import fingerprint_of
from adapters.decoder.spec import Weights
from device_profiles.workload import ModelSpec

Facts = dict[str, str | int | list[int] | dict[str, int]]
READER = "reader"
"""The facts of what reads prompts, where something else decodes."""
_FILE = "spec.json"


def facts_of(weights: Weights, source: Path) -> Facts:
    """Return what every runtime needs to know of weights read from `source`. Raises ModelRefused."""
    spec = weights.spec
    return {
        "architecture": spec.family,
        "layers": spec.layers,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "context_length": spec.context_length,
        "vocabulary_size": spec.vocabulary_size,
        "vocabulary_fingerprint": fingerprint_of(source, spec.vocabulary_size),
        "weights": weights.label,
        "output_ids": list(weights.output_ids),
    }


def write_facts(directory: Path, facts: Facts) -> None:
    """Write the facts into a prepared model's directory. Raises OSError."""
    (directory / _FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read_facts(directory: Path) -> dict[str, Any]:
    """Return what `write_facts` wrote. Raises ModelRefused when it is gone or damaged."""
    try:
        facts: dict[str, Any] = json.loads((directory / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(
            f"{directory / _FILE} cannot be read ({error}). Delete the directory, and start again."
        ) from error
    return facts


def model_spec(facts: Mapping[str, Any], bytes_per_token: int) -> ModelSpec:
    """Return the model's spec; `bytes_per_token` is what the loaded model's KV cache takes for a position."""
    return ModelSpec(
        layers=facts["layers"],
        vocabulary_size=facts["vocabulary_size"],
        context_length=facts["context_length"],
        bytes_per_token=bytes_per_token,
        vocabulary_fingerprint=facts["vocabulary_fingerprint"],
        output_ids=tuple(facts.get("output_ids", ())),
    )
