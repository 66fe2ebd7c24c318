"""Which replicas of very many are worth pricing for a request (policies.serving.routing).

Replicas of one kind differ for a request only in how many streams they have, and in what they remember of its prompt.
A kind is all else that a price is made of: what the replica may be used for, its health, its places and its cache, its
pace and its draft, what else its device does. A price never falls with more streams. So of each kind those with the
fewest streams are enough, and beside them those that remember most of the prompt. The choice among these is the choice
among all, as far as those of a kind are alike: figures that are measured are put into steps (`step_of`), and within a
step the least loaded ones are taken, not the cheapest.

What is chosen is bounded, whatever there is: PER_KIND of each kind, and KINDS kinds, those that promise most before
the others. Of kinds that take nothing one of each is looked at, for whoever asks why nothing else was to be had. Where
nobody takes anything, or some are ruled out, they may have to do: then it is as many as of the others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

PRICED_ALL: Final = 32
"""So many replicas are all priced: then there is nothing to choose from them. ADR 0057: 16 are priced in 0.18 ms, 64 in
0.95 ms."""
# ADR 0091: where replicas of a kind are alike the choice is then the best. The second is for hysteresis.
PER_KIND: Final = 2
# ADR 0091: bounds a choice to 24 prices, 0.3 ms. A fleet has fewer kinds of devices (ADR 0097).
KINDS: Final = 12
# The same of those that take nothing now: they are only named as reasons.
IDLE_KINDS: Final = 12
STEP: Final = 1.15
"""Measured figures that differ by less are one for the kind. ADR 0091: a choice is within 20 % of the best among all,
by a property test."""
# Stale entries a heap may hold beside its live ones. Any value bounds its memory.
_SLACK: Final = 16

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Kind:
    """`key`: all that replicas of the kind have in common. `takes`: they may get requests; `hopes`: they may again.
    `tokens`: what decides their tokens. `token_ms`: what a token takes there, and `places` of each: by them kinds are
    compared where there are very many."""

    key: Hashable
    takes: bool
    hopes: bool
    tokens: Hashable
    token_ms: float
    places: int


def step_of(figure: float) -> int:
    """Return the step of a measured figure that is above 0; figures of one step differ by less than STEP."""
    return math.floor(math.log(figure) / _LOG_STEP) if figure > 0.0 else _NO_STEP


_LOG_STEP: Final = math.log(STEP)
_NO_STEP: Final = -(10**6)  # below the step of any figure above 0


class _Crowd(Generic[M]):
    """The members of one kind, by their streams. The heap has an entry for each change; what is out of date is dropped
    when it comes to the top, and all of it when it is more than half."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.loads: dict[str, int] = {}
        self._members: dict[str, M] = {}
        self._heap: list[tuple[int, str]] = []
        self._best: list[M] = []
        self._best_for = -1
        self.least = 0

    def put(self, name: str, member: M, load: int) -> None:
        self._members[name], self.loads[name] = member, load
        self._best_for = -1
        if len(self._heap) > 2 * len(self.loads) + _SLACK:
            self._heap = [(load, name) for name, load in self.loads.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (load, name))

    def drop(self, name: str) -> None:
        del self._members[name], self.loads[name]
        self._best_for = -1

    def list_least(self, count: int) -> list[M]:
        """Return those with the fewest streams, of equals the first by name."""
        if self._best_for == count:
            return self._best
        heap, loads = self._heap, self.loads
        best: list[tuple[int, str]] = []
        while heap and len(best) < count:
            entry = heappop(heap)
            if loads.get(entry[1]) == entry[0] and (not best or entry != best[-1]):
                best.append(entry)
        for entry in best:
            heappush(heap, entry)
        self.least = best[0][0] if best else 0
        self._best, self._best_for = [self._members[name] for _, name in best], count
        return self._best


class Narrowing(Generic[M]):
    """Keeps members by their kinds and streams. Each change costs the same however many there are."""

    def __init__(self) -> None:
        self._crowds: dict[Hashable, _Crowd[M]] = {}
        self._of: dict[str, _Crowd[M]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def put(self, name: str, member: M, kind: Kind, load: int) -> None:
        crowd = self._of.get(name)
        if crowd is None or crowd.kind.key != kind.key:
            if crowd is not None:
                self._leave(crowd, name)
            crowd = self._crowds.get(kind.key)
            if crowd is None:
                crowd = self._crowds[kind.key] = _Crowd(kind)
            self._of[name] = crowd
        elif crowd.loads[name] == load:
            return
        crowd.put(name, member, load)

    def set_load(self, name: str, member: M, load: int) -> None:
        crowd = self._of.get(name)
        if crowd is not None:
            crowd.put(name, member, load)

    def drop(self, name: str) -> None:
        crowd = self._of.pop(name, None)
        if crowd is not None:
            self._leave(crowd, name)

    def choose(self, tokens: Hashable = None, more_per_kind: int = 0) -> list[M]:
        """Return the members that are worth pricing. `tokens`: what a request's next tokens are to be decided by, where
        it has some already: others are left out as long as such replicas take any. `more_per_kind`: so many are ruled
        out for what the request is."""
        count = PER_KIND + more_per_kind
        takers = [crowd for crowd in self._crowds.values() if crowd.kind.takes]
        if tokens:
            takers = [crowd for crowd in takers if crowd.kind.tokens == tokens] or takers
        if len(takers) > KINDS:
            takers = self._prefer(takers, count)
        members: list[M] = []
        for crowd in takers:
            members += crowd.list_least(count)
        others = [crowd for crowd in self._crowds.values() if not crowd.kind.takes]
        if len(others) > IDLE_KINDS:
            others.sort(key=lambda crowd: (crowd.kind.tokens != tokens, not crowd.kind.hopes))
        looked_at = 1 if takers and not more_per_kind else count
        for crowd in others[:IDLE_KINDS]:
            members += crowd.list_least(count)[:looked_at]
        return members

    def _prefer(self, crowds: Iterable[_Crowd[M]], count: int) -> list[_Crowd[M]]:
        """Return the kinds whose least loaded members promise the earliest end."""
        rated = []
        for number, crowd in enumerate(crowds):
            crowd.list_least(count)
            kind = crowd.kind
            queued = max(0, crowd.least - kind.places + 1) / max(1, kind.places)
            rated.append((kind.token_ms * (1.0 + queued), number, crowd))
        return [crowd for _, _, crowd in sorted(rated)[:KINDS]]

    def _leave(self, crowd: _Crowd[M], name: str) -> None:
        crowd.drop(name)
        if not crowd.loads:
            del self._crowds[crowd.kind.key]
