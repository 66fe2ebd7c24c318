"""Compares a stream with the undisturbed run of the same request: which tokens are wrong, lost or doubled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

_PIECES = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True, slots=True)
class Difference:
    """`wrong` tokens stand where the undisturbed run has other ones, `lost` ones are missing, and `doubled` ones repeat
    what stands beside them."""

    wrong: int = 0
    lost: int = 0
    doubled: int = 0

    def __bool__(self) -> bool:
        return bool(self.wrong or self.lost or self.doubled)

    def __add__(self, other: Difference) -> Difference:
        return Difference(self.wrong + other.wrong, self.lost + other.lost, self.doubled + other.doubled)


NO_DIFFERENCE = Difference()


def split_text(text: str) -> list[str]:
    """Return the words of a text, each with the space before it: together they are the text."""
    return _PIECES.findall(text)


def compare_tokens(expected: Sequence[str], found: Sequence[str], *, whole: bool = True) -> Difference:
    """Return in what `found` differs. A stream that was broken off (not `whole`) is compared as far as it came.

    Both ends that agree are left aside, so a single gap, repetition or substitution is counted exactly.
    """
    if not whole:
        expected = _cut_at_break(expected, found)
    start = _count_alike(expected, found)
    most = min(len(expected), len(found)) - start
    end = min(most, _count_alike(expected[::-1], found[::-1]))
    total = NO_DIFFERENCE
    middle, got = expected[start : len(expected) - end], found[start : len(found) - end]
    for tag, left, right, low, high in SequenceMatcher(None, middle, got, autojunk=False).get_opcodes():
        wanted, here = right - left, high - low
        if tag == "delete":
            total += Difference(lost=wanted)
        elif tag == "insert":
            repeats = _repeats(found, start + low, start + high)
            total += Difference(doubled=here) if repeats else Difference(wrong=here)
        elif tag == "replace":
            total += Difference(wrong=here, lost=max(0, wanted - here))
    return total


def _cut_at_break(expected: Sequence[str], found: Sequence[str]) -> Sequence[str]:
    """Return the part of the undisturbed run that a broken stream can have had."""
    alike = _count_alike(expected, found)
    return expected[: len(found)] if alike < len(found) else expected[:alike]


def _count_alike(left: Sequence[str], right: Sequence[str]) -> int:
    most = min(len(left), len(right))
    return next((index for index in range(most) if left[index] != right[index]), most)


def _repeats(found: Sequence[str], low: int, high: int) -> bool:
    """Return whether a run says again what stands beside it, wherever in the repetition it was cut out."""
    period = high - low
    before = 0
    while before < period and low - 1 - before >= 0 and found[low - 1 - before] == found[high - 1 - before]:
        before += 1
    behind = 0
    while behind < period and high + behind < len(found) and found[high + behind] == found[low + behind]:
        behind += 1
    return before + behind >= period
