"""What all replicas show together (policies.serving.replica_load), kept as their paces change.

Summing up anew for each candidate of each request is quadratic in replicas. Here each change costs the same however
many there are. Sums that are added to and taken from drift by rounding: few paces are summed anew each time, and many
after as many changes.
"""

from __future__ import annotations

from typing import Final

from policies.serving.replica_load import (
    PairPaces,
    ReplicaPace,
    add_paces,
    guess_prefill_ms,
    reckon_tpot_ms,
)

_SUMMED_ANEW: Final = 16
_NOTHING: Final = ReplicaPace()


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
        one, two, known = before or _NOTHING, pace or _NOTHING, self._sum
        self._sum = ReplicaPace(
            known.weight - one.weight + two.weight,
            known.n - one.n + two.n,
            known.nn - one.nn + two.nn,
            known.ms - one.ms + two.ms,
            known.n_ms - one.n_ms + two.n_ms,
        )
        self._prefills += (two.prefill_ms > 0.0) - (one.prefill_ms > 0.0)
        self._prefill_ms += two.prefill_ms - one.prefill_ms

    def find_sum(self) -> ReplicaPace:
        """Return the sums."""
        if self._sum is None:
            known = [pace.prefill_ms for pace in self._paces.values() if pace.prefill_ms > 0.0]
            self._prefills, self._prefill_ms, self._changes = len(known), sum(known), 0
            self._sum = add_paces(list(self._paces.values()))
        return self._sum

    def tpot_ms(self, sequences: int) -> float:
        """Return what a token takes each of so many sequences; 0 where nothing was measured."""
        found = self._tpots.get(sequences)
        if found is None:
            found = self._tpots[sequences] = self.find_sum().tpot_ms(sequences)
        return found

    def predict_prefill_ms(self) -> float:
        """Return what a token of a prompt takes, on the mean of those that know."""
        together = self.find_sum()
        return self._prefill_ms / self._prefills if self._prefills else guess_prefill_ms(together)


class SharedPaces:
    """The paces of all replicas that may have streams: without drafts, and with each draft."""

    def __init__(self) -> None:
        self.plain = PaceSum()
        self._drafted: dict[str, PaceSum] = {}
        self._known: dict[int, PairPaces] = {}

    def set_paces(self, key: int, paces: PairPaces | None) -> None:
        """A replica's are others now; None: it has no streams any more."""
        before = self._known.get(key)
        if paces is before:
            return
        if paces is None:
            del self._known[key]
        else:
            self._known[key] = paces
        self.plain.set_pace(key, paces.plain if paces is not None else None)
        drafted = paces.drafted if paces is not None else {}
        if not drafted and (before is None or not before.drafted):
            return
        for draft in drafted.keys() | (before.drafted.keys() if before is not None else ()):
            self._drafted.setdefault(draft, PaceSum()).set_pace(key, drafted.get(draft))

    def predict_tpot_ms(self, own: ReplicaPace, sequences: int) -> float:
        """See replica_load.predict_tpot_ms."""
        return reckon_tpot_ms(own.tpot_ms(sequences), self.plain.tpot_ms(sequences), sequences)

    def predict_prefill_ms(self) -> float:
        """See replica_load.predict_prefill_ms."""
        return self.plain.predict_prefill_ms()

    def predict_saved_ms(self, own: PairPaces, draft: str, sequences: int) -> float:
        """See replica_load.predict_saved_ms."""
        together = self._drafted.get(draft)
        if together is None or not together.find_sum().weight:
            return 0.0
        plain_ms = self.predict_tpot_ms(own.plain, sequences)
        own_ms = own.drafted.get(draft, _NOTHING).tpot_ms(sequences)
        return max(0.0, plain_ms - reckon_tpot_ms(own_ms, together.tpot_ms(sequences), sequences))
