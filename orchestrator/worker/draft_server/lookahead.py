"""One sequence that is drafted ahead: goes on from the guess that all it proposed becomes output.

A sequence holds what was committed and then `ahead`: tokens that were drafted and are not decided yet. When the target
commits what was guessed, the rest of `ahead` is the next draft, there before it is asked for; when it does not, the
guess is thrown away. It grows by asking the drafter for one token more each time.

Beside that, branches go on from the likeliest other outcomes of the verification: that so many tokens are accepted, and
then another one is chosen (Kumar et al., Speculative Speculative Decoding, 2026, "speculation cache").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from orchestrator.worker.drafting.port import NOTHING, Ask, Draft, Outcome

# A guess less likely than this is not gone on from. ADR 0076 bounds branches, this the main line. Not tuned.
_LEAST_CHANCE = 0.05
# Tokens drafted ahead for a sequence that nobody has asked about yet. Not tuned: its first ask says more.
_FIRST_LIMIT = 4
# Steps in which a drafter may read a new sequence's prompt before it has a first guess. Not tuned.
_READING_STEPS = 256


@dataclass(slots=True, eq=False)
class Branch:
    """What is drafted for one outcome: `line` goes on behind its token."""

    outcome: Outcome
    line: LookaheadSequence

    @property
    def chance(self) -> float:
        return self.outcome.chance * self.line.chance

    def advance(self, count: int, reached: float) -> Branch:
        """Return the same where the target has taken the first `count` tokens in front of it, whose chance was
        `reached`. What is told of it must be told again."""
        self.line.grown = bool(self.line.ahead)
        chance = min(1.0, self.outcome.chance / reached) if reached else self.outcome.chance
        return Branch(Outcome(self.outcome.accepted - count, self.outcome.token, chance), self.line)


@dataclass(slots=True, eq=False)
class LookaheadSequence:
    """One sequence, and how many tokens ahead are wanted of it. `reading`: so many steps more it may have no guess,
    because the drafter is still reading its prompt. `stuck`: there is no further guess. `committed` counts its tokens,
    `number` is its own of all that its target has begun. `limit`: how many tokens were asked for last, and `sent` how
    many were given."""

    key: str
    number: int = 0
    committed: int = 0
    reading: int = _READING_STEPS
    wanted: int = _FIRST_LIMIT + 1
    guess: Draft = NOTHING
    stuck: bool = False
    limit: int = _FIRST_LIMIT
    sent: int = 0
    grown: bool = False
    branches: list[Branch] = field(default_factory=list)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Tokens that were drafted and are not decided yet."""
        return self.guess.tokens

    @property
    def chance(self) -> float:
        return prod(self.guess.confidences)

    @property
    def wants_ahead(self) -> bool:
        """True where one token more may be drafted before it is asked for."""
        return not self.stuck and len(self.ahead) < self.wanted and self.chance >= _LEAST_CHANCE

    def find_branch(self, tokens: Sequence[int]) -> Branch | None:
        """Return the branch whose outcome it is that the target commits these tokens; None where there is none."""
        for branch in self.branches:
            accepted, token = branch.outcome.accepted, branch.outcome.token
            if tuple(tokens) == (*self.ahead[:accepted], token):
                return branch
        return None

    def commit(self, tokens: Sequence[int]) -> list[Branch]:
        """Keep what is guessed behind these tokens, and the branches of that, where they were guessed. Return the
        branches that are over."""
        self.committed += len(tokens)
        count, self.stuck, self.sent = len(tokens), False, 0
        right = self.ahead[:count] == tuple(tokens)
        reached = prod(self.guess.confidences[:count])
        going: list[Branch] = []
        over: list[Branch] = []
        for branch in self.branches:
            (going if right and branch.outcome.accepted >= count else over).append(branch)
        self.branches = [branch.advance(count, reached) for branch in going]
        self.guess = self.guess.behind(count) if right else NOTHING
        return over

    def choose_outcomes(self, outcomes: Sequence[Outcome], most: int, lead: int = 0) -> list[Outcome]:
        """Return the likeliest outcomes of the draft that was sent, and of the `lead` tokens behind it, which have no
        branch yet, as many as make `most` branches. A drafter may have proposed more than was taken in as a guess: no
        branch leaves what is not told."""
        known = {(branch.outcome.accepted, branch.outcome.token) for branch in self.branches}
        likely = [
            outcome
            for outcome in outcomes
            if outcome.accepted <= min(len(self.ahead), self.sent + lead)
            and (outcome.accepted, outcome.token) not in known
        ]
        return sorted(likely, key=lambda outcome: -outcome.chance)[: max(0, most - len(self.branches))]

    def grow(self, draft: Draft) -> None:
        """Take in the draft that was asked for with one token more; without that it has no further guess."""
        grew = len(draft.tokens) > len(self.ahead)
        self.reading = 0 if grew else max(0, self.reading - 1)
        self.stuck = not grew and self.reading == 0
        if grew:
            self.guess, self.grown = draft, True

    @property
    def has_news(self) -> bool:
        """Whether it, or a branch of it, has grown since `take_news`."""
        return self.grown or any(branch.line.grown for branch in self.branches)

    def take_news(self) -> list[Branch]:
        """Return the branches that have grown since the last call, or belong to fewer tokens that are not decided."""
        grown = [branch for branch in self.branches if branch.line.grown]
        self.grown = False
        for branch in grown:
            branch.line.grown = False
        return grown

    def draft(self, ask: Ask) -> Draft:
        """Return the leading part of `ahead` that is worth its verification."""
        return self.guess.keep_likely(ask.limit, ask.least)

    def wants_more_for(self, ask: Ask, least: float) -> bool:
        """True where a further token could be part of the draft, and is likely enough."""
        return not self.stuck and len(self.ahead) < ask.limit and self.chance >= max(ask.least, least)
