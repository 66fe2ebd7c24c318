"""Makes a large matrix a few rows at a time: what making it needs beside its result stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from adapters.decoder.spec import Dense, Grouped, Tensor
from adapters.hardware import count_logical_cores

_PIECE_ELEMENTS: Final = 1 << 19
"""Decoding takes about 40 bytes for each of them, in each thread. ADR 0107: 20 MB a thread; conversions peak at 0.41 to
0.53 of the file."""
_MOST_THREADS: Final = 16  # bounds memory on machines with many cores: 16 times 20 MB
# Of a piece: 16 MiB of float32 (ADR 0107). Bounds memory.
_PIECE_VALUES: Final = 1 << 22

_Made = TypeVar("_Made", bound=Any)
"""A dataclass whose arrays have a matrix's rows as their first axis."""


def cut_rows(matrix: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield a matrix some rows at a time."""
    step = max(1, _PIECE_VALUES // matrix.shape[1])
    return (matrix[first : first + step] for first in range(0, len(matrix), step))


def cut_tensor(tensor: _Made) -> Iterator[tuple[slice, _Made]]:
    """Yield a matrix some rows at a time, in the form that it has, and which rows these are."""
    arrays = {field.name: getattr(tensor, field.name) for field in fields(tensor)}
    matrices = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    rows, columns = next(iter(matrices.values())).shape
    step = max(1, _PIECE_VALUES // columns)
    for first in range(0, rows, step):
        part = slice(first, min(rows, first + step))
        yield part, replace(tensor, **{name: array[part] for name, array in matrices.items()})


def make_by_rows(make: Callable[[NDArray[Any]], _Made], matrix: NDArray[Any]) -> _Made:
    """Return what `make` makes of a matrix, made of some rows at a time: no row's part may depend on other rows."""
    parts = list(map(make, cut_rows(matrix)))
    arrays = {field.name: [getattr(part, field.name) for part in parts] for field in fields(parts[0])}
    joined = {name: np.concatenate(some) for name, some in arrays.items() if isinstance(some[0], np.ndarray)}
    return replace(parts[0], **joined) if len(parts) > 1 else parts[0]


def decode_in_pieces(
    decode: Callable[[slice], Tensor], shape: tuple[int, int], on_rows: Callable[[int], None]
) -> Tensor:
    """Return what `decode` makes of all rows of a matrix of this shape, made of some of them at a time. `on_rows` hears
    how many are done. Raises what `decode` does."""
    rows, columns = shape
    step = max(1, _PIECE_ELEMENTS // columns)
    parts = [slice(first, min(rows, first + step)) for first in range(0, rows, step)]
    first = decode(parts[0])
    on_rows(parts[0].stop)
    if len(parts) == 1:
        return first
    joined = _reserve(first, rows)
    _put(joined, parts[0], first)

    def fill(part: slice) -> None:
        _put(joined, part, decode(part))  # at once: pieces that wait for whoever puts them together take memory

    with ThreadPoolExecutor(min(count_logical_cores(), len(parts), _MOST_THREADS)) as pool:
        for part, _ in zip(parts[1:], pool.map(fill, parts[1:]), strict=True):
            on_rows(part.stop)
    return joined


def _reserve(piece: Tensor, rows: int) -> Tensor:
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
