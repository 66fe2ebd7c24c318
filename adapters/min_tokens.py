"""How many tokens a text has at the least, by its bytes alone: cheap, and never more than it has.

A token stands for the bytes that it covers. So a byte weighs at least 1 / (the longest token that holds such a byte),
and a text has at least as many tokens as its bytes weigh together. Digits weigh 1 each where every digit is a token of
its own; spaces weigh little, for there are tokens of many spaces.
"""

from __future__ import annotations

import json
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adapters.tokenizer_files import METASPACE

# ADR 0047: counting stops where it is enough, so a piece is what it may go too far: 8 MiB take 1 to 7 ms.
_PIECE_CHARACTERS = 1 << 16
_ROUNDING = 1.0 - 1e-9  # above what sums of float64 lose over 8 MiB
_IN_UTF8 = {*range(0x80), *range(0x80, 0xC0), *range(0xC2, 0xF5)}


class MinTokens:
    """Counts over a vocabulary whose tokens stand for these bytes, in any order. `composes`: a text is brought into
    NFC before it is cut into tokens. `spaces`: U+2581 is a space to it."""

    def __init__(self, pieces: Sequence[bytes], *, composes: bool = False, spaces: bool = False) -> None:
        self._composes = composes
        self._spaces = spaces
        longest = np.zeros(256)
        by_length: defaultdict[int, list[bytes]] = defaultdict(list)
        for piece in pieces:
            by_length[len(piece)].append(piece)
        for length in sorted(by_length):
            longest[list(set(b"".join(by_length[length])))] = length
        single = {piece[0] for piece in pieces if len(piece) == 1}
        usable = np.array([value in single and longest[value] > 0 for value in range(256)])
        self._weights = np.where(usable, 1.0 / np.maximum(longest, 1.0), 0.0)

    def count(self, text: str, enough: int) -> int:
        """Return the least number of tokens; it stops where that is above `enough`."""
        weight, start = 0.0, 0
        while start < len(text) and weight * _ROUNDING <= enough:
            end = self._find_end(text, start + _PIECE_CHARACTERS)
            piece = text[start:end]
            if self._composes and not piece.isascii():
                piece = unicodedata.normalize("NFC", piece)
            if self._spaces:
                piece = piece.replace(METASPACE, " ")
            counted = np.frombuffer(piece.encode("utf-8", "ignore"), dtype=np.uint8)
            weight, start = weight + float(self._weights[counted].sum()), end
        return int(weight * _ROUNDING)

    def _find_end(self, text: str, end: int) -> int:
        """Return where a piece may end, at `end` or behind: no character there may join one before it."""
        while self._composes and end < len(text) and _may_join(text[end]):
            end += 1
        return min(end, len(text))


def _may_join(character: str) -> bool:
    return unicodedata.category(character)[0] == "M" or "\u1160" <= character <= "\u11ff"


def measure_min_tokens(parsed: Mapping[str, Any], pieces: Sequence[bytes]) -> MinTokens | None:
    """Return what counts for a tokenizer.json; None where its tokens do not stand for all bytes of a text."""
    if any(token.get("lstrip") or token.get("rstrip") for token in parsed.get("added_tokens") or ()):
        return None
    normalizer = parsed.get("normalizer") or {}
    steps = normalizer.get("normalizers", []) if normalizer.get("type") == "Sequence" else [normalizer]
    cutting = parsed.get("pre_tokenizer") or {}
    cuts = cutting.get("pretokenizers", []) if cutting.get("type") == "Sequence" else [cutting]
    if not all(_keeps_bytes(step) for step in [*steps, *cuts] if step):
        return None
    model = parsed.get("model", {})
    whole = {piece[0] for piece in pieces if len(piece) == 1} >= _IN_UTF8
    if not whole and model.get("unk_token") and model.get("fuse_unk"):
        return None
    composes = any(step.get("type") == "NFC" for step in steps)
    return MinTokens(pieces, composes=composes, spaces=METASPACE in json.dumps(steps + cuts, ensure_ascii=False))


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Replace":
        return step.get("pattern") == {"String": " "} and step.get("content") == METASPACE
    if step.get("type") == "Split":
        return step.get("behavior") != "Removed"
    return step.get("type") in ("NFC", "Prepend", "ByteLevel", "Digits", "Metaspace")
