"""A model on disk as a decoder, whatever format it came in."""

from __future__ import annotations

from pathlib import Path

from adapters.decoder.from_gguf import GgufWeights
from adapters.decoder.spec import Weights
from adapters.gguf_header import read_header
from adapters.hf_directory import declared_fingerprint, open_weights
from adapters.model_source import check_gguf
from adapters.tokenizer_hf import vocabulary_texts
from device_profiles.workload import vocabulary_fingerprint


def open_source(source: Path) -> Weights:
    """Open a GGUF file or a Hugging Face directory. Raises ModelRefused when it is damaged or not supported."""
    if source.is_dir():
        return open_weights(source)
    check_gguf(source)
    return GgufWeights(source)


def fingerprint_of(source: Path, vocabulary_size: int) -> str:
    """Return the fingerprint of a source's vocabulary, the same in both formats. Raises ModelRefused."""
    if source.is_dir():
        declared = declared_fingerprint(source)
        return declared or vocabulary_fingerprint(vocabulary_texts(source, vocabulary_size))
    return vocabulary_fingerprint(read_header(source).texts("tokenizer.ggml.tokens") or ())
