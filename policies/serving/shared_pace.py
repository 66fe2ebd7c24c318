"""What all replicas show together (policies.serving.replica_load), kept as their paces change.

Summing up anew for each candidate of each request is quadratic in replicas. Here each change costs the same however
many there are. Sums that are added to and taken from drift by rounding: few paces are summed anew each time, and many
after as many changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from policies.serving.replica_load import (
    PairPaces,
    ReplicaPace,
    add_paces,
    guess_prefill_ms,
    reckon_saved_ms,
)

_SUMMED_ANEW: Final = 16
_NO_PACE: Final = ReplicaPace()


class PaceSum:
    """The sum of some paces, by numbers that tell whose they are."""

    def __init__(self) -> None:
        self._paces: dict[int, ReplicaPace] = {}
        self._sum: ReplicaPace | None = None
        self._prefills = 0
        self._prefill_ms = 0.0
        self._changes = 0
        self._tpots: dict[int, float] = {}

    def set_pace(self, key: int, pace: ReplicaPace | None) -> None:
        """One of them is another now, or there is none (any more)."""
        before = self._paces.get(key)
        if pace is before:
            return
        if pace is None:
            del self._paces[key]
        else:
            self._paces[key] = pace
        self._tpots.clear()
        self._changes += 1
        if self._sum is None or len(self._paces) <= _SUMMED_ANEW or self._changes > len(self._paces):
            self._sum = None
            return
        old, new, known = before or _NO_PACE, pace or _NO_PACE, self._sum
        self._sum = ReplicaPace(
            known.weight - old.weight + new.weight,
            known.n - old.n + new.n,
            known.nn - old.nn + new.nn,
            known.ms - old.ms + new.ms,
            known.n_ms - old.n_ms + new.n_ms,
            known.wait_ms - old.wait_ms + new.wait_ms,
            known.made - old.made + new.made,
        )
        self._prefills += (new.prefill_ms > 0.0) - (old.prefill_ms > 0.0)
        self._prefill_ms += new.prefill_ms - old.prefill_ms

    def find_sum(self) -> ReplicaPace:
        """Return the sums."""
        if self._sum is None:
            known = [pace.prefill_ms for pace in self._paces.values() if pace.prefill_ms > 0.0]
            self._prefills, self._prefill_ms, self._changes = len(known), sum(known), 0
            self._sum = add_paces(list(self._paces.values()))
        return self._sum

    def tpot_ms(self, sequences: int) -> float:
        """Return what a token takes each of so many sequences; 0 where nothing was measured."""
        tpot_ms = self._tpots.get(sequences)
        if tpot_ms is None:
            tpot_ms = self._tpots[sequences] = self.find_sum().tpot_ms(sequences)
        return tpot_ms

    def prefill_ms(self) -> float:
        """Return what a token of a prompt takes, on the mean of those that know; 0 where none does."""
        self.find_sum()
        return self._prefill_ms / self._prefills if self._prefills else 0.0


class PaceGroup:
    """The paces of some replicas: without drafts, and with each draft."""

    def __init__(self) -> None:
        self.plain = PaceSum()
        self._drafted: dict[str, PaceSum] = {}

    def set_paces(self, key: int, before: PairPaces | None, paces: PairPaces | None) -> None:
        """A replica's were those `before`, and are these now; None: it is not of the group."""
        self.plain.set_pace(key, paces.plain if paces is not None else None)
        drafted = paces.drafted if paces is not None else {}
        if not drafted and (before is None or not before.drafted):
            return
        for draft in drafted.keys() | (before.drafted.keys() if before is not None else ()):
            self._drafted.setdefault(draft, PaceSum()).set_pace(key, drafted.get(draft))

    def find_drafted(self, draft: str) -> PaceSum | None:
        """Return their paces with a draft; None where none has had it."""
        return self._drafted.get(draft)


_NOBODY: Final = PaceGroup()


class SharedPaces:
    """The paces of all replicas that may have streams. Those on devices that are alike share a pace: it says what one
    takes that has run nothing yet. Of a device whose like has run nothing its own profile says it, and where there is
    none the pace of all."""

    def __init__(self) -> None:
        self._every = PaceGroup()
        self._groups: dict[Hashable, PaceGroup] = {}
        self._known: dict[int, tuple[PairPaces, Hashable]] = {}

    @property
    def plain(self) -> PaceSum:
        """The paces of all without drafts."""
        return self._every.plain

    def set_paces(self, key: int, paces: PairPaces | None, alike: Hashable = None) -> None:
        """A replica's are others now; None: it has no streams any more. `alike`: equal where devices are alike."""
        before, was = self._known.get(key, (None, alike))
        if paces is before and was == alike:
            return
        if paces is None:
            del self._known[key]
        else:
            self._known[key] = (paces, alike)
        self._every.set_paces(key, before, paces)
        if before is not None and was != alike:
            self._groups[was].set_paces(key, before, None)
            before = None
        group = self._groups.get(alike)
        if group is None:
            group = self._groups[alike] = PaceGroup()
        group.set_paces(key, before, paces)

    def find_group(self, alike: Hashable) -> PaceGroup:
        """Return the paces of replicas that are alike."""
        return self._groups.get(alike, _NOBODY)

    def share_tpot_ms(self, group: PaceGroup, expected: ReplicaPace, sequences: int) -> float:
        """Return what a token takes replicas of a group; 0: nothing is known. `expected`: by their own profile."""
        return group.plain.tpot_ms(sequences) or expected.tpot_ms(sequences) or self._every.plain.tpot_ms(sequences)

    def predict_prefill_ms(self, group: PaceGroup, expected: ReplicaPace) -> float:
        """Return what a token of a prompt takes (see replica_load.predict_prefill_ms)."""
        known_ms = group.plain.prefill_ms() or expected.prefill_ms or self._every.plain.prefill_ms()
        return known_ms or guess_prefill_ms(self.share_tpot_ms(group, expected, 1))

    def predict_saved_ms(self, group: PaceGroup, own: PairPaces, draft: str, plain_ms: float, sequences: int) -> float:
        """Return what a draft saves of a token that takes `plain_ms` without it. Where no replica of the group has
        drafted, it is the share that it saves all. See replica_load.reckon_saved_ms."""
        together = group.find_drafted(draft)
        if together is None or not together.find_sum().weight:
            group, together = self._every, self._every.find_drafted(draft)
            if together is None:
                return 0.0
        shared_ms, drafted_ms = group.plain.tpot_ms(sequences), together.tpot_ms(sequences)
        return reckon_saved_ms(own.drafted.get(draft), together.find_sum(), plain_ms, shared_ms, drafted_ms)
