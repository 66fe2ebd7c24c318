"""Rounds that the depth policy does without: how many are left of a pause, and who hears of what after it.

A pause outlives requests that come and go, as long as no more of them do than were in the round before it. Drafters
hear of its tokens in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orchestrator.worker.engine.batch import ScheduledSequence


class PausedRounds(NamedTuple):
    """What happened in a pause: `rounds` (0: there was none), the last round's parts, the tokens committed to each
    sequence."""

    rounds: int = 0
    last_parts: Sequence[ScheduledSequence] = ()
    tokens: Mapping[str, Sequence[int]] = {}


class DraftPause:
    """The pause of one decode loop."""

    def __init__(self) -> None:
        self._left = self._rounds = 0
        self._sequence_changes_left = 0
        self._never_paused: set[str] = set()
        self._last_parts: Sequence[ScheduledSequence] = ()
        self._tokens: dict[str, list[int]] = {}

    def start(self, rounds: int, sequences: int) -> None:
        """The next `rounds` are a pause, behind one of so many sequences. None where a sequence is never paused."""
        self._left = 0 if self._never_paused else rounds
        self._sequence_changes_left = sequences

    def begin_sequence(self, key: str, *, never_paused: bool) -> None:
        """A sequence starts, or starts again. `never_paused`: it may draft where the policy would not."""
        self._count_sequence_change()
        if never_paused:
            self._never_paused.add(key)
            self._left = 0
        self._tokens.pop(key, None)

    def end_sequence(self, key: str) -> Sequence[int]:
        """A sequence ends; returns the tokens that its drafter has not heard of."""
        self._count_sequence_change()
        self._never_paused.discard(key)
        return self._tokens.pop(key, ())

    def _count_sequence_change(self) -> None:
        self._sequence_changes_left -= 1
        if self._sequence_changes_left < 0:
            self._left = 0

    def take_round(self, parts: Sequence[ScheduledSequence]) -> bool:
        """Begin a round; returns whether it belongs to the pause."""
        if not self._left:
            return False
        self._left -= 1
        self._rounds += 1
        self._last_parts = parts
        return True

    def hold_tokens(self, key: str, tokens: Sequence[int]) -> None:
        """Keep tokens of a paused round for the drafter until the pause is over."""
        self._tokens.setdefault(key, []).extend(tokens)

    def finish(self) -> PausedRounds:
        """Return, once, what happened in the pause that is over."""
        paused = PausedRounds(self._rounds, self._last_parts, self._tokens)
        if self._rounds:
            self._rounds, self._last_parts, self._tokens = 0, (), {}
        return paused
