"""Decodes GGUF's tensor data: quantised blocks to groups, everything else to arrays.

Q4_0 and Q8_0 keep their quantised values. Every other quantised format is dequantised by the gguf library and held in
8 bits on its own lattice (lattice.py). Q4_1 and Q4_K can be had in 4 bits too. Q4_1 stores q * d + m, and a 4-bit
group is (q - zero) * scale with a whole zero: m becomes the nearest one, -m / d rounded half away from zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ModelRefused
from adapters.decoder.draft_outputs import FOUR_BITS
from adapters.decoder.eight_bits import eight_bits
from adapters.decoder.finite import demand_finite
from adapters.decoder.lattice import GROUP_SIZE, in_8_bits, with_whole_zeros
from adapters.decoder.spec import Dense, Grouped, Tensor

KEPT = {0: "fp32", 1: "fp16", 2: "int4 (Q4_0)", 8: "int8 (Q8_0)", 30: "bf16"}
"""GGUF tensor types whose numbers are kept as they are, and how people call them."""
ROUNDED = {3: "Q4_1", 12: "Q4_K"}
"""4-bit types with offsets that are no whole steps."""
_ON_LATTICES = {**ROUNDED, 6: "Q5_0", 7: "Q5_1", 13: "Q5_K"}
"""Types with one lattice for each 32 values, which 8 bits hold."""

Raw = NDArray[np.uint8]


def vector(kind: int, raw: Raw) -> NDArray[np.float32]:
    """Return a tensor of one axis in float32; `kind` is its GGUF type. Raises KeyError for a quantised one."""
    values: NDArray[Any] = _DENSE[kind](raw)
    return values.astype(np.float32)


def matrix(kind: int, raw: Raw, rows: int) -> Tensor:
    """Return a tensor of two axes; `raw` holds its `rows` rows. Raises ModelRefused for an unknown type."""
    if kind in _GROUPED:
        return _GROUPED[kind](raw.reshape(rows, -1))
    if kind in _DENSE:
        return Dense(_DENSE[kind](raw).reshape(rows, -1), bfloat16=kind == _BF16)
    return in_8_bits(_dequantise(kind, raw).reshape(rows, -1))


def matrix_in_8_bits(kind: int, raw: Raw, rows: int) -> Tensor:
    """Return what `matrix` does, but with quantised matrices in 8 bits, the values of 4-bit ones kept exactly."""
    tensor = matrix(kind, raw, rows)
    return tensor if isinstance(tensor, Dense) else eight_bits(tensor)


def matrix_in_4_bits(kind: int, raw: Raw, rows: int) -> Tensor:
    """Return what `matrix` does, but in 4 bits, whatever that costs: formats that are not of 4 bits are rounded to
    Q4_0. Rows that do not divide into its groups stay."""
    if kind in ROUNDED or kind == FOUR_BITS:
        return matrix_with_whole_zeros(kind, raw, rows)
    values = exact_matrix(kind, raw, rows).float32()
    if values.shape[1] % GROUP_SIZE:
        return matrix(kind, raw, rows)
    return _q4_0(quantise_rows(demand_finite(values), FOUR_BITS))


def matrix_with_whole_zeros(kind: int, raw: Raw, rows: int) -> Tensor:
    """Return what `matrix` does, but with 4-bit formats in 4 bits, their offsets rounded to whole steps."""
    if kind == _Q4_1:
        return _q4_1(raw.reshape(rows, -1))
    if kind in ROUNDED:
        return with_whole_zeros(_dequantise(kind, raw).reshape(rows, -1))
    return matrix(kind, raw, rows)


def exact_matrix(kind: int, raw: Raw, rows: int) -> Dense:
    """Return a tensor of two axes with exactly the file's values, in float32 where they are quantised."""
    if kind in _DENSE:
        return Dense(_DENSE[kind](raw).reshape(rows, -1), bfloat16=kind == _BF16)
    return Dense(_dequantise(kind, raw).reshape(rows, -1))


def dequantise_rows(kind: int, raw: Raw) -> NDArray[np.float32]:
    """Return rows of values in float32; `raw` holds their bytes, shape (rows, bytes of a row)."""
    return exact_matrix(kind, np.ascontiguousarray(raw).reshape(-1), len(raw)).float32()


