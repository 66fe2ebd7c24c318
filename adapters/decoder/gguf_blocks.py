"""Decodes GGUF's tensor data: quantised blocks to groups, everything else to arrays.

Q4_0, Q4_1 and Q8_0 keep their quantised values. Q4_1 stores q * d + m; a group is (q - zero) * scale with a whole
zero, so m becomes the nearest one, -m / d rounded half away from zero. With 8 bits the step is d / 16 and the zero's
rounding error a sixteenth of that. Every other quantised format is dequantised by the gguf library and quantised again
to 8 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import ModelRefused
from adapters.decoder.spec import Dense, Grouped, Tensor

GROUP_SIZE = 32
KEPT = {0: "fp32", 1: "fp16", 2: "int4 (Q4_0)", 3: "int4 (Q4_1, whole zeros)", 8: "int8 (Q8_0)", 30: "bf16"}
"""GGUF tensor types that are not quantised again, and how people call them."""

Raw = NDArray[np.uint8]


def vector(kind: int, raw: Raw) -> NDArray[np.float32]:
    """Return a tensor of one axis in float32; `kind` is its GGUF type. Raises KeyError for a quantised one."""
    found: NDArray[Any] = _DENSE[kind](raw)
    return found.astype(np.float32)


def matrix(kind: int, raw: Raw, rows: int) -> Tensor:
    """Return a tensor of two axes; `raw` holds its `rows` rows. Raises ModelRefused for an unknown type."""
    if kind in _GROUPED:
        return _GROUPED[kind](raw.reshape(rows, -1))
    if kind in _DENSE:
        return Dense(_DENSE[kind](raw).reshape(rows, -1), bfloat16=kind == _BF16)
    return requantised(_dequantised(kind, raw).reshape(rows, -1))


def matrix_in_8_bits(kind: int, raw: Raw, rows: int) -> Tensor:
    """Return what `matrix` does, but with quantised matrices in 8 bits: the values of Q4_0 and Q8_0 are kept exactly,
    those of Q4_1 to a thirty-second of a step."""
    if kind == _Q4_1:
        return _q4_1_in_8_bits(raw.reshape(rows, -1))
    found = matrix(kind, raw, rows)
    if isinstance(found, Dense) or found.bits == 8:
        return found
    return Grouped(found.values, found.scales, found.zeros, 8, found.group_size)


def exact_matrix(kind: int, raw: Raw, rows: int) -> Dense:
    """Return a tensor of two axes with exactly the file's values, in float32 where they are quantised."""
    if kind in _DENSE:
        return Dense(_DENSE[kind](raw).reshape(rows, -1), bfloat16=kind == _BF16)
    return Dense(_dequantised(kind, raw).reshape(rows, -1))


def requantised(values: NDArray[np.float32]) -> Grouped:
    """Quantise to 8 bits, symmetric, with the largest magnitude of a group at 127."""
    groups = values.reshape(len(values), -1, GROUP_SIZE)
    scales = (np.abs(groups).max(axis=2) / 127.0).astype(np.float16)
    divisor = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
    quantised = np.clip(np.round(groups / divisor[:, :, None]), -128, 127) + 128
    return _grouped(quantised.astype(np.uint8).reshape(values.shape), scales, np.full(scales.shape, 128, np.uint8), 8)


def _dequantised(kind: int, raw: Raw) -> NDArray[np.float32]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values: NDArray[np.float32] = dequantize(np.asarray(raw), GGMLQuantizationType(kind))
    except NotImplementedError:
        raise ModelRefused(f"the gguf library cannot dequantise {type_name(kind)}") from None
    return values


def type_name(kind: int) -> str:
    """Return llama.cpp's name of a tensor type ("Q4_1")."""
    from gguf import GGMLQuantizationType

    return str(GGMLQuantizationType(kind).name)


def _q4_0(rows: Raw) -> Grouped:
    blocks = rows.reshape(len(rows), -1, 18)
    scales = _halves(blocks, 0)
    return _grouped(_nibbles(blocks[:, :, 2:]), scales, np.full(scales.shape, 8, np.uint8), 4)


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
    return _grouped(values, scales, zeros, 4)


def _q4_1_in_8_bits(rows: Raw) -> Grouped:
    """(16 q - zero) * d / 16: exact but for the zero, whole sixteenths of a step. A block whose zero lies outside
    (its values are all of one sign, and far from 0) or whose step is too small to be divided is quantised again."""
    blocks = rows.reshape(len(rows), -1, 20)
    steps, offsets = _halves(blocks, 0), _halves(blocks, 2)
    values = _nibbles(blocks[:, :, 4:])
    with np.errstate(divide="ignore", invalid="ignore"):
        zeros = np.floor(-16.0 * offsets.astype(np.float32) / steps.astype(np.float32) + 0.5)
    scales = (steps.astype(np.float32) / 16.0).astype(np.float16)
    kept = (zeros >= 0) & (zeros <= 255) & (scales.astype(np.float32) * 16.0 == steps)
    wide = (values.reshape(*steps.shape, GROUP_SIZE) << 4).astype(np.uint8)
    if not kept.all():
        again = requantised(_dequantised(_Q4_1, rows).reshape(values.shape))
        wide[~kept] = again.values.reshape(wide.shape)[~kept]
        scales, zeros = np.where(kept, scales, again.scales), np.where(kept, zeros, again.zeros)
    return _grouped(wide.reshape(values.shape), scales, zeros.astype(np.uint8), 8)


def _q8_0(rows: Raw) -> Grouped:
    blocks = rows.reshape(len(rows), -1, 34)
    scales = _halves(blocks, 0)
    values = np.bitwise_xor(blocks[:, :, 2:], 0x80).reshape(len(rows), -1)  # int8 + 128 in uint8
    return _grouped(values, scales, np.full(scales.shape, 128, np.uint8), 8)


def _grouped(values: Raw, scales: NDArray[np.float16], zeros: Raw, bits: Any) -> Grouped:
    return Grouped(values, scales, zeros, bits, GROUP_SIZE)


def _halves(blocks: Raw, at: int) -> NDArray[np.float16]:
    """Return the float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0]


def _nibbles(packed: Raw) -> Raw:
    """Unpack blocks of 16 bytes: the low halves are elements 0..15, the high ones 16..31."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=2).reshape(len(packed), -1)


_BF16 = 30
_Q4_1 = 3
_DENSE = {
    0: lambda raw: raw.view("<f4"),
    1: lambda raw: raw.view("<f2"),
    _BF16: lambda raw: raw.view("<u2"),
}
_GROUPED = {2: _q4_0, 3: _q4_1, 8: _q8_0}
