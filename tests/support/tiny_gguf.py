"""Tiny random models as GGUF files, and what they compute, written down once more in plain numpy.

The reference works on the file's own conventions (Llama: rope over interleaved pairs), so that it does not share the
reader's reordering.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from tests.support.llama_families import usual_keys

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Tiny:
    """Sizes and variants of a model. `words`: its vocabulary, with which it has a byte-level
    tokenizer; those of two letters are merged."""

    family: str
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 96
    mlp: int = 128
    layers: int = 2
    vocabulary: int = 64
    context: int = 128
    tied: bool = False
    bias: bool = False
    qk_norm: bool = False
    kind: GGMLQuantizationType = GGMLQuantizationType.F32
    rope_factors: bool = False
    seed: int = 5
    words: tuple[str, ...] = ()


def write(
    path: Path,
    tiny: Tiny,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray | None] | None = None,
    tokens: list[str] | None = None,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    *,
    tensors_each: int = 0,
    bare_first: bool = False,
) -> Arrays:
    """Write a random model, with other `metadata` and `extra` tensors; return its tensors, dequantised.

    Keys of `metadata` are the architecture's (`rope.freq_base`), or whole ones (`general.type`); None leaves one out,
    and a tensor of None in `extra` is left out, too. `kinds`: the types of matrices whose names end so.
    `tensors_each`: split into files of so many tensors, PATH-00001-of-0000N.gguf and so on (see `list_split`);
    `bare_first`: with a first one that has none.
    """
    given: dict[str, np.ndarray | None] = {**_random(tiny), **(extra or {})}
    arrays = {name: values for name, values in given.items() if values is not None}
    writer = GGUFWriter(str(path), tiny.family, split_max_tensors=tensors_each, small_first_shard=bare_first)
    usual: dict[str, Any] = usual_keys(tiny) | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens or [f"t{index}" for index in range(tiny.vocabulary)],
        "tokenizer.ggml.scores": [0.0] * (len(tokens) if tokens else tiny.vocabulary),
    }
    if tiny.words:
        usual |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": list(tiny.words),
            "tokenizer.ggml.merges": [" ".join(word) for word in tiny.words if len(word) == 2],
            "tokenizer.ggml.scores": None,
        }
    for key, value in (usual | dict(metadata or {})).items():
        if value is not None:
            add_value(writer, key if key.startswith(_WHOLE_KEYS) else f"{tiny.family}.{key}", value)
    for name, values in arrays.items():
        kind = next((kind for end, kind in (kinds or {}).items() if name.endswith(end)), tiny.kind)
        if values.ndim == 2 and kind is not GGMLQuantizationType.F32:
            packed = quantize(values, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            arrays[name] = dequantize(packed, kind).reshape(values.shape)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def write_file(models: Mapping[str, Tiny], directory: Path, name: str) -> Path:
    """Write the model of this name into a directory; return the file."""
    write(directory / "tiny.gguf", models[name])
    return directory / "tiny.gguf"


def list_split(path: Path) -> list[Path]:
    """Return the files of a split model that was written to `path`, in order."""
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


_WHOLE_KEYS = ("general.", "tokenizer.", "split.", "adapter.", "quantize.", "imatrix.", "unsloth.")


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Write a value of a key by its Python type."""
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[type(value)](key, value)


def _random(tiny: Tiny) -> Arrays:
    rng = np.random.default_rng(tiny.seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def vector(size: int, base: float = 1.0) -> np.ndarray:
        return (base + 0.3 * rng.standard_normal(size)).astype(np.float32)

    queries, keys = tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    arrays = {"token_embd.weight": matrix(tiny.vocabulary, tiny.hidden) * 8, "output_norm.weight": vector(tiny.hidden)}
    if not tiny.tied:
        arrays["output.weight"] = matrix(tiny.vocabulary, tiny.hidden)
    if tiny.rope_factors:
        arrays["rope_freqs.weight"] = np.linspace(1, 8, tiny.head_dim // 2, dtype=np.float32)
    for layer in range(tiny.layers):
        parts = {
            "attn_norm.weight": vector(tiny.hidden),
            "ffn_norm.weight": vector(tiny.hidden),
            "attn_q.weight": matrix(queries, tiny.hidden) * 2,
            "attn_k.weight": matrix(keys, tiny.hidden) * 2,
            "attn_v.weight": matrix(keys, tiny.hidden),
            "attn_output.weight": matrix(tiny.hidden, queries),
            "ffn_gate.weight": matrix(tiny.mlp, tiny.hidden),
            "ffn_up.weight": matrix(tiny.mlp, tiny.hidden),
            "ffn_down.weight": matrix(tiny.hidden, tiny.mlp),
        }
        if tiny.bias:
            parts |= {"attn_q.bias": vector(queries, 0), "attn_k.bias": vector(keys, 0), "attn_v.bias": vector(keys, 0)}
        if tiny.qk_norm:
            parts |= {"attn_q_norm.weight": vector(tiny.head_dim), "attn_k_norm.weight": vector(tiny.head_dim)}
        arrays |= {f"blk.{layer}.{name}": values for name, values in parts.items()}
    return arrays


def logits(tiny: Tiny, arrays: Arrays, tokens: list[int]) -> np.ndarray:
    """Return the rows of logits of all positions, shape (tokens, vocabulary), in float64."""
    wide = {name: values.astype(np.float64) for name, values in arrays.items()}
    rows = wide["token_embd.weight"][tokens]
    for layer in range(tiny.layers):
        part = {name.removeprefix(f"blk.{layer}."): values for name, values in wide.items()}
        rows = rows + _attention(tiny, part, _norm(rows, part["attn_norm.weight"]), wide.get("rope_freqs.weight"))
        normed = _norm(rows, part["ffn_norm.weight"])
        gate = normed @ part["ffn_gate.weight"].T
        rows = rows + (gate / (1 + np.exp(-gate)) * (normed @ part["ffn_up.weight"].T)) @ part["ffn_down.weight"].T
    return _norm(rows, wide["output_norm.weight"]) @ wide.get("output.weight", wide["token_embd.weight"]).T


def _norm(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + 1e-5) * weight


def _attention(tiny: Tiny, part: Arrays, rows: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    def heads(name: str, count: int) -> np.ndarray:
        made = rows @ part[f"attn_{name}.weight"].T + part.get(f"attn_{name}.bias", 0.0)
        made = made.reshape(len(rows), count, tiny.head_dim)
        return _norm(made, part[f"attn_{name}_norm.weight"]) if f"attn_{name}_norm.weight" in part else made

    query = _rope(tiny, heads("q", tiny.heads), factors)
    key = np.repeat(_rope(tiny, heads("k", tiny.kv_heads), factors), tiny.heads // tiny.kv_heads, axis=1)
    value = np.repeat(heads("v", tiny.kv_heads), tiny.heads // tiny.kv_heads, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(tiny.head_dim)
    scores = np.where(np.tri(len(rows), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, value).reshape(len(rows), -1) @ part["attn_output.weight"].T


def _rope(tiny: Tiny, rows: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    half = tiny.head_dim // 2
    frequencies = 10000.0 ** (-np.arange(half) / half) / (1.0 if factors is None else factors)
    angles = np.arange(len(rows))[:, None, None] * frequencies
    if tiny.family == "llama":  # pairs (0, 1), (2, 3), ...
        first, second = rows[..., ::2], rows[..., 1::2]
    else:
        first, second = rows[..., :half], rows[..., half:]
    turned = first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)
    return np.stack(turned, axis=-1).reshape(rows.shape) if tiny.family == "llama" else np.concatenate(turned, axis=-1)
