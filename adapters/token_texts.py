"""The texts of tokens: what bytes ids stand for, text from them as they come, and added tokens in a text.

Decoding does not go through the tokenizers library: every token stands for bytes, an answer is those bytes
joined, and what is not UTF-8 in them becomes U+FFFD. That is the same whether an answer is decoded whole or
token by token, which the library does not promise.

Added tokens are found as the library finds them: the longest one at the leftmost place. One may take the white
space before it (lstrip) or behind it (rstrip), or be none where letters touch it (single_word). Control tokens are
among them, and plain ones, such as <think>.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from adapters.contract import Unsupported
from adapters.tokenizer_files import METASPACE, TokenizerMeta

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
# White space and word characters by Unicode's properties, as the library's regular expressions have them.
_SPACES = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000").union(map(chr, range(0x2000, 0x200B)))
_WORD_KINDS = {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "Pc"}
_JOINERS = "\u200c\u200d"


class TokenTextDecoder:
    """Decodes one answer as its tokens come; special tokens are skipped, but for those of `special`, by their bytes.

    A character whose bytes are not all there yet is held back, so all that was returned, joined, is always
    the beginning of the whole decode.
    """

    def __init__(self, shown: list[bytes], special: Mapping[int, bytes] | None = None) -> None:
        self._shown, self._special = shown, special or {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the characters that these ids complete. Raises Unsupported for an id that does not exist."""
        if not self._special:
            return self._utf8.decode(join_bytes(self._shown, ids))
        return "".join(map(self._decode, ids))

    def _decode(self, index: int) -> str:
        special = self._special.get(index)
        if special is None:
            return self._utf8.decode(join_bytes(self._shown, [index]))
        return self.flush() + special.decode("utf-8", "replace")

    def flush(self) -> str:
        """Return what was held back (as U+FFFD, for it is not whole) at the answer's end."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def join_bytes(pieces: list[bytes], ids: Iterable[int]) -> bytes:
    """Return the bytes of these ids together. Raises Unsupported for an id outside the vocabulary."""
    try:
        ids = list(ids)
        if ids and min(ids) < 0:  # Python would count from the end
            raise IndexError
        return b"".join([pieces[index] for index in ids])
    except IndexError:
        raise Unsupported(f"a token id is outside the vocabulary of {len(pieces)} tokens: {ids}") from None


def list_token_bytes(texts: list[str], meta: TokenizerMeta) -> list[bytes]:
    """Return the bytes of each id, b"" for one that stands for nothing."""
    verbatim, unused = set(meta.control_ids), set(meta.unused_ids)
    if meta.alphabet == "bytes":
        verbatim |= set(meta.user_defined_ids)
    plain = [index for index in range(len(texts)) if index not in verbatim and index not in unused]
    spelt = [texts[index] for index in plain]
    pieces = [text.encode() if index in verbatim else b"" for index, text in enumerate(texts)]
    spell_all = _spell_letters if meta.alphabet == "bytes" else _spell_metaspace
    for index, piece in zip(plain, spell_all(spelt), strict=True):
        pieces[index] = piece
    return pieces


def _spell_letters(texts: list[str]) -> list[bytes]:
    """Return the bytes of texts in the byte alphabet, all of them in one go: there may be 262,144."""
    alphabet = byte_alphabet()
    letters = "".join(texts)
    if set(letters) <= alphabet.keys():
        spelt = bytes(map(alphabet.__getitem__, letters))
        return [spelt[end - len(text) : end] for text, end in zip(texts, accumulate(map(len, texts)), strict=True)]
    return [_spell(text, alphabet) for text in texts]


def _spell(text: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[letter] for letter in text])
    except KeyError:  # not written in the byte alphabet: an added token that the file calls a normal one
        return text.encode()


def _spell_metaspace(texts: list[str]) -> list[bytes]:
    return [_from_metaspace(text) for text in texts]


def _from_metaspace(text: str) -> bytes:
    if _BYTE_TOKEN.fullmatch(text):
        return bytes([int(text[3:5], 16)])
    return text.replace(METASPACE, " ").encode()


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's letters for bytes: printable Latin-1 as itself, every other byte as the next letter from
    U+0100 on."""
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in itself]
    return {chr(value): value for value in itself} | {chr(0x100 + n): value for n, value in enumerate(others)}


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
