"""In which order requests of several owners get places: by start-time fair queueing on the work that they ask for.

Each owner has an account: how far its work has come on a common clock of virtual work. A request starts where its
owner's account is, or now, whichever is later. The earliest start goes first, then the earliest arrival. So owners that
keep asking get equal work, however many requests each has and however large they are. Who asks seldom is served at
once, and nobody saves up turns by being away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_AHEAD = 8
"""One request for so many places is sent ahead, so that no place stays empty until the next one comes. ADR 0047. Not
tuned: more would bend the turns, less leave places empty for a message's way."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """`work` in tokens: what is left of it, of prompt and answer."""

    owner: str
    work: float


@dataclass(frozen=True, slots=True)
class FairAccounts:
    """`now` of the virtual clock, and the accounts that are ahead of it."""

    now: float = 0.0
    ahead: Mapping[str, float] = field(default_factory=dict)

    def find_start(self, owner: str) -> float:
        return max(self.now, self.ahead.get(owner, 0.0))

    def charge(self, request: WaitingRequest) -> FairAccounts:
        start = self.find_start(request.owner)
        ahead = {**self.ahead, request.owner: start + max(0.0, request.work)}
        return FairAccounts(start, {owner: until for owner, until in ahead.items() if until > start})


def order_fairly(waiting: Sequence[WaitingRequest], accounts: FairAccounts) -> list[int]:
    """Return the indices of waiting requests, given in the order of arrival, in the order in which they are to start.
    Requests of one owner keep their order."""
    next_start: dict[str, float] = {}
    starts = []
    for request in waiting:
        start = next_start.get(request.owner, accounts.find_start(request.owner))
        next_start[request.owner] = start + max(0.0, request.work)
        starts.append(start)
    return sorted(range(len(waiting)), key=lambda index: (starts[index], index))


def hold_back(sent: int, places: int) -> bool:
    """Return whether a waiting request is to wait for its turn where the order is kept, rather than behind the `sent`
    ones at replicas with so many `places`."""
    return places > 0 and sent >= places + max(1, places // _AHEAD)
