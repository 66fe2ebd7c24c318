"""What the decode loop asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens; `confidences[i]` estimates the chance that token i is accepted if all before it are."""

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


NOTHING = Draft()


class Drafter(Protocol):
    """Proposes continuations. Never raises for what a sequence holds; it may always propose nothing."""

    @property
    def name(self) -> str: ...

    def begin(self, key: str, tokens: Sequence[int]) -> None:
        """Learn of a sequence and what it holds (prompt and anything already committed)."""
        ...

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        """Tokens were committed to a sequence. One that was never begun is ignored, here and in `end`."""
        ...

    def propose(self, key: str, limit: int) -> Draft:
        """Draft up to `limit` tokens behind everything committed."""
        ...

    def end(self, key: str, *, keep: bool) -> None:
        """Forget a sequence; `keep` says that its output may help later ones."""
        ...

    def memory_bytes(self) -> int:
        """Return an estimate of what is remembered, running sequences excluded."""
        ...
