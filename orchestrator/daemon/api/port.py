"""What the API asks of a tokenizer (adapters.tokenizer.Tokenizer is one)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from adapters.fill_tokens import FillTokens
from policies.sampling import Breaker


class StreamDecoder(Protocol):
    """Token ids to text, piece by piece; a character that is not complete yet is held back."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class TokenizerPort(Protocol):
    """Text to token ids and back. `encode_chat` raises an AdapterError for messages its template refuses."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def template_takes_tools(self) -> bool: ...

    @property
    def template_fault(self) -> str: ...

    @property
    def output_form(self) -> str | None: ...

    @property
    def fill_tokens(self) -> FillTokens | None: ...

    def with_template(self, source: str) -> TokenizerPort: ...

    def template_shows(self, text: str) -> bool: ...

    def find_control(self, text: str) -> int | None: ...

    def describe(self) -> dict[str, Any]: ...

    def count_min_tokens(self, text: str, enough: int) -> int: ...

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def encode_prompt(self, text: str, *, special: bool) -> list[int]: ...

    def encode_fill(self, prefix: str | Sequence[int], suffix: str) -> list[int]: ...

    def find_breakers(self, text: str) -> tuple[Breaker, ...]: ...

    def find_idle_keywords(self, keywords: Iterable[str]) -> list[str]: ...

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decoder(self, shown: Collection[str] = ()) -> StreamDecoder: ...
