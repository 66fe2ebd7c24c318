"""A model on disk as a decoder, whatever format it came in, in its own number format or in another."""

from __future__ import annotations

from pathlib import Path

from adapters import hf_directory
from adapters.contract import ModelRefused
from adapters.decoder import from_gguf
from adapters.decoder.from_gguf import GgufWeights
from adapters.decoder.from_safetensors import round_to_bfloat16
from adapters.decoder.gguf_blocks import type_name
from adapters.decoder.spec import Dense, Grouped, NotConvertible, OnRead, Tensor, Weights, ignore_read
from adapters.gguf_header import read_header
from adapters.gguf_splits import read_model_header
from adapters.hf_directory import has_own_graph, open_weights, read_declared_fingerprint
from adapters.tokenizer_gguf import token_texts
from adapters.tokenizer_hf import vocabulary_texts
from device_profiles.profile import DRAFT, FAST, Precision, WeightsFormat
from device_profiles.workload import vocabulary_fingerprint

_FLOATS = {Precision.FP32: "f4", Precision.FP16: "f2"}


def open_source(source: Path, precision: WeightsFormat | None = None, on_read: OnRead = ignore_read) -> Weights:
    """Open a GGUF file (of a split model the first) or a Hugging Face directory, with its own matrices or with matrices
    in another format. `on_read` hears of what is read of it.

    FAST is the file's own with whole zeros, DRAFT has all matrices in 4 bits. Where `precision` is of 4 or 8 bits,
    matrices that the file holds in full come in full: to quantise them is a library's work. Those that it holds
    quantised come in groups, the nearest to the file's exact values. With INT4 4-bit formats come in 4 bits with whole
    zeros. With INT8 all come in 8 bits. Raises ModelRefused when the source is damaged or not supported.
    """
    if has_own_graph(source):
        facts = hf_directory.read_graph_facts(source)
        raise NotConvertible(
            f"{hf_directory.title(source)}: it is in {facts.form}, which is run as it is: set adapter: "
            f"{facts.adapter}, and leave weights at auto."
        )
    if source.is_dir():
        if precision == DRAFT:
            raise ModelRefused(f"{source.name}: weights in {DRAFT} are made of GGUF files alone. Leave them at auto.")
        weights = open_weights(source, on_read=on_read)
        return weights if precision in (None, FAST) else _Converted(weights, Precision(precision), weights.label)
    if precision is None:
        return GgufWeights(source, on_read=on_read)
    if precision == FAST:
        return GgufWeights(source, "whole zeros", on_read)
    if precision == DRAFT:
        return GgufWeights(source, "4 bits", on_read)
    gguf = GgufWeights(source, "8 bits" if precision is Precision.INT8 else "exact", on_read)
    kept = GgufWeights(source, "whole zeros", on_read) if precision is Precision.INT4 else None
    return _Converted(gguf, Precision(precision), type_name(gguf.stored), kept)


class _Converted:
    """The matrices of `weights` in another format; `kept` has those that stay as they are where they have 4 bits."""

    def __init__(self, weights: Weights, precision: Precision, stored: str, kept: Weights | None = None) -> None:
        self._weights, self._precision, self._kept = weights, precision, kept
        self.spec, self.output_ids = weights.spec, weights.output_ids
        self.label = stored.lower() if stored.lower() == precision else f"{precision} (from {stored})"

    def tensor(self, name: str) -> Tensor:
        if self._kept is not None:
            kept = self._kept.tensor(name)
            if isinstance(kept, Grouped) and kept.bits == 4:
                return kept
        tensor = self._weights.tensor(name)
        if (
            isinstance(tensor, Grouped)
            or tensor.values.ndim == 1
            or self._precision in (Precision.INT4, Precision.INT8)
        ):
            return tensor
        if self._precision is Precision.BF16:
            return tensor if tensor.bfloat16 else Dense(round_to_bfloat16(tensor.float32()), bfloat16=True)
        values = tensor.float32() if tensor.bfloat16 else tensor.values
        return Dense(values.astype(_FLOATS[self._precision], copy=False))


def list_shape_values(source: Path) -> list[tuple[Path, int, int]]:
    """Return which values `open_source` looks at, beside the heads of the files: file, first byte and count of bytes.
    Raises ModelRefused."""
    if source.is_dir():
        return [] if has_own_graph(source) else hf_directory.list_shape_values(source)
    return from_gguf.list_shape_values(read_model_header(source))


def count_held_bytes(weights: Weights) -> int | None:
    """Return what a GGUF file's own values take in a runtime; None for other weights, which take their files' size."""
    return weights.held_bytes if isinstance(weights, GgufWeights) else None


def fingerprint_of(source: Path, vocabulary_size: int) -> str:
    """Return the fingerprint of a source's vocabulary, the same in both formats. Raises ModelRefused."""
    if source.is_dir():
        declared = read_declared_fingerprint(source)
        return declared or vocabulary_fingerprint(vocabulary_texts(source, vocabulary_size))
    return vocabulary_fingerprint(token_texts(read_header(source)))
