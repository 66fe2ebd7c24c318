"""What bytes the ids of a vocabulary stand for, and text from them as they come.

Decoding does not go through the tokenizers library: every token stands for bytes, an answer is those bytes
joined, and what is not UTF-8 in them becomes U+FFFD. That is the same whether an answer is decoded whole or
token by token, which the library does not promise.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from itertools import accumulate

from adapters.contract import Unsupported
from adapters.tokenizer_files import METASPACE, TokenizerMeta

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TokenTextDecoder:
    """Decodes one answer as its tokens come; special tokens are skipped.

    A character whose bytes are not all there yet is held back, so all that was returned, joined, is always
    the beginning of the whole decode.
    """

    def __init__(self, shown: list[bytes]) -> None:
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the characters that these ids complete. Raises Unsupported for an id that does not exist."""
        return self._utf8.decode(join_bytes(self._shown, ids))

    def flush(self) -> str:
        """Return what was held back (as U+FFFD, for it is not whole) at the answer's end."""
        return self._utf8.decode(b"", final=True)


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
    alphabet = _byte_alphabet()
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


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's letters for bytes: printable Latin-1 as itself, every other byte as the next letter from
    U+0100 on."""
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in itself]
    return {chr(value): value for value in itself} | {chr(0x100 + n): value for n, value in enumerate(others)}
