"""What the decode loop asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from policies.acceptance import Sampling


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens; `confidences[i]` estimates the chance that token i is accepted if all before it are."""

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


NOTHING = Draft()


@dataclass(frozen=True, slots=True)
class Ask:
    """A wish for up to `limit` tokens behind everything committed to the sequence `key`.

    `least`: the chance of being accepted, with all before it, below which a token is not worth its verification. A
    drafter to which a token costs time stops there; the loop drops such tokens anyway.
    """

    key: str
    limit: int
    least: float = 0.0


class Drafter(Protocol):
    """Proposes continuations. Never raises for what a sequence holds; it may always propose nothing.

    Not thread-safe: the thread of the decode loop calls it.
    """

    @property
    def name(self) -> str: ...

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling) -> None:
        """Learn of a sequence, what it holds (prompt and anything already committed) and how its tokens are chosen."""
        ...

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        """Tokens were committed to a sequence. One that was never begun is ignored, here and in `end`."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Draft for all sequences of a round: one draft for each ask, in order, each within its limit."""
        ...

    def end(self, key: str, *, keep: bool) -> None:
        """Forget a sequence; `keep` says that its output may help later ones."""
        ...

    def memory_bytes(self) -> int:
        """Return an estimate of what is remembered, running sequences excluded."""
        ...

    def close(self) -> None:
        """Give back what the drafter holds. Idempotent."""
        ...
