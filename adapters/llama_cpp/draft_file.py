"""A draft's own GGUF file: the model's layers in 4 bits, and an output layer of the tokens that are said most.

The library wants as many rows of the embedding as of the output layer. So the file has a vocabulary without texts, as
large as the output layer, and both have rows for these tokens. The whole embedding lies beside it: a forward with other
tokens is given rows of that (`EmbeddingTable`).

    magic, version, count of tensors, count of pairs
    pairs        the model's own without its tokenizer, and what the new vocabulary is
    tensors      of each: name, count of axes, axes, type, and where its data begins
    data         each tensor padded to DEFAULT_ALIGNMENT_BYTES
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from adapters.contract import Progress
from adapters.decoder.draft_outputs import HEAD, TABLE, choose_kind, count_bytes
from adapters.decoder.gguf_blocks import dequantise_rows, quantise_rows
from adapters.gguf_header import DEFAULT_ALIGNMENT_BYTES, PREAMBLE, GgufHeader, GgufTensor, list_pairs

EMBEDDING: Final = "embedding.bin"
_LEFT_OUT: Final = ("tokenizer.", "split.", "general.alignment", "general.file_type")
"""Keys of the vocabulary, and of how the model's file was written."""
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_VERSION, _NUMBER, _TEXT = 3, 4, 8  # of the format, and its kinds of values
# Of a matrix that is converted at once, in float32: 16 MiB. Bounds memory. Not tuned.
_PIECE_ELEMENTS: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor of the new file, made of one of the model's, in the GGUF type `kind`. `rows`: which of its rows; None
    for all."""

    name: str
    source: GgufTensor
    kind: int
    rows: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape if self.rows is None else (self.source.shape[0], len(self.rows))

    @property
    def size(self) -> int:
        return count_bytes(self.kind, math.prod(self.shape))


def write_draft_file(header: GgufHeader, target: Path, outputs: Sequence[int], progress: Progress) -> None:
    """Write the file, with an output layer of the tokens `outputs` (none: of all), beside which the embedding is needed
    (`write_embedding`). Raises ModelRefused for values that are no numbers, and OSError."""
    tensors = list(_choose_tensors(header, outputs))
    pairs = _list_pairs(header, len(outputs) or _find_tensor(header, TABLE).shape[1])
    whole, done = sum(tensor.size for tensor in tensors), 0
    with target.open("wb") as file:
        file.write(PREAMBLE.pack(b"GGUF", _VERSION, len(tensors), len(pairs)))
        file.writelines(pairs)
        at = 0
        for tensor in tensors:
            axes = b"".join(map(_U64.pack, tensor.shape))
            file.write(_pack_text(tensor.name) + _U32.pack(len(tensor.shape)) + axes)
            file.write(_U32.pack(tensor.kind) + _U64.pack(at))
            at += tensor.size + -tensor.size % DEFAULT_ALIGNMENT_BYTES
        _pad(file)
        for tensor in tensors:
            _write_tensor(file, tensor)
            _pad(file)
            done += tensor.size
            progress(f"a draft of {header.path.name} in 4 bits", done / whole)


def _list_pairs(header: GgufHeader, vocabulary: int) -> list[bytes]:
    size = f"{header.text('general.architecture')}.vocab_size"
    kept = [pair for key, pair in list_pairs(header) if not key.startswith(_LEFT_OUT) and key != size]
    return [
        *kept,
        _pack_text("tokenizer.ggml.model") + _U32.pack(_TEXT) + _pack_text("no_vocab"),
        _pack_text(size) + _U32.pack(_NUMBER) + _U32.pack(vocabulary),
    ]


def _choose_tensors(header: GgufHeader, outputs: Sequence[int]) -> Iterator[_Written]:
    if not outputs:
        yield from (_Written(tensor.name, tensor, choose_kind(tensor)) for tensor in header.tensors)
        return
    names, rows = {tensor.name: tensor for tensor in header.tensors}, np.array(outputs, np.intp)
    table = names.pop(TABLE)
    head = names.pop(HEAD, table)
    yield _Written(TABLE, table, table.kind, rows)
    yield _Written(HEAD, head, choose_kind(head), rows)
    yield from (_Written(name, tensor, choose_kind(tensor)) for name, tensor in names.items())


def _write_tensor(file: BinaryIO, tensor: _Written) -> None:
    source = tensor.source
    rows = math.prod(source.shape[1:])
    raw = np.memmap(source.path, np.uint8, "r", offset=source.offset, shape=(rows, source.size // rows))
    step = max(1, _PIECE_ELEMENTS // source.shape[0])
    chosen = range(rows) if tensor.rows is None else tensor.rows
    for begin in range(0, len(chosen), step):
        piece = raw[chosen[begin : begin + step]] if tensor.rows is not None else raw[begin : begin + step]
        if tensor.kind != source.kind:
            piece = quantise_rows(dequantise_rows(source.kind, piece), tensor.kind)
        file.write(np.ascontiguousarray(piece).data)


def write_embedding(header: GgufHeader, directory: Path) -> dict[str, int]:
    """Write the rows of the model's embedding as they are, and return what `EmbeddingTable` needs to know of them."""
    table = _find_tensor(header, TABLE)
    with table.path.open("rb") as file, (directory / EMBEDDING).open("wb") as copy:
        file.seek(table.offset)
        left = table.size
        while left and (piece := file.read(min(left, _PIECE_ELEMENTS))):
            copy.write(piece)
            left -= len(piece)
    return {"kind": table.kind, "width": table.shape[0], "row_bytes": table.size // table.shape[1]}


class EmbeddingTable:
    """The rows of an embedding by their tokens, in a file that is mapped; and at which places a loaded model has some
    of them."""

    def __init__(self, directory: Path, outputs: Sequence[int], kind: int, width: int, row_bytes: int) -> None:
        """`outputs`: the tokens that the model has, in its order; `width`: values of a row. Raises OSError."""
        self.width, self._kind = width, kind
        self._raw = np.memmap(directory / EMBEDDING, np.uint8, "r").reshape(-1, row_bytes)
        self._places = {token: place for place, token in enumerate(outputs)}

    def find_places(self, tokens: Sequence[int]) -> list[int] | None:
        """Return where the model has some tokens; None where it does not have all of them."""
        try:
            return [self._places[token] for token in tokens]
        except KeyError:
            return None

    def read(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the rows of some tokens, float32, shape (tokens, width)."""
        return dequantise_rows(self._kind, self._raw[list(tokens)])


def _find_tensor(header: GgufHeader, name: str) -> GgufTensor:
    return next(tensor for tensor in header.tensors if tensor.name == name)


def _pack_text(text: str) -> bytes:
    raw = text.encode()
    return _U64.pack(len(raw)) + raw


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT_BYTES))
