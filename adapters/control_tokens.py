"""Added tokens in a text: where they stand, and what they take with them.

They are found as the library `tokenizers` finds them: the longest one at the leftmost place. One may take the white
space before it (lstrip) or behind it (rstrip), or be none where letters touch it (single_word). Control tokens are
among them, and plain ones, such as <think>.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# White space and word characters by Unicode's properties, as the library's regular expressions have them.
_SPACES = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000").union(map(chr, range(0x2000, 0x200B)))
_WORD_KINDS = {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "Pc"}
_JOINERS = "\u200c\u200d"


@dataclass(frozen=True, slots=True)
class _Added:
    """One added token, and what it does to the text beside it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class ControlTokens:
    """The control tokens of a vocabulary, their `ids` by their texts, and the plain tokens that are found beside them.

    `pattern` finds any control token, the longest first. `found_plain`: the ids of the plain ones. `strips`: whether
    one of these looks at the text beside it, so that it would not be found alike in pieces of a text.
    """

    def __init__(
        self, ids: Mapping[str, int], plain: Iterable[int] = (), added: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """`added`: as tokenizer.json has them. Plain ones that are to be found in normalised text are left out."""
        self.ids = dict(ids)
        self.pattern = _any_of(ids)
        self._found = {text: _Added(index) for text, index in ids.items()}
        wanted = {*ids.values(), *plain}
        for token in added:
            if token["content"] in ids or (token["id"] in wanted and not token["normalized"]):
                flags = (token["lstrip"], token["rstrip"], token["single_word"])
                self._found[token["content"]] = _Added(token["id"], *flags)
        beside = [token for text, token in self._found.items() if text not in ids]
        self.found_plain = frozenset(token.id for token in beside)
        self.strips = any(token.lstrip or token.rstrip or token.single_word for token in beside)
        self._any = _any_of(self._found)

    def split(self, text: str, *, special: bool = True) -> Iterator[tuple[int, str, int | None]]:
        """Yield where a piece of other text begins, the piece, and the id of the token behind it; the last piece has
        none. Pieces may be empty. Without `special` control tokens are other text."""
        start = 0
        for match in self._any.finditer(text):
            token = self._found[match[0]]
            if not special and match[0] in self.ids:
                continue
            if token.single_word and _touches_word(text, match.start(), match.end()):
                continue
            end, behind = match.span()
            while token.rstrip and behind < len(text) and text[behind] in _SPACES:
                behind += 1
            if token.lstrip:
                end = max(start, _strip_end(text, end))
            if end < behind:  # else the token before it has taken all of it
                yield start, text[start:end], token.id
            start = behind
        yield start, text[start:], None


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    # The longest first: where one token begins another, the longer one is meant.
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _strip_end(text: str, end: int) -> int:
    while end > 0 and text[end - 1] in _SPACES:
        end -= 1
    return end


def _touches_word(text: str, start: int, end: int) -> bool:
    return (start > 0 and _is_word(text[start - 1])) or (end < len(text) and _is_word(text[end]))


def _is_word(letter: str) -> bool:
    if unicodedata.category(letter) in _WORD_KINDS or letter in _JOINERS:
        return True
    # Letters in circles and squares are alphabetic, too.
    return "\u24b6" <= letter <= "\u24e9" or "\U0001f130" <= letter <= "\U0001f189"
