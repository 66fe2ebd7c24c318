"""A model's first layers as a model of their own: its shapes, its weights and its kernels in a fraction of its time."""

from __future__ import annotations

from pathlib import Path

from outrider_lab.gguf_layers import Layer, write_layers


def write_first_layers(path: Path, source: Path, layers: int) -> Path:
    """Write a GGUF model's first `layers` layers, with its embedding, output and tokenizer, to `path` and return it."""
    write_layers(path, source, [Layer(number) for number in range(layers)])
    return path
