"""Drafts within a time, and drafts ahead: goes on from the guess that all it proposed becomes output.

A sequence holds what was committed and then `ahead`: tokens that were drafted and are not decided yet. When the target
commits what was guessed, the rest of `ahead` is the next draft, there before it is asked for; when it does not, the
guess is thrown away. It grows by asking the drafter for one token more each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from orchestrator.clock import Clock
from orchestrator.drafting.port import NOTHING, Ask, Draft, Drafter
from orchestrator.drafting.protocol import Begin, End, Extend, Update

_LEAST_CHANCE = 0.05  # a guess less likely than this is not gone on from
_FIRST_LIMIT = 4  # tokens drafted ahead for a sequence that nobody has asked about yet
_NEWEST = 0.1  # weight of the newest step in their mean time
_READING_STEPS = 256  # steps in which a drafter may read a new sequence's prompt before it has a first guess


@dataclass(slots=True, eq=False)
class _LookaheadSequence:
    """One sequence, and how many tokens ahead are wanted of it. `reading`: so many steps more it may have no guess,
    because the drafter is still reading its prompt. `stuck`: there is no further guess."""

    key: str
    reading: int = _READING_STEPS
    wanted: int = _FIRST_LIMIT + 1
    guess: Draft = NOTHING
    stuck: bool = False

    @property
    def ahead(self) -> tuple[int, ...]:
        """Tokens that were drafted and are not decided yet."""
        return self.guess.tokens

    @property
    def chance(self) -> float:
        """The chance that all of `ahead` becomes output."""
        return prod(self.guess.confidences)

    def commit(self, tokens: Sequence[int]) -> None:
        """Keep what is guessed behind these tokens, where they were guessed."""
        count, self.stuck = len(tokens), False
        right = self.ahead[:count] == tuple(tokens)
        self.guess = self.guess.behind(count) if right else NOTHING

    def draft(self, ask: Ask) -> Draft:
        """Return the leading part of `ahead` that is worth its verification."""
        chance, count = 1.0, 0
        for confidence in self.guess.confidences[: ask.limit]:
            chance *= confidence
            if chance < ask.least:
                break
            count += 1
        return self.guess.truncate(count)

    def wants_more_for(self, ask: Ask, least: float) -> bool:
        """True where a further token could be part of the draft, and is likely enough."""
        return not self.stuck and len(self.ahead) < ask.limit and self.chance >= max(ask.least, least)


@dataclass(slots=True)
class LookaheadDrafter:
    """Drives one drafter for one target. Asked again for a longer draft of the same sequence, the drafter must go on
    where it was. `runs_ahead` says whether `step` has anything to do. `hits` and `misses`: see
    drafting.protocol.DraftResponse.
    """

    drafter: Drafter
    clock: Clock
    runs_ahead: bool = False
    hits: int = 0
    misses: int = 0
    _sequences: dict[str, _LookaheadSequence] = field(default_factory=dict)
    _step_s: float = 0.0

    def forget_all(self) -> None:
        """End every sequence: another target is connected, or the same one again, and tells them anew."""
        for key in tuple(self._sequences):
            self.update(End(key, keep=False))
        self.hits = self.misses = 0

    def update(self, update: Update) -> None:
        """Take in what became of a sequence."""
        match update:
            case Begin(key, tokens, sampling):
                self._sequences[key] = _LookaheadSequence(key)
                self.drafter.begin(key, tokens, sampling)
            case Extend(key, tokens):
                if (sequence := self._sequences.get(key)) is not None:
                    sequence.commit(tokens)
                    self.drafter.extend(key, tokens)
            case End(key, keep):
                if self._sequences.pop(key, None) is not None:
                    self.drafter.end(key, keep=keep)

    def answer(self, asks: Sequence[Ask], within_s: float, round_s: float = 0.0) -> list[Draft]:
        """Return one draft for each ask: at once where they are there already, else what there is in that time.

        Where the target waits, `round_s` is the time of one of its rounds. A token that is accepted with chance p saves
        p * round_s, and is drafted while that is more than drafting it takes. 0: nobody waits, and time is free.
        """
        asked = [(self._sequences[ask.key], ask) for ask in asks if ask.key in self._sequences]
        missing = sum(not sequence.ahead for sequence, _ in asked)
        if self.runs_ahead:
            self.hits += len(asked) - missing
            self.misses += missing
        if missing:
            self._draft_until(self.clock.monotonic_s() + within_s, asked, round_s)
        found = {sequence.key: sequence.draft(ask) for sequence, ask in asked}
        for sequence, ask in asked:
            sequence.wanted = len(found[sequence.key].tokens) + 1 + ask.limit
        return [found.get(ask.key, NOTHING) for ask in asks]

    def step(self) -> bool:
        """Draft one token further ahead for every sequence that wants it. False: there is nothing to do."""
        if not self.runs_ahead:
            return False
        growing = [
            sequence
            for sequence in self._sequences.values()
            if not sequence.stuck and len(sequence.ahead) < sequence.wanted and sequence.chance >= _LEAST_CHANCE
        ]
        if growing:
            self._grow(growing)
        return bool(growing)

    def _draft_until(self, end_s: float, asked: Sequence[tuple[_LookaheadSequence, Ask]], round_s: float) -> None:
        """Draft until every ask is fulfilled or the next step would be too late; one step at least."""
        price = 0.0  # the first step is free: without it nobody would learn that steps have become cheaper
        while growing := [sequence for sequence, ask in asked if sequence.wants_more_for(ask, price)]:
            self._grow(growing)
            if self.clock.monotonic_s() + self._step_s > end_s:
                return
            price = self._step_s / round_s if round_s else 0.0

    def _grow(self, sequences: Sequence[_LookaheadSequence]) -> None:
        """Ask for one token more than each sequence has."""
        started_s = self.clock.monotonic_s()
        drafts = self.drafter.propose([Ask(sequence.key, len(sequence.ahead) + 1) for sequence in sequences])
        for sequence, draft in zip(sequences, drafts, strict=True):
            grew = len(draft.tokens) > len(sequence.ahead)
            sequence.reading = 0 if grew else max(0, sequence.reading - 1)
            sequence.stuck = not grew and sequence.reading == 0
            if grew:
                sequence.guess = draft
        if not any(sequence.reading for sequence in sequences):  # who reads a prompt takes longer
            took_s = self.clock.monotonic_s() - started_s
            self._step_s += (took_s - self._step_s) * (_NEWEST if self._step_s else 1.0)
