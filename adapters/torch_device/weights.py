"""A model's weights as `prepare` writes them: safetensors files by layer, in the numbers that the source has.

    decoder.json              the DecoderSpec
    layer-00000.safetensors   the tensors of a layer by canonical name (adapters/decoder/spec.py)
    rest.safetensors          embedding, final norm, head

A name alone is a float32 or float16 tensor, `NAME:bf16` holds bit patterns, and `NAME:values` (4-bit ones in
pairs: `NAME:pairs`) with `NAME:scales` and `NAME:zeros` a matrix quantised by groups. What torchao quantised has
`NAME:values` or `NAME:pairs` with `NAME:scales` in float32, and with 4 bits `NAME:offsets`. In FP8 `NAME:float8` has
bit patterns. Nobody reads `gap.OFFSET`, which fills a file up to where the next tensor begins.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adapters.contract import LayerRange, ModelRefused
from adapters.decoder.from_safetensors import tensor_names
from adapters.decoder.pieces import cut_rows
from adapters.decoder.spec import DecoderSpec, Dense, Grouped, Rope, pack_pairs
from adapters.decoder.weight_file import Array, Block, WeightFile
from adapters.source_meter import SourceMeter
from adapters.torch_device.split import Cut, RankPart

_SPEC_FILE = "decoder.json"
_REST = "rest"
_TENSOR_HEAD_BYTES = 1024
"""More than the head of a file says of a tensor, which is up to three arrays and what lies between them."""
_HEAD_LENGTH = struct.Struct("<Q")
_KINDS = {"float32": "F32", "float16": "F16", "uint16": "U16", "uint8": "U8", "int8": "I8"}


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix as torchao quantised it. `values`: (rows, columns). With 8 bits int8, `scales` (rows, 1), no `offsets`:
    values * scales. With 4 bits uint8 below 16, `scales` and `offsets` (rows, groups): (values - 8) * scales + offsets.
    """

    values: NDArray[np.int8] | NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None

    @property
    def bits(self) -> int:
        return 8 if self.offsets is None else 4

    def float32(self) -> NDArray[np.float32]:
        """Return what the matrix stands for, in float32."""
        groups = self.values.reshape(*self.scales.shape, -1).astype(np.float32)
        if self.offsets is None:
            return (groups * self.scales[..., None]).reshape(self.values.shape)
        made = (groups - np.float32(8)) * self.scales[..., None] + self.offsets[..., None]
        return made.reshape(self.values.shape)


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """A matrix in FP8 as torchao quantised it: bit `patterns` (rows, columns) of e4m3 numbers, and `scales` (rows, 1):
    values * scales."""

    patterns: NDArray[np.uint8]
    scales: NDArray[np.float32]

    def float32(self) -> NDArray[np.float32]:
        """Return what the matrix stands for, in float32."""
        made: NDArray[np.float32] = _E4M3[self.patterns] * self.scales
        return made


def _list_e4m3() -> NDArray[np.float32]:
    """Return the value of each of the 256 patterns: a sign, four bits of an exponent with bias 7, three of a fraction.
    There is no infinity, and all ones are no number."""
    patterns = np.arange(256)
    exponents, fractions = patterns >> 3 & 15, patterns & 7
    normal = (1.0 + fractions / 8.0) * np.exp2(exponents - 7.0)
    values = np.where(exponents == 0, fractions / 8.0 * np.exp2(-6.0), normal)
    values[(patterns & 127) == 127] = np.nan
    signed: NDArray[np.float32] = np.where(patterns & 128, -values, values).astype(np.float32)
    return signed


_E4M3 = _list_e4m3()

Quantised = Affine | Float8Rows
Stored = Dense | Grouped | Quantised


class StoredWeights(Protocol):
    """`adapters.decoder.spec.Weights`, quantised by torchao or not."""

    @property
    def spec(self) -> DecoderSpec: ...

    def tensor(self, name: str) -> Stored:
        """Return the tensor of a canonical name. Raises ModelRefused."""
        ...


def write_weights(weights: StoredWeights, target: Path, meter: SourceMeter) -> None:
    """Write spec and tensors into `target`, or go on with what an earlier call left there. `meter` counts what is read.
    Raises ModelRefused for a damaged source, OSError."""
    (target / _SPEC_FILE).write_text(json.dumps(asdict(weights.spec)), encoding="utf-8")
    for part, names in _parts(weights.spec, weights.spec.all_layers).items():
        _write_file(weights, names, target / f"{part}.safetensors", meter)


def _write_file(weights: StoredWeights, names: Sequence[str], path: Path, meter: SourceMeter) -> None:
    head_bytes = _TENSOR_HEAD_BYTES * len(names)
    with WeightFile(path, meter, head_bytes=head_bytes) as file:
        parts = [file.keep(name, partial(_list_arrays, weights, name)) for name in names]
        file.write_head(_format_head([block for part in parts for block in part.blocks], head_bytes))


def _format_head(blocks: Sequence[Block], size: int) -> bytes:
    """Return the head of a safetensors file, in which all bytes behind it belong to a tensor."""
    head: dict[str, dict[str, object]] = {}
    end = size
    for block in blocks:
        if block.offset > end:
            head[f"gap.{end}"] = _describe_place("U8", [block.offset - end], end - size, block.offset - size)
        end = block.offset + block.size
        head[block.name] = _describe_place(block.kind, block.shape, block.offset - size, end - size)
    length = size - _HEAD_LENGTH.size
    return _HEAD_LENGTH.pack(length) + json.dumps(head).encode().ljust(length)


def _describe_place(kind: str, shape: Sequence[int], first: int, end: int) -> dict[str, object]:
    return {"dtype": kind, "shape": list(shape), "data_offsets": [first, end]}


