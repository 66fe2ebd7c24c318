"""Texts over which the vocabulary of another engine's server is compared with the target's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from adapters.tokenizer import Tokenizer

TEXTS: Final = (
    "The quick brown fox, 3.14159 and 1,000,000 of them: it's \"quoted\", isn't it?\n\n\tdef f(x):\n        return x\n",
    "  two spaces, a tab\tand\n\nlines\r\n",
    "def add(a: int, b: int) -> int:\n    return a + b  # 1234567890",
    '{"key": [1.5e-3, null, true], "s": "\\u00e9"}',
    "Größe, naïve, año, señor, çédille, Łódź",
    "Быстрая лиса прыгает; καλημέρα; שלום; الثعلب البني السريع; नमस्ते; ไทย; 안녕",
    "敏捷的棕色狐狸跳过懒狗。 素早い茶色の狐 こんにちは",
    "🦜🐙🦙🙂 👩‍👩‍👧 e\u0301",
    "AAAAAAAAAAAAAAAA !!!??? ---- ====",
    "https://example.org/a_b?c=d&e=%20f",
)
"""Of many scripts, of code, and of what tokenizers cut in ways of their own."""
# Of a vocabulary, evenly spread. Not tuned: a server takes some milliseconds for so many.
_COMPARED_TOKENS = 4096


def list_corpus(tokenizer: Tokenizer) -> Iterator[str]:
    """Return texts of many scripts, of tokens from the whole vocabulary, and of the control tokens."""
    size = tokenizer.vocabulary_size
    yield "\n".join(TEXTS)
    spread = {*range(0, size, max(1, size // _COMPARED_TOKENS)), *range(max(0, size - 64), size)}
    for ids in (sorted(spread - tokenizer.control_ids), sorted(tokenizer.control_ids)):
        yield "\n".join(filter(None, (tokenizer.token_bytes(index).decode("utf-8", "ignore") for index in ids)))