def quantise_rows(values: NDArray[np.float32], kind: int) -> Raw:
    """Return the bytes of rows of values in a quantised GGUF type, shape (rows, bytes of a row), as llama.cpp's
    quantiser gives them."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    packed: Raw = quantize(values, GGMLQuantizationType(kind))
    return packed


def is_dense(kind: int) -> bool:
    """Return whether a GGUF type holds numbers in full: its tensors lie over the file."""
    return kind in _DENSE


def _dequantise(kind: int, raw: Raw) -> NDArray[np.float32]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        with np.errstate(all="ignore"):  # what is no number is told by name, not as a warning
            values: NDArray[np.float32] = dequantize(np.asarray(raw), GGMLQuantizationType(kind))
    except NotImplementedError:
        raise ModelRefused(f"the gguf library cannot dequantise {type_name(kind)}") from None
    return demand_finite(values)


@lru_cache
def can_read(kind: int, axes: int) -> bool:
    """Return whether tensors of so many axes and of this GGUF type can be decoded here: one zero block is tried."""
    if kind in _DENSE:
        return axes in (1, 2)
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if axes != 2 or elements % GROUP_SIZE:
        return False
    try:
        dequantize(np.zeros((1, size), np.uint8), GGMLQuantizationType(kind))
    except (NotImplementedError, ValueError):
        return False
    return True


def label_of(kind: int, rounded: Sequence[int] = ()) -> str:
    """Return how people call a file whose matrices are mostly of a type; `rounded`: its types that lost offsets."""
    if kind in rounded:
        return f"int4 ({ROUNDED[kind]}, zero points rounded to integers)"
    label = f"int8 ({_ON_LATTICES[kind]}'s values)" if kind in _ON_LATTICES else KEPT.get(kind)
    label = label or f"int8 (requantised from {type_name(kind)})"
    names = " and ".join(ROUNDED[rounded_kind] for rounded_kind in rounded)
    return f"{label}, zero points of {names} rounded to integers" if rounded else label


def type_name(kind: int) -> str:
    """Return llama.cpp's name of a tensor type ("Q4_1")."""
    from gguf import GGMLQuantizationType

    return str(GGMLQuantizationType(kind).name)


def _q4_0(rows: Raw) -> Grouped:
    blocks = rows.reshape(len(rows), -1, 18)
    scales = _halves(blocks, 0)
    return _build_grouped(_nibbles(blocks[:, :, 2:]), scales, np.full(scales.shape, 8, np.uint8), 4)


def _q4_1(rows: Raw) -> Grouped:
    blocks = rows.reshape(len(rows), -1, 20)
    scales, offsets = _halves(blocks, 0), _halves(blocks, 2)
    values = _nibbles(blocks[:, :, 4:])
    constant = scales == 0
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = -offsets.astype(np.float32) / scales.astype(np.float32)
    zeros = np.where(constant, 0, np.clip(np.floor(exact + 0.5), 0, 15)).astype(np.uint8)
    if constant.any():  # a block of one value m: 1 * m
        values.reshape(*constant.shape, GROUP_SIZE)[constant] = 1
        scales = np.where(constant, offsets, scales)
    return _build_grouped(values, scales, zeros, 4)


def _q8_0(rows: Raw) -> Grouped:
    blocks = rows.reshape(len(rows), -1, 34)
    scales = _halves(blocks, 0)
    values = np.bitwise_xor(blocks[:, :, 2:], 0x80).reshape(len(rows), -1)  # int8 + 128 in uint8
    return _build_grouped(values, scales, np.full(scales.shape, 128, np.uint8), 8)


def _build_grouped(values: Raw, scales: NDArray[np.float16], zeros: Raw, bits: Any) -> Grouped:
    return Grouped(values, scales, zeros, bits, GROUP_SIZE)


def _halves(blocks: Raw, at: int) -> NDArray[np.float16]:
    """Return the float16 at byte `at` of every block. Raises ModelRefused where one is no number."""
    numbers: NDArray[np.float16] = np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0]
    return demand_finite(numbers)


def _nibbles(packed: Raw) -> Raw:
    """Unpack blocks of 16 bytes: the low halves are elements 0..15, the high ones 16..31."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=2).reshape(len(packed), -1)


_BF16 = 30  # GGML's numbers of two kinds of blocks
_Q4_1 = 3  # as above
_DENSE = {
    0: lambda raw: raw.view("<f4"),
    1: lambda raw: raw.view("<f2"),
    _BF16: lambda raw: raw.view("<u2"),
}
_GROUPED = {FOUR_BITS: _q4_0, 8: _q8_0}
