"""Forwards on a GPU of llama.cpp: which rows share one is a matter of positions alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import Segment
from adapters.llama_cpp.contexts import choose_width, cut_at_borders

WIDTHS = st.sampled_from((1, 4, 8, 16))
BORDER = 32


@given(WIDTHS, st.integers(0, 70), st.integers(1, 90), st.data())
def test_pieces_are_the_segment_and_none_reaches_over_a_border(width, start, count, data):
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    segment = Segment(3, start, list(range(count)), (first, last))
    pieces = list(cut_at_borders(segment, width, BORDER))
    assert [token for piece in pieces for token in piece.tokens] == segment.tokens
    assert sum(piece.rows[1] - piece.rows[0] for piece in pieces) == last - first
    at = start
    for piece in pieces:
        rows = choose_width(piece.start, width, BORDER)
        assert piece.start == at
        assert len(piece.tokens) <= rows
        assert piece.start // BORDER == (piece.start + rows - 1) // BORDER
        at += len(piece.tokens)


@given(WIDTHS, st.integers(0, 70), st.integers(0, 70), st.integers(0, 99))
def test_a_position_is_in_a_forward_of_the_same_width_wherever_a_segment_begins(width, start, other, position):
    def find_width(begin: int) -> int:
        segment = Segment(0, begin, [0] * (position - begin + 20), (0, 0))
        pieces = cut_at_borders(segment, width, BORDER)
        piece = next(piece for piece in pieces if piece.start <= position < piece.start + len(piece.tokens))
        return choose_width(piece.start, width, BORDER)

    assert find_width(min(start, position)) == find_width(min(other, position))
