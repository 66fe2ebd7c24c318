"""Which part of a decoder each rank of tensor parallelism holds (arXiv 1909.08053). No torch.

Query, key, value, gate and up are cut by their outputs, output and down by their inputs: what the ranks' products over
these give is added up. Embedding and head are cut by tokens, norms are whole everywhere. A key head goes with the query
heads that share it. Where there are more ranks than key heads, several hold one, each with some of its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapters.contract import Unsupported
from adapters.decoder.spec import DecoderSpec, describe_too_many

_UNITS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Parts are multiples of one of these where that is possible: kernels and groups of quantised weights have such
widths."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of a tensor: rows, and columns of `width` where these are cut, else None."""

    rows: range
    columns: range | None = None
    width: int = 0


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank holds of a decoder: ranges of heads, of the MLP's inner values, and of tokens."""

    decoder: DecoderSpec
    heads: range
    kv_heads: range
    mlp: range
    tokens: range
    outputs: range

    def find_cut(self, name: str) -> Cut | None:
        """Return what is kept of the tensor of a canonical name, None where that is all of it."""
        part = name.rpartition(".")[2].removesuffix("_bias")
        size = self.decoder.head_dim
        rows = {
            "embedding": self.tokens,
            "head": self.outputs,
            "query": _widen(self.heads, size),
            "key": _widen(self.kv_heads, size),
            "value": _widen(self.kv_heads, size),
            "gate": self.mlp,
            "up": self.mlp,
        }
        if part in rows:
            return Cut(rows[part])
        columns = {"output": _widen(self.heads, size), "down": self.mlp}
        if part not in columns:
            return None
        height, width = self.decoder.shape_of(name)
        return Cut(range(height), columns[part], width)


def split_decoder(decoder: DecoderSpec, ranks: int) -> tuple[RankPart, ...]:
    """Return what each rank holds; parts may differ by one head. Raises Unsupported where one would hold none."""
    if ranks > decoder.most_ranks:
        raise Unsupported(describe_too_many(decoder, ranks))
    heads = _split_heads(decoder, ranks)
    mlp = _split_even(decoder.mlp, ranks)
    tokens = _split_even(decoder.vocabulary_size, ranks)
    outputs = _split_even(decoder.outputs, ranks)
    return tuple(RankPart(decoder, *heads[rank], mlp[rank], tokens[rank], outputs[rank]) for rank in range(ranks))


def _split_heads(decoder: DecoderSpec, ranks: int) -> list[tuple[range, range]]:
    shared = decoder.heads // decoder.kv_heads
    if ranks <= decoder.kv_heads:
        keys = [_take(decoder.kv_heads, rank, ranks) for rank in range(ranks)]
        return [(_widen(own, shared), own) for own in keys]
    parts = []
    for key in range(decoder.kv_heads):
        count = len(_take(ranks, key, decoder.kv_heads))
        for part in range(count):
            own = _take(shared, part, count)
            parts.append((range(key * shared + own.start, key * shared + own.stop), range(key, key + 1)))
    return parts


def _split_even(count: int, ranks: int) -> list[range]:
    """Return ranges in units as wide as possible: first of all alike, then of at least one each."""
    alike = [unit for unit in _UNITS if count % (unit * ranks) == 0]
    fitting = [unit for unit in _UNITS if count % unit == 0 and count // unit >= ranks]
    unit = (alike or fitting)[0]
    return [_widen(_take(count // unit, rank, ranks), unit) for rank in range(ranks)]


def _take(count: int, rank: int, ranks: int) -> range:
    """Return one of `ranks` ranges of `count`, which differ by one at most: the first is not the longest, for rank 0
    has more to do than its part."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def _widen(part: range, size: int) -> range:
    return range(part.start * size, part.stop * size)
