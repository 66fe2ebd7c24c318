"""What the decode loop asks of a drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import DrafterShare
from policies.sampling import DraftDistribution, Sampling


class Meter:
    """Holds the state that `Drafter.states` tells."""

    def __init__(self, state: DrafterState, clock: Clock) -> None:
        self.state = state
        self._clock = clock

    @property
    def failed(self) -> bool:
        """True once the drafter has failed."""
        return self.state.state == "failed"

    def fail(self, reason: str) -> None:
        self.state = msgspec.structs.replace(self.state, state="failed", reason=reason)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Count a round of drafting and its time."""
        started = self._clock.monotonic_s()
        try:
            yield
        finally:
            took_ms = (self._clock.monotonic_s() - started) * MS_PER_S
            self.state = msgspec.structs.replace(
                self.state, rounds=self.state.rounds + 1, draft_ms=self.state.draft_ms + took_ms
            )


class DraftHints(NamedTuple):
    """What helps to draft for one sequence, and for no other. Texts are as of protocol.packed_tokens.

    `recalled`: earlier answers to prompts like its own, the likeliest first. `prediction`: what its client expects of
    its output (b"": nothing). `generated`: so many of its tokens are output already. `stores`: the stores of documents
    that it may be drafted from (None: all). `owner`: whose request it is ("": nobody's).
    """

    recalled: Sequence[bytes] = ()
    prediction: bytes = b""
    generated: int = 0
    stores: Sequence[str] | None = None
    owner: str = ""


NO_HINTS = DraftHints()


