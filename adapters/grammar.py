"""Grammars over a model's own tokens, by llguidance: JSON schemas, regular expressions and Lark grammars.

The library is imported when the first grammar is asked for. JSON is written as Python's json.dumps writes it (", "
and ": ", no other whitespace): models know that style, it cannot go on for ever, and between two values it leaves
one continuation, which costs no choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.contract import GrammarFailed
from adapters.tokenizer import Tokenizer

KINDS = ("json_schema", "regex", "lark")
_REMEMBERED = 32


def problem(kind: str, text: str) -> str:
    """Return in one line why a grammar cannot be used; "" where it can. Takes milliseconds; needs no model."""
    import llguidance

    try:
        found = llguidance.LLMatcher.validate_grammar(_compiled_text(kind, text))
    except ValueError as error:
        found = str(error)
    return " ".join(found.split())


def _compiled_text(kind: str, text: str) -> str:
    import llguidance

    if kind == "json_schema":
        style: llguidance._lib.JsonCompileOptions = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        }
        return str(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=style))
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(text))
    if kind == "lark":
        return str(llguidance.LLMatcher.grammar_from_lark(text))
    raise ValueError(f"a grammar is one of {', '.join(KINDS)}, not {kind!r}")


class GrammarCompiler:
    """Grammars over one tokenizer. `vocabulary_size` is the width of the model's rows. One thread calls it."""

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._library: Any = None
        self._started: dict[tuple[str, str], Any] = {}

    def start(self, kind: str, text: str) -> GrammarProgress:
        """Return a grammar at its beginning. Raises GrammarFailed."""
        import llguidance

        key = (kind, text)
        if key not in self._started:
            if found := problem(kind, text):
                raise GrammarFailed(found)
            if self._library is None:
                self._library = _library_tokenizer(self._tokenizer, self._vocabulary_size)
            matcher = llguidance.LLMatcher(self._library, _compiled_text(kind, text))
            if matcher.is_error():
                raise GrammarFailed(" ".join(matcher.get_error().split()))
            while len(self._started) >= _REMEMBERED:
                del self._started[next(iter(self._started))]
            self._started[key] = matcher
        return GrammarProgress(self._started[key].deep_copy(), self._vocabulary_size)


class GrammarProgress:
    """One answer's place in a grammar: implements orchestrator.decoding.grammar.GrammarState."""

    def __init__(self, matcher: Any, vocabulary_size: int) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size

    @property
    def ended(self) -> bool:
        """True when no token may follow."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> NDArray[np.bool_]:
        """Return which tokens may follow. Raises GrammarFailed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocabulary_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error():
            raise GrammarFailed(self._words())
        return allowed

    def advance(self, token: int) -> None:
        """Go on over a token. Raises GrammarFailed."""
        if not self._matcher.consume_token(token):
            raise GrammarFailed(self._words())

    def fitting(self, tokens: Sequence[int]) -> int:
        """Return how many of the leading tokens may follow."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def forced(self, behind: Sequence[int]) -> list[int]:
        """Return the tokens that alone may follow behind some that fit."""
        taken = self._matcher.try_consume_tokens(list(behind)) if behind else 0
        found = [] if self._matcher.is_stopped() else [int(token) for token in self._matcher.compute_ff_tokens()]
        if taken:
            self._matcher.rollback(taken)
        return found

    def _words(self) -> str:
        return " ".join(self._matcher.get_error().split())


def _library_tokenizer(tokenizer: Tokenizer, vocabulary_size: int) -> Any:
    import llguidance

    class Vocabulary:
        """What the library reads of a tokenizer."""

        eos_token_id = min(tokenizer.eos_ids, default=0)
        bos_token_id = tokenizer.bos_id
        tokens = [tokenizer.token_bytes(index) for index in range(tokenizer.vocabulary_size)]  # noqa: RUF012
        special_token_ids = sorted(tokenizer.control_ids)

        def __call__(self, text: bytes) -> list[int]:
            return tokenizer.encode(text.decode("utf-8", "replace"), special=False)

    wrapper = llguidance.TokenizerWrapper(Vocabulary())
    ends = sorted(tokenizer.eos_ids) or None
    return llguidance.LLTokenizer(wrapper, n_vocab=vocabulary_size, eos_token=ends)
