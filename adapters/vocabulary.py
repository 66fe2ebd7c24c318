"""What every token id of a model's files means, read without loading or preparing anything."""

from __future__ import annotations

from pathlib import Path

from adapters.contract import ModelRefused, Progress
from adapters.decoder.hf_config import CONFIG_FILE, read_spec
from adapters.gguf_header import read_header
from adapters.hf_directory import read_json, title
from adapters.hf_hub import HUB_PREFIX
from adapters.model_source import ModelSource, resolve
from adapters.tokenizer import byte_texts
from adapters.tokenizer_hf import vocabulary_texts

SIMULATED_PREFIX = "simulated:"


def vocabulary_of(file: ModelSource) -> list[str]:
    """Return the texts of all token ids in id order, the same whatever format a model comes in. Raises ModelRefused."""
    if file.path.is_dir():
        _, spec = read_spec(read_json(file.path / CONFIG_FILE), f"{title(file.path)}/{CONFIG_FILE}")
        return vocabulary_texts(file.path, spec.vocabulary_size)
    # The head of a file that comes in parts is in the first.
    whole = sum(part.stat().st_size for part in file.content) if file.parts else None
    texts = read_header(file.path, whole).texts("tokenizer.ggml.tokens")
    if not texts:
        raise ModelRefused(f"{file.path.name}: it has no vocabulary (tokenizer.ggml.tokens). Choose another model.")
    return texts


def vocabulary_at_hand(source: str, base: Path) -> list[str] | None:
    """Return the vocabulary of what an operator wrote in cluster.yaml, downloading nothing: None for a hub's model.

    Raises ModelRefused.
    """
    return None if source.startswith(HUB_PREFIX) else vocabulary_from(source, base)


def vocabulary_from(source: str, base: Path, progress: Progress = lambda _stage, _fraction: None) -> list[str]:
    """Return the vocabulary of what an operator wrote in cluster.yaml. Raises as `model_source.resolve` does."""
    return byte_texts() if source.startswith(SIMULATED_PREFIX) else vocabulary_of(resolve(source, base, progress))