def read_decoder(prepared: Path) -> DecoderSpec:
    """Return the spec that `write_weights` wrote. Raises ModelRefused when it is gone or damaged."""
    try:
        fields = json.loads((prepared / _SPEC_FILE).read_text(encoding="utf-8"))
        ropes = tuple(Rope(tuple(rope["inverse_frequencies"]), rope["magnitude"]) for rope in fields["ropes"])
        return DecoderSpec(**(fields | {"ropes": ropes, "windows": tuple(fields["windows"])}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _build_damage_error(prepared / _SPEC_FILE, error) from error


def read_prepared_tensors(
    prepared: Path, spec: DecoderSpec, layers: LayerRange, part: RankPart | None = None
) -> Iterator[tuple[str, Stored]]:
    """Yield (canonical name, tensor) of a range of layers, file by file; layers are numbered from the range's first on.
    `part`: nothing but a rank's part of each is read. Raises ModelRefused when a file is gone or damaged."""
    from safetensors import SafetensorError, safe_open

    for stem, names in _parts(spec, layers).items():
        path = prepared / f"{stem}.safetensors"
        try:
            with safe_open(path, "np") as file:
                parts = [
                    (_renumber(name, layers.first), _read_tensor(file, name, part.find_cut(name) if part else None))
                    for name in names
                ]
        except (OSError, SafetensorError, KeyError) as error:
            raise _build_damage_error(path, error) from error
        yield from parts


def _build_damage_error(path: Path, error: Exception) -> ModelRefused:
    return ModelRefused(f"{path} cannot be read ({error}). Delete its directory, and start again.")


def _parts(spec: DecoderSpec, layers: LayerRange) -> dict[str, list[str]]:
    """Return the canonical names that a range of layers needs, by the file that holds them."""
    last = layers.end == spec.layers
    rest = {
        "embedding": layers.first == 0 or (last and spec.tied_embeddings),
        "final_norm": last,
        "head": last,
    }
    parts: dict[str, list[str]] = {}
    for name in tensor_names(spec):
        layer, _, _ = name.rpartition(".")
        if layers.first <= int(layer) < layers.end if layer else rest[name]:
            parts.setdefault(f"layer-{int(layer):05}" if layer else _REST, []).append(name)
    return parts


def _renumber(name: str, first: int) -> str:
    """Return the name of a layer's tensor where layer `first` is number 0."""
    layer, _, part = name.rpartition(".")
    return f"{int(layer) - first}.{part}" if layer else name


def _list_arrays(weights: StoredWeights, name: str) -> Iterator[Array]:
    tensor = weights.tensor(name)
    if isinstance(tensor, Dense):
        yield _describe(f"{name}:bf16" if tensor.bfloat16 else name, tensor.values)
        return
    if isinstance(tensor, Float8Rows):
        yield _describe(f"{name}:float8", tensor.patterns)
    elif tensor.bits == 4:
        pieces = (pack_pairs(part.astype(np.uint8, copy=False)) for part in cut_rows(tensor.values))
        yield Array(f"{name}:pairs", "U8", (len(tensor.values), tensor.values.shape[1] // 2), pieces)
    else:
        yield _describe(f"{name}:values", tensor.values)
    yield _describe(f"{name}:scales", tensor.scales)
    if isinstance(tensor, Grouped):
        yield _describe(f"{name}:zeros", tensor.zeros)
    elif isinstance(tensor, Affine) and tensor.offsets is not None:
        yield _describe(f"{name}:offsets", tensor.offsets)


def _describe(name: str, values: NDArray[Any]) -> Array:
    return Array(name, _KINDS[values.dtype.name], values.shape, [values])


def _read_tensor(file: Any, name: str, cut: Cut | None) -> Stored:
    held = [key for key in file.keys() if key.partition(":")[0] == name]  # noqa: SIM118  # it is no mapping
    if cut is None:
        return _tensor(name, {key: file.get_tensor(key) for key in held})
    rows = slice(cut.rows.start, cut.rows.stop)
    if cut.columns is None:
        return _tensor(name, {key: file.get_slice(key)[rows] for key in held})
    widths = {key: file.get_slice(key).get_shape()[1] for key in held}
    bounds = (cut.columns.start, cut.columns.stop)
    if any(bound * width % cut.width for bound in bounds for width in widths.values() if width > 1):
        whole = _tensor(name, {key: file.get_tensor(key) for key in held})
        return Dense(whole.float32()[rows, slice(*bounds)])  # a group of weights is cut
    arrays = {}
    for key, width in widths.items():  # one column: a scale for a whole row
        columns = slice(*(bound * width // cut.width for bound in bounds)) if width > 1 else slice(None)
        arrays[key] = np.ascontiguousarray(file.get_slice(key)[rows, columns])
    return _tensor(name, arrays)


def _tensor(name: str, stored: Mapping[str, NDArray[Any]]) -> Stored:
    if name in stored:
        return Dense(stored[name])
    if f"{name}:bf16" in stored:
        return Dense(stored[f"{name}:bf16"], bfloat16=True)
    scales, zeros = stored[f"{name}:scales"], stored.get(f"{name}:zeros")
    if f"{name}:float8" in stored:
        return Float8Rows(stored[f"{name}:float8"], scales)
    pairs = stored.get(f"{name}:pairs")
    values = stored[f"{name}:values"] if pairs is None else _unpack_pairs(pairs)
    if zeros is None:
        return Affine(values, scales, None if pairs is None else stored[f"{name}:offsets"])
    return Grouped(values, scales, zeros, 8 if pairs is None else 4, values.shape[1] // scales.shape[1])


def _unpack_pairs(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
