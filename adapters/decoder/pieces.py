"""Decodes a large matrix a few rows at a time, on all cores: what decoding needs beside its result stays small."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import numpy as np

from adapters.decoder.spec import Dense, Grouped, Tensor
from adapters.hardware import count_logical_cores

_PIECE_ELEMENTS: Final = 1 << 19
"""Decoding takes about 40 bytes for each of them, in each thread."""
_MOST_THREADS: Final = 16


def decode_in_pieces(
    decode: Callable[[slice], Tensor], shape: tuple[int, int], on_rows: Callable[[int], None]
) -> Tensor:
    """Return what `decode` makes of all rows of a matrix of this shape, made of some of them at a time. `on_rows` hears
    how many are done. Raises what `decode` does."""
    rows, columns = shape
    step = max(1, _PIECE_ELEMENTS // columns)
    parts = [slice(first, min(rows, first + step)) for first in range(0, rows, step)]
    if len(parts) == 1:
        found = decode(parts[0])
        on_rows(rows)
        return found
    joined: Tensor | None = None
    with ThreadPoolExecutor(min(count_logical_cores(), len(parts), _MOST_THREADS)) as pool:
        for part, piece in zip(parts, pool.map(decode, parts), strict=True):
            joined = _reserve(piece, rows) if joined is None else joined
            _put(joined, part, piece)
            on_rows(part.stop)
    assert joined is not None  # noqa: S101  # there are rows
    return joined


def _reserve(piece: Tensor, rows: int) -> Tensor:
    """Return a tensor of so many rows like this one, not filled yet."""
    if isinstance(piece, Dense):
        return replace(piece, values=_empty_like(piece.values, rows))
    values, scales, zeros = (_empty_like(array, rows) for array in (piece.values, piece.scales, piece.zeros))
    return replace(piece, values=values, scales=scales, zeros=zeros)


def _empty_like(array: Any, rows: int) -> Any:
    return np.empty((rows, *array.shape[1:]), array.dtype)


def _put(whole: Tensor, part: slice, piece: Tensor) -> None:
    whole.values[part] = piece.values
    if isinstance(whole, Grouped) and isinstance(piece, Grouped):
        whole.scales[part], whole.zeros[part] = piece.scales, piece.zeros
