"""A model's weights as `prepare` writes them: safetensors files by layer, in the numbers that the source has.

    decoder.json              the DecoderSpec
    layer-00000.safetensors   the tensors of a layer by canonical name (adapters/decoder/spec.py)
    rest.safetensors          embedding, final norm, head

A name alone is a float32 or float16 tensor, `NAME:bf16` holds bit patterns, and `NAME:values` (4-bit ones in
pairs: `NAME:pairs`) with `NAME:scales` and `NAME:zeros` a matrix quantised by groups. Written layer by layer, so that
memory holds one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ModelRefused
from adapters.decoder.from_safetensors import tensor_names
from adapters.decoder.spec import DecoderSpec, Dense, Grouped, Rope, Tensor, Weights, packed_pairs

_SPEC_FILE = "decoder.json"
_REST = "rest"


def write_weights(weights: Weights, target: Path) -> None:
    """Write spec and tensors into `target`. Raises ModelRefused for a damaged source, OSError."""
    from safetensors.numpy import save_file

    (target / _SPEC_FILE).write_text(json.dumps(asdict(weights.spec)), encoding="utf-8")
    for part, names in _parts(weights.spec).items():
        tensors: dict[str, NDArray[Any]] = {}
        for name in names:
            tensors |= _stored(name, weights.tensor(name))
        save_file(tensors, target / f"{part}.safetensors")


def read_decoder(prepared: Path) -> DecoderSpec:
    """Return the spec that `write_weights` wrote. Raises ModelRefused when it is gone or damaged."""
    try:
        fields = json.loads((prepared / _SPEC_FILE).read_text(encoding="utf-8"))
        ropes = tuple(Rope(tuple(rope["inverse_frequencies"]), rope["magnitude"]) for rope in fields["ropes"])
        return DecoderSpec(**(fields | {"ropes": ropes, "windows": tuple(fields["windows"])}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(prepared / _SPEC_FILE, error) from error


def read_tensors(prepared: Path, spec: DecoderSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, tensor), part by part. Raises ModelRefused when a file is gone or damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    for part, names in _parts(spec).items():
        path = prepared / f"{part}.safetensors"
        try:
            stored = load_file(path)
            found = [(name, _tensor(name, stored)) for name in names]
        except (OSError, SafetensorError, KeyError) as error:
            raise _damaged(path, error) from error
        yield from found


def _damaged(path: Path, error: Exception) -> ModelRefused:
    return ModelRefused(f"{path} cannot be read ({error}). Delete its directory, and start again.")


def _parts(spec: DecoderSpec) -> dict[str, list[str]]:
    """Return the canonical names by the file that holds them."""
    parts: dict[str, list[str]] = {}
    for name in tensor_names(spec):
        layer, _, _ = name.rpartition(".")
        parts.setdefault(f"layer-{int(layer):05}" if layer else _REST, []).append(name)
    return parts


def _stored(name: str, tensor: Tensor) -> dict[str, NDArray[Any]]:
    if isinstance(tensor, Dense):
        return {f"{name}:bf16" if tensor.bfloat16 else name: np.ascontiguousarray(tensor.values)}
    if tensor.bits == 4:
        values = {f"{name}:pairs": packed_pairs(tensor.values)}
    else:
        values = {f"{name}:values": np.ascontiguousarray(tensor.values)}
    return values | {f"{name}:scales": tensor.scales, f"{name}:zeros": tensor.zeros}


def _tensor(name: str, stored: Mapping[str, NDArray[Any]]) -> Tensor:
    if name in stored:
        return Dense(stored[name])
    if f"{name}:bf16" in stored:
        return Dense(stored[f"{name}:bf16"], bfloat16=True)
    scales, zeros = stored[f"{name}:scales"], stored[f"{name}:zeros"]
    pairs = stored.get(f"{name}:pairs")
    if pairs is None:
        values = stored[f"{name}:values"]
        return Grouped(values, scales, zeros, 8, values.shape[1] // scales.shape[1])
    values = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
    return Grouped(values, scales, zeros, 4, values.shape[1] // scales.shape[1])
