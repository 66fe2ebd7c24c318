"""Each request is drafted for by its variant's drafter, so that two sets of drafters are compared on live traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.rounds import DrafterShare
from orchestrator.worker.drafting.port import (
    NO_HINTS,
    NOTHING,
    Ask,
    Draft,
    Drafter,
    DraftHints,
    TallyingDrafter,
    WorkBeside,
    describe_beside,
)
from policies.sampling import Sampling


class DrafterGroup:
    """The part of drafting.port.Drafter that all its drafters take part in."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def memory_bytes(self) -> int:
        return sum(drafter.memory_bytes() for drafter in self._drafters)

    def states(self) -> list[DrafterState]:
        return [state for drafter in self._drafters for state in drafter.states()]

    def describe_beside(self) -> WorkBeside:
        works = [describe_beside(drafter) for drafter in self._drafters]
        return WorkBeside(
            any(work.computes for work in works),
            any(work.reads for work in works),
            sum(work.gated_ms for work in works),
        )

    def close(self) -> None:
        """The one loaded last goes first: OpenVINO's models leave a signal stack behind otherwise."""
        for drafter in reversed(self._drafters):
            drafter.close()


class VariantDrafter(DrafterGroup):
    """Implements drafting.port.Drafter. `variants`: the drafters of those that have their own; all other requests get
    `default` (None: nothing).

    The drafters share nothing: what one learns, and whatever it remembers of outputs, is of its own requests. `joined`:
    each sequence's variant, one table for the drafters of all flights (engine/flights.py).
    """

    def __init__(
        self, default: Drafter | None, variants: Mapping[str, Drafter], joined: dict[str, str] | None = None
    ) -> None:
        super().__init__([*([default] if default is not None else []), *variants.values()])
        self._default = default
        self._variants = dict(variants)
        self._joined = {} if joined is None else joined

    def join(self, key: str, variant: str) -> None:
        if variant in self._variants:
            self._joined[key] = variant

    def _of(self, key: str) -> Drafter | None:
        variant = self._joined.get(key)
        return self._default if variant is None else self._variants[variant]

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        if (drafter := self._of(key)) is not None:
            drafter.begin(key, tokens, sampling, hints)

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        if (drafter := self._of(key)) is not None:
            drafter.extend(key, tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Each drafter is called once, with its own asks."""
        drafts = [NOTHING] * len(asks)
        for drafter in self._drafters:
            places = [place for place, ask in enumerate(asks) if self._of(ask.key) is drafter]
            proposed = drafter.propose([asks[place] for place in places])
            for place, draft in zip(places, proposed, strict=True):
                drafts[place] = draft
        return drafts

    def describe_shares(self, key: str) -> list[DrafterShare]:
        drafter = self._of(key)
        return drafter.describe_shares(key) if isinstance(drafter, TallyingDrafter) else []

    def end(self, key: str, *, keep: bool) -> None:
        if (drafter := self._of(key)) is not None:
            drafter.end(key, keep=keep)
        self._joined.pop(key, None)