class Alternative(NamedTuple):
    """Another way for a draft to go on behind `place` tokens of it. `confidences`: of the first of its `tokens`, the
    chance that it is the target's where the draft is right up to there and wrong there; of each other one, the chance
    that it is if all before it are."""

    place: int
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens; `confidences[i]` estimates the chance that token i is accepted if all before it are.

    `drafter` names whose tokens they are ("": nobody's). The last `forced` of them are not: a grammar added them.
    Behind those, `filling` tokens are nobody's guess: they keep the number of rows of a forward.
    Bit i of `from_statistics` is set where the model's statistics said token i, and the text did not.
    `proposals[i]` is what token i was drawn from; None, or no entry, where it was not drawn. The confidence of a drawn
    token must not depend on the token (see policies/sampling/verify).
    `alternatives`: other ways that it may go, where they were asked for.
    """

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    drafter: str = ""
    forced: int = 0
    proposals: tuple[DraftDistribution | None, ...] = ()
    filling: int = 0
    from_statistics: int = 0
    alternatives: tuple[Alternative, ...] = ()

    @property
    def guessed(self) -> int:
        """How many tokens somebody proposed: all but the filling."""
        return len(self.tokens) - self.filling

    @property
    def own(self) -> int:
        """How many tokens are the drafter's: all but those that a grammar added, and the filling."""
        return self.guessed - self.forced

    def pad_to(self, count: int, token: int) -> Draft:
        """Return the draft with so many tokens, the missing ones filling."""
        missing = count - len(self.tokens)
        if missing <= 0:
            return self
        return replace(self, tokens=(*self.tokens, *(token,) * missing), filling=missing)

    def truncate(self, count: int) -> Draft:
        if count >= len(self.tokens):
            return self
        return replace(
            self,
            tokens=self.tokens[:count],
            confidences=self.confidences[:count],
            forced=max(0, count - self.own),
            proposals=self.proposals[:count],
        )

    def keep_likely(self, limit: int, least: float) -> Draft:
        """Return up to `limit` tokens of the draft, as far as they are accepted with the chance `least`."""
        return self.truncate(sum(chance >= least for chance in accumulate(self.confidences[:limit], mul)))

    def behind(self, count: int) -> Draft:
        return replace(
            self,
            tokens=self.tokens[count:],
            confidences=self.confidences[count:],
            forced=min(self.forced, max(0, len(self.tokens) - count)),
            proposals=self.proposals[count:],
            from_statistics=self.from_statistics >> count,
            alternatives=(),
        )

    def turn(self, other: Alternative, further: int) -> Draft:
        """Return the draft up to where an alternative leaves it, then that with `further` tokens behind its first."""
        place, count = other.place, further + 1
        return replace(
            self,
            tokens=(*self.tokens[:place], *other.tokens[:count]),
            confidences=(*self.confidences[:place], *other.confidences[:count]),
            from_statistics=self.from_statistics & ((1 << place) - 1),
            alternatives=(),
        )

    def is_drawn(self, index: int) -> bool:
        return index < len(self.proposals) and self.proposals[index] is not None

    def within(self, vocabulary: int) -> Draft:
        """Return the draft up to its first token that is no token of the target: a drafter that went wrong."""
        for index, token in enumerate(self.tokens):
            if not 0 <= token < vocabulary:
                return self.truncate(index)
        return self


NOTHING = Draft()
NO_SLOT = -1
PREDICTION = "prediction"
"""The method of the drafter of predicted outputs (drafting.prediction), and its name."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for up to `limit` tokens behind everything committed to the sequence `key`.

    `least`: the chance of being accepted, with all before it, below which a token is not worth its verification. A
    drafter to which a token costs time stops there; the loop drops such tokens anyway. `round_ms`: what a round of the
    target takes without drafts (0: not known yet); a drafter on the target's time that costs more than it saves
    proposes nothing, unless the depth is `fixed`. `row_ms`: what the verification of
    one token more adds to a round, behind the first `free`, which add nothing. `cheaper`: a cheaper drafter's draft,
    which is there already. `last_ms`: what the target's part of the last
    round took (0: it had prompts in it, or there was none). `cheap_only`: drafters that take time, and have no gate,
    leave it alone. `first`: its first token is awaited, so that nobody reads its text for it now.
    `slot`: where the target has computed all tokens but the last; NO_SLOT: nowhere yet.
    `gain`: so many tokens rounds of late make, where plain decoding makes one: what time is worth. `alternatives`:
    other ways of the draft may be verified beside it.
    """

    key: str
    limit: int
    least: float = 0.0
    round_ms: float = 0.0
    row_ms: float = 0.0
    free: int = 0
    cheaper: Sequence[int] = ()
    last_ms: float = 0.0
    cheap_only: bool = False
    fixed: bool = True
    gain: float = 1.0
    alternatives: bool = False
    first: bool = False
    slot: int = NO_SLOT

    @property
    def token_ms(self) -> float:
        """Return in how many ms the target makes a token of one sequence (0: not known)."""
        return (self.round_ms or self.last_ms) / self.gain


@dataclass(frozen=True, slots=True)
class Outcome:
    """That the target chooses the first `accepted` tokens of a draft and then `token`, which is not the draft's next
    one: with this chance."""

    accepted: int
    token: int
    chance: float


@runtime_checkable
class BranchingDrafter(Protocol):
    """A drafter that can go on from several outcomes of one draft, while it is not known which one it will be."""

    def list_outcomes(self, key: str) -> list[Outcome]:
        """Return what may become of the last draft of a sequence, beside all of it being right; in no order."""
        ...

    def branch(self, key: str, branch: str, outcome: Outcome) -> bool:
        """Begin the sequence `branch`, which goes on from that outcome, as a sequence to ask for. False: it cannot."""
        ...

    def adopt(self, key: str, branch: str) -> None:
        """The outcome came true and was told by `extend`: the sequence goes on as this branch."""
        ...

    def prune(self, branch: str) -> None:
        """Forget a branch. One that is not known is ignored."""
        ...


class Drafter(Protocol):
    """Proposes continuations. Never raises for what a sequence holds; it may always propose nothing.

    A drafter that fails says so in `states` and proposes nothing from then on. Not thread-safe: the thread of the
    decode loop calls it.
    """

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        """Learn of a sequence, what it holds (prompt and anything already committed) and how its tokens are chosen.
        `hints` may help to draft for it.

        A key that is known already is begun anew: what it held is replaced. A drafter with a cache may keep what it
        computed of the tokens that both begin with.
        """
        ...

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        """Tokens were committed to a sequence: the accepted drafts, and the target's own token behind them. Whatever
        was proposed and is not among them was rejected. One that was never begun is ignored, here and in `end`."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Draft for all sequences of a round: one draft for each ask, in order, each within its limit. Called once in
        every round, without asks too."""
        ...

    def end(self, key: str, *, keep: bool) -> None:
        """Forget a sequence; `keep` says that its output may help later ones."""
        ...

    def memory_bytes(self) -> int:
        """Return an estimate of what is remembered, running sequences excluded."""
        ...

    def states(self) -> list[DrafterState]:
        """Return the effective state of each drafter in here, in order of cost. `drafted` and `accepted` are 0: the
        loop counts what it verifies, by `Draft.drafter`."""
        ...

    def close(self) -> None:
        """Give back what the drafter holds. Idempotent."""
        ...


class WorkBeside(NamedTuple):
    """What drafters do while the target verifies. `computes`: on what may be the target's processor, or its memory.
    `reads`: a text first, so that it has no draft yet. `gated_ms`: what those took in the round itself that judge by
    themselves whether they pay."""

    computes: bool = False
    reads: bool = False
    gated_ms: float = 0.0


@runtime_checkable
class DrafterBeside(Protocol):
    """A drafter that may work while the target does, or judges by itself whether it pays."""

    def describe_beside(self) -> WorkBeside:
        """Return what it does beside the round that was proposed for last."""
        ...


def describe_beside(drafter: Drafter) -> WorkBeside:
    return drafter.describe_beside() if isinstance(drafter, DrafterBeside) else WorkBeside()


@runtime_checkable
class TallyingDrafter(Protocol):
    """A drafter that can say what its drafters did for a sequence that it has."""

    def describe_shares(self, key: str) -> list[DrafterShare]:
        """Return what each did, without what was verified; none for a sequence that is not known."""
        ...


class NoDrafter:
    """Proposes nothing."""

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None: ...

    def extend(self, key: str, tokens: Sequence[int]) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [NOTHING] * len(asks)

    def end(self, key: str, *, keep: bool) -> None: ...

    def memory_bytes(self) -> int:
        return 0

    def states(self) -> list[DrafterState]:
        return []

    def close(self) -> None: ...
