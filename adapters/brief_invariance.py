"""A short check of whether a loaded model is row-invariant, before its first answer: `invariance` has the whole one.

Each kind of forward that serving makes is run once, and compared with one forward of the probe. They are single tokens
and small numbers of them, single rows that are wanted of several, company, and positions about a border of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adapters.contract import LoadedModel, Logits, MovableKv, Segment
from adapters.invariance import Probe, find_variance, same_bits
from device_profiles.units import ceil_div


@dataclass(frozen=True, slots=True)
class _Piece:
    """A segment of the probe's text: so many rows, of which the logits of `wanted` are. `beside`: rows of another
    sequence in the same forward."""

    rows: int
    wanted: tuple[int, int]
    beside: int = 0


PIECES = (
    _Piece(1, (0, 1)),
    _Piece(2, (0, 2)),
    _Piece(3, (2, 3), beside=2),
    _Piece(4, (0, 4)),
    _Piece(5, (0, 1), beside=1),
    _Piece(6, (0, 6)),
    _Piece(7, (3, 4)),
    _Piece(8, (0, 8), beside=4),
    _Piece(9, (8, 9)),
    _Piece(2, (0, 0)),
    _Piece(1, (0, 1)),
    _Piece(17, (0, 17)),
)
"""Kernels take rows in groups of up to eight, and what is left over: every such rest is here."""
# Where company's text begins in the probe: other tokens than the ones beside it. Any such place does.
_COMPANY_BEGINS = 7
_COMPANY = sum(piece.beside for piece in PIECES)
_BORDER = 256
"""Kernels of attention read positions in blocks of up to so many. ADR 0109: llama.cpp on GPUs sums in another order
beyond each multiple."""
# Rows of the segments that reach over the border (ADR 0109). Any two that end on it do.
_BORDER_PIECES = (2, 4)
# Positions before the border at which they begin: so that one of them crosses it.
_BEFORE_BORDER = 3
_AGAIN = (20, 24)
"""Rows of the probe that are computed once more, where the cache reaches beyond the border. ADR 0109: the brief check
takes 4.9 s on the 1.5B, all groupings of 40 tokens took 8.8 s."""


def find_brief_variance(model: LoadedModel, probe: Probe) -> str:
    """Return as `find_variance` does, by some 20 small forwards beside the probe's. Uses the first two slots, free
    before and after. A model with kernels for rows apart is checked as a whole. Raises what `LoadedModel.forward`
    raises."""
    if model.capabilities.apart_tokens:
        return find_variance(model, far=False)
    try:
        return _vary_pieces(model, probe) or _vary_border(model, probe)
    finally:
        for slot in range(min(2, model.capabilities.slots)):
            model.release(slot)


def _vary_pieces(model: LoadedModel, probe: Probe) -> str:
    """Run the probe's text in pieces, some of them beside another sequence. The slots hold what was run."""
    company = probe.tokens[_COMPANY_BEGINS : _COMPANY_BEGINS + _COMPANY] if model.capabilities.slots > 1 else []
    alone = None
    if len(company) == _COMPANY:
        alone = _run(model, 1, 0, company)
        model.release(1)
    at = held = 0
    for piece in PIECES:
        tokens, (first, last) = probe.tokens[at : at + piece.rows], piece.wanted
        if len(tokens) < piece.rows:
            break
        batch = [Segment(0, at, tokens, piece.wanted)]
        if alone is not None and piece.beside:
            batch.append(Segment(1, held, company[held : held + piece.beside], (0, piece.beside)))
        logits = model.forward(batch).logits
        if not same_bits(logits[: last - first], probe.logits[at + first : at + last]):
            return f"{piece.rows} rows at a time, not {len(probe.tokens)}"
        if alone is not None and not same_bits(logits[last - first :], alone[held : held + piece.beside]):
            return f"{piece.beside} rows beside another sequence"
        at, held = at + piece.rows, held + piece.beside
    return ""


def _vary_border(model: LoadedModel, probe: Probe) -> str:
    """Run rows about the border, whole and in pieces, behind positions that are copies of what slot 0 begins with."""
    caps, rows = model.capabilities, sum(_BORDER_PIECES)
    held, end = _BORDER - _BEFORE_BORDER, _BORDER - _BEFORE_BORDER + rows
    room = min(caps.max_context_tokens, caps.total_blocks * caps.block_tokens)
    if end > room or not caps.rewinds or not isinstance(model, MovableKv):
        return ""
    page_tokens = model.kv_layout.page_tokens
    begin = ceil_div(_AGAIN[1], page_tokens) * page_tokens
    if model.count_cached_positions(0) < begin:
        return ""
    count = ceil_div(held, page_tokens)
    pages = [np.resize(cache, count * len(cache) // (begin // page_tokens)) for cache in model.export_kv(0, begin)]
    copied, tokens = np.concatenate(pages), probe.tokens[:rows]
    for slot in range(min(2, caps.slots)):
        model.release(slot)
    model.import_kv(0, held, copied)
    whole = _run(model, 0, held, tokens)
    first, last = _AGAIN
    if not same_bits(_run(model, 0, first, probe.tokens[first:last]), probe.logits[first:last]):
        return f"{last - first} rows of a cache of {end} positions, not of {len(probe.tokens)}"
    model.release(0)
    model.import_kv(0, held, copied)
    done = 0
    for count in _BORDER_PIECES:
        part = _run(model, 0, held + done, tokens[done : done + count])
        if not same_bits(part, whole[done : done + count]):
            return f"{count} rows at a time behind {held + done} positions, not {rows}"
        done += count
    return ""


def _run(model: LoadedModel, slot: int, start: int, tokens: Sequence[int]) -> Logits:
    return model.forward([Segment(slot, start, tokens, (0, len(tokens)))]).logits.copy()
