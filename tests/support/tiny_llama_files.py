"""Writes tiny random models that only llama.cpp's library runs, as GGUF files with a real small tokenizer."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from tests.support.llama_families import FAMILIES, VOCABULARY, TinyLlama, usual_keys
from tests.support.tiny_gguf import add_value
from tests.support.vocabularies import LETTERS

ARCHITECTURES = tuple(FAMILIES)
RECURRENT = ("lfm2", "qwen35", "qwen35moe", "qwen3next", "mamba")
"""Those that have a recurrent state, beside a KV cache or alone."""
_MERGES = "h e|i n|t h|e r|a n|o n|r e|o u|l l|in g|an d|Ġ t|Ġt he|Ġ a|Ġ s|Ġ w|Ġ o|Ġo f|th e|he ll|hell o|Ġ hello|o r"
_MERGES += "|or l|orl d|Ġw orl|Ġworl d|e n|e s"
_CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MERGED = [merge.replace(" ", "") for merge in _MERGES.split("|")]
TOKENS = [*LETTERS, *_MERGED, *_CONTROLS]
"""The vocabulary of every file."""
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ROWS = 32  # of the blocks of Q8_0
_EMBEDDING_SCALE = 0.1  # else a model whose embedding is its head repeats what it read last


def write_llama_file(directory: Path, architecture: str, **changes: Any) -> Path:
    """Write a random model of one of ARCHITECTURES, with other values of TinyLlama's fields; returns the file, which
    is the same for the same arguments."""
    family = FAMILIES[architecture]
    tiny = replace(TinyLlama(**(family.sizes or {})), **changes)
    own, shapes = family.describe(tiny)
    metadata = usual_keys(tiny) | own | _tokenizer(family.pre) | dict(tiny.metadata or {})
    path = directory / f"tiny-{architecture}.gguf"
    writer = GGUFWriter(str(path), family.name)
    for key, value in metadata.items():
        if value is not None:
            add_value(writer, key if key.startswith(("general.", "tokenizer.")) else f"{family.name}.{key}", value)
    random = np.random.default_rng([tiny.seed, zlib.crc32(architecture.encode())])
    whole = {"token_embd.weight": (VOCABULARY, tiny.hidden)}
    for name, shape in (whole | shapes).items():
        wanted = tiny.kind if tiny.expert_kind is None or "_exps." not in name else tiny.expert_kind
        values, kind = _values(random, name, shape), _kind_of(name, shape, wanted)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokenizer(pre: str) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) - len(_CONTROLS)) + [3] * len(_CONTROLS),
        "tokenizer.ggml.merges": _MERGES.split("|"),
        "tokenizer.ggml.bos_token_id": TOKENS.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _TEMPLATE,
    }


def _values(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return values for which a model of this size says many different tokens."""
    drawn = random.standard_normal(shape).astype(np.float32)
    if ("norm" in name and name.endswith("weight")) or name.endswith(("ssm_d", "rope_freqs.weight", "scale.weight")):
        return (1 + 0.1 * drawn * ("rope" not in name)).astype(np.float32)
    if name.endswith("ssm_a"):  # what decays: negative
        return -np.broadcast_to(np.arange(1, shape[-1] + 1, dtype=np.float32), shape).copy()
    if len(shape) == 1 or name.endswith(".bias"):
        return (0.2 * drawn).astype(np.float32)
    scale = 2.0 if name.startswith("blk.") else 1.0 if name == "output.weight" else _EMBEDDING_SCALE
    return (scale * drawn / np.sqrt(shape[-1])).astype(np.float32)


def _kind_of(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> GGMLQuantizationType:
    plain = len(shape) == 1 or shape[-1] % _ROWS or name.endswith((".bias", "ssm_a", "gate_inp.weight", "conv.weight"))
    return GGMLQuantizationType.F32 if plain else kind
