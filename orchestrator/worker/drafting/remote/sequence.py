"""One running sequence of a drafter in another process: what that must be told, and what it guessed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from orchestrator.worker.drafting.cache import count_common_prefix
from orchestrator.worker.drafting.port import NOTHING, Draft
from policies.sampling import Sampling

_SAMPLES = 32  # the least of so many counts: what is above it is not the link's


@dataclass(slots=True)
class RoundTrip:
    """The least of the newest samples, in ms; each is a time there and back, without what the other side is known to
    have taken."""

    _newest_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    @property
    def best_ms(self) -> float:
        return min(self._newest_ms, default=0.0)

    def observe_trip(self, took_ms: float) -> None:
        self._newest_ms.append(max(0.0, took_ms))


@dataclass(slots=True, eq=False)
class RemoteSequence:
    """One running sequence: its tokens are all that a new process must be told. `guess` continues the first `base`
    tokens; `open`: it is not known yet how much of it the target chose. `met`: the other side has read the prompt: it
    guessed once, or said that it will not. `line` and `branches` are what it drafted ahead for several outcomes, behind
    the first `lines_base` tokens; a branch by how many tokens of the line it begins with, and the one that comes
    then."""

    key: str
    tokens: list[int]
    sampling: Sampling
    base: int = 0
    guess: Draft = NOTHING
    open: bool = False
    met: bool = False
    lines_base: int = 0
    line: Draft = NOTHING
    branches: dict[tuple[int, int], Draft] = field(default_factory=dict)

    def rest(self, limit: int) -> Draft:
        """Return what is left behind the tokens of what they bear out: of the guess or the first line, the longer one,
        or of the branch that they took."""
        line = self.line
        longest = max(self._rest_of(self.guess, self.base), self._rest_of(line, self.lines_base), key=_length)
        if not longest.tokens and not self._bears_out(line, self.lines_base):
            rests = (self._rest_of(branch, self.lines_base) for branch in self.branches.values())
            longest = max(rests, key=_length, default=NOTHING)
        return longest.truncate(limit)

    def take_lines(self, base: int, line: Draft, branches: dict[tuple[int, int], Draft]) -> None:
        """Keep what was drafted ahead behind the first `base` tokens, beside what is known there already."""
        if base != self.lines_base:
            self.branches.clear()
        self.lines_base, self.line = base, line
        self.branches.update(branches)
        self.met = True

    def drop_lines(self) -> None:
        """Forget what was drafted ahead: it came over a link that is gone."""
        self.line = NOTHING
        self.branches.clear()

    def _rest_of(self, guess: Draft, base: int) -> Draft:
        return guess.behind(len(self.tokens) - base) if self._bears_out(guess, base) else NOTHING

    def _bears_out(self, guess: Draft, base: int) -> bool:
        """True where the tokens behind `base` are the first of the guess."""
        done = len(self.tokens) - base
        return 0 <= done <= len(guess.tokens) and list(guess.tokens[:done]) == self.tokens[base:]

    def verdict(self) -> int | None:
        """Return how many tokens of the guess the target chose too, once, when that is decided."""
        right = count_common_prefix(self.guess.tokens, self.tokens[self.base :])
        decided = right == len(self.guess.tokens) or right < len(self.tokens) - self.base
        if not self.open or not decided:
            return None
        self.open = False
        return right


def _length(draft: Draft) -> int:
    return len(draft.tokens)
