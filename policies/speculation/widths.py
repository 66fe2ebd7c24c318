"""Rows that a forward runs whether they are used or not: a draft in them is free."""

from __future__ import annotations

from collections.abc import Sequence


def pad_to_width(rows: int, widths: Sequence[int]) -> int:
    """Return how many rows are paid for where `rows` are run in forwards of these `widths` (ascending, not empty).

    That is up to the next width, and up to a multiple of the widest one beyond it.
    """
    for width in widths:
        if rows <= width:
            return width
    return -(-rows // widths[-1]) * widths[-1]
