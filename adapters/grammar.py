"""Grammars over a model's own tokens, by llguidance: JSON schemas, regular expressions and Lark grammars.

The library is imported when the first grammar is asked for. JSON is written as Python's json.dumps writes it (", " and
": ", no other whitespace). Models know that style, and it cannot go on for ever. Between two values it leaves one
continuation, which costs no choice. An answer that another engine began goes on in that engine's layout.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adapters.contract import GrammarFailed, GrammarTooComplex
from adapters.grammar_check import OTHERS, OURS, compile_text
from adapters.tokenizer import Tokenizer

# Compiled grammars. ADR 0010: one takes a millisecond as a rule, so this only bounds memory.
_REMEMBERED = 32
_LIMIT = re.compile(r"\bmax is\b|\btoo (complex|large|many)\b|\blimit\b")


class GrammarText(Protocol):
    """A grammar as it is asked for; `kind` is one of adapters.grammar_check.KINDS."""

    @property
    def kind(self) -> str: ...

    @property
    def text(self) -> str: ...


class GrammarCompiler:
    """Implements orchestrator.worker.engine.grammar.Grammars over one tokenizer, which is loaded for the first grammar.

    `vocabulary_size` is the width of the model's rows.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._library: Any = None
        self._blanks: frozenset[int] = frozenset()
        self._compiled: dict[tuple[str, str, str], Any] = {}
        self._keeping = threading.Lock()
        self._loading = threading.Lock()

    def prepare(self, grammar: GrammarText, prefix_tokens: Sequence[int] = ()) -> None:
        """Compile a grammar ahead of its `start`, in any thread. Raises GrammarFailed."""
        self._find_matcher(grammar, prefix_tokens)

    def start(self, grammar: GrammarText, prefix_tokens: Sequence[int] = ()) -> GrammarProgress:
        """Return a grammar at its beginning, in the first layout that takes `prefix_tokens`. Raises GrammarFailed."""
        matcher = self._find_matcher(grammar, prefix_tokens).deep_copy()
        return GrammarProgress(matcher, self._vocabulary_size, self._blanks)

    def _find_matcher(self, grammar: GrammarText, prefix_tokens: Sequence[int]) -> Any:
        own = self._matcher(grammar, OURS)
        if not prefix_tokens or grammar.kind != "json_schema":
            return own
        if self._takes(own, prefix_tokens):
            return own
        for layout in OTHERS:
            with suppress(GrammarFailed):
                if self._takes(matcher := self._matcher(grammar, layout), prefix_tokens):
                    return matcher
        return own

    def _takes(self, matcher: Any, tokens: Sequence[int]) -> bool:
        """Return whether tokens may begin an answer. White space behind its end may be among them."""
        fits = matcher.validate_tokens(list(tokens))
        if fits == len(tokens) or not self._blanks.issuperset(tokens[fits:]):
            return bool(fits == len(tokens))
        behind = matcher.deep_copy()
        behind.consume_tokens(list(tokens[:fits]))
        return bool(behind.is_stopped())

    def _matcher(self, grammar: GrammarText, layout: str) -> Any:
        key = (grammar.kind, grammar.text, layout)
        compiled = self._compiled.get(key)
        if compiled is None:
            try:
                compiled = self._compile(*key)
            except GrammarFailed as error:
                compiled = error
            with self._keeping:
                while len(self._compiled) >= _REMEMBERED:
                    del self._compiled[next(iter(self._compiled))]
                self._compiled[key] = compiled
        if isinstance(compiled, GrammarFailed):
            raise GrammarFailed(str(compiled))
        return compiled

    def _compile(self, kind: str, text: str, layout: str) -> Any:
        import llguidance

        with self._loading:
            if self._library is None:
                tokenizer = self._tokenizer()
                self._library = _library_tokenizer(tokenizer, self._vocabulary_size)
                self._blanks = _find_blanks(tokenizer)
        try:
            matcher = llguidance.LLMatcher(self._library, compile_text(kind, text, layout), log_level=0)
        except ValueError as error:
            raise GrammarFailed(" ".join(str(error).split())) from error
        if matcher.is_error():
            raise GrammarFailed(" ".join(matcher.get_error().split()))
        return matcher


class GrammarProgress:
    """One answer's place in a grammar: implements orchestrator.worker.engine.grammar.GrammarState. `blanks`: tokens of
    white space, which other engines write behind its end, too."""

    def __init__(self, matcher: Any, vocabulary_size: int, blanks: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        self._blanks = blanks

    @property
    def ended(self) -> bool:
        """True when no token may follow."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> NDArray[np.bool_]:
        """Return which tokens may follow. Raises GrammarFailed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocabulary_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error():
            raise self._build_error()
        return allowed

    def advance(self, token: int) -> None:
        """Go on over a token. Raises GrammarFailed."""
        if token in self._blanks and self.ended:
            return
        if not self._matcher.consume_token(token):
            raise self._build_error()

    def fitting(self, tokens: Sequence[int]) -> int:
        """Return how many of the leading tokens may follow."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def find_forced_tokens(self, behind: Sequence[int]) -> list[int]:
        """Return the tokens that alone may follow behind some that fit."""
        taken = self._matcher.try_consume_tokens(list(behind)) if behind else 0
        tokens = [] if self._matcher.is_stopped() else [int(token) for token in self._matcher.compute_ff_tokens()]
        if taken:
            self._matcher.rollback(taken)
        return tokens

    def _build_error(self) -> GrammarFailed:
        """Return why the library does not go on. What it says of its state is left out."""
        words, _, _ = self._matcher.get_error().partition("<state>")
        # The library's reason for the stop is "InternalError" here, so its words must do.
        return (GrammarTooComplex if _LIMIT.search(words) else GrammarFailed)(" ".join(words.split()))


def _find_blanks(tokenizer: Tokenizer) -> frozenset[int]:
    pieces = ((index, tokenizer.token_bytes(index)) for index in range(tokenizer.vocabulary_size))
    return frozenset(index for index, piece in pieces if piece and not piece.strip()) - tokenizer.control_ids


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
