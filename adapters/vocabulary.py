"""What every token id of a model's files means, read without loading or preparing anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adapters.contract import ModelRefused, Progress
from adapters.gguf_header import read_header
from adapters.hf_directory import read_declared_fingerprint, read_vocabulary_size, title
from adapters.hf_hub import HUB_PREFIX, DownloadFailed, find_head, parse_id
from adapters.model_source import ModelSource, resolve
from adapters.tokenizer import byte_texts
from adapters.tokenizer_gguf import token_texts
from adapters.tokenizer_hf import vocabulary_texts
from device_profiles.workload import vocabulary_fingerprint

SIMULATED_PREFIX = "simulated:"


def vocabulary_of(file: ModelSource) -> list[str]:
    """Return the texts of all token ids in id order, the same whatever format a model comes in. Raises ModelRefused."""
    if file.path.is_dir():
        return vocabulary_texts(file.path, read_vocabulary_size(file.path))
    texts = token_texts(read_header(file.path, file.whole_bytes))
    if not texts:
        raise ModelRefused(f"{file.path.name}: it has no vocabulary (tokenizer.ggml.tokens). Choose another model.")
    return texts


def draft_vocabulary(file: ModelSource, target: Sequence[str]) -> list[str]:
    """Return the vocabulary of a draft of a target with the texts `target`: its own, or the target's where it has no
    tokenizer and says whose draft it is. Raises ModelRefused, too where it is another target's."""
    declared = read_declared_fingerprint(file.path) if file.path.is_dir() else ""
    if not declared:
        return vocabulary_of(file)
    ours = vocabulary_fingerprint(target)
    if declared != ours:
        raise ModelRefused(
            f"{title(file.path)}: it is a draft for a vocabulary with the fingerprint {declared}, and the target's is "
            f"{ours}. Choose a draft that was made for this target."
        )
    return list(target)


def vocabulary_at_hand(source: str, base: Path, target: Sequence[str] | None = None) -> list[str] | None:
    """Return the vocabulary of what an operator wrote in cluster.yaml, downloading no weights: None where a hub
    cannot be reached.

    `target`: what it is to be a draft of. Raises ModelRefused.
    """
    if not source.startswith(HUB_PREFIX):
        return vocabulary_from(source, base, target=target)
    try:
        path, header = find_head(parse_id(source))
    except DownloadFailed:
        return None
    if header is not None:
        return token_texts(header)
    file = ModelSource(path, path.name, source)
    return vocabulary_of(file) if target is None else draft_vocabulary(file, target)


def vocabulary_from(
    source: str,
    base: Path,
    progress: Progress = lambda _stage, _fraction: None,
    target: Sequence[str] | None = None,
) -> list[str]:
    """Return the vocabulary of what an operator wrote in cluster.yaml; `target`: what it is to be a draft of. Raises as
    `model_source.resolve` does."""
    if source.startswith(SIMULATED_PREFIX):
        return byte_texts()
    return vocabulary_in(resolve(source, base, progress), target)


def vocabulary_in(file: ModelSource, target: Sequence[str] | None = None) -> list[str]:
    """Return the vocabulary of a model's files; `target`: what it is to be a draft of. Raises ModelRefused."""
    return vocabulary_of(file) if target is None else draft_vocabulary(file, target)
