"""What target replicas take for a token, by how many sequences they decode at a time, from the rounds that they ran.

A straight line, tpot_ms = a + b n, fitted by least squares in which older rounds count ever less among those that had
about as many sequences. So what a lone sequence takes is still known after many rounds with others. Replicas that are
alike share a line: measured apart they would differ by noise, and noise would decide where requests go.

What one takes may be more while others work beside it, as they share memory, cores or the daemon. How many times as
long is learnt of each by itself, and the line is of rounds without them: where some of these are known, rounds that
others slow down leave it as it is.

Summing up anew for each candidate of each request is quadratic in replicas. So `SharedPaces` keeps what all show
together. Sums that are added to and taken from drift by rounding: few paces are summed anew each time, and many after
as many changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

# Weight that older rounds with about as many sequences keep with each new one: some 50 count (ADR 0027). Not tuned.
KEPT = 0.98
# Variance of the sequences, or rows, from which a slope can be read: half of one is the deviation. Not tuned.
LEAST_SPREAD = 0.25
# Of a lone sequence's time, for each sequence more: what is assumed where no profile says it, until it can be read. On
# processors one more added 0.08 to 0.15.
USUAL_RISE: Final = 0.1
# What the newest round that others worked beside counts in what they cost. Faster than the line forgets, so that rounds
# beside others do not change the line first. ADR 0144. Not tuned.
_NEWEST_BESIDE: Final = 0.1
# Rounds with about as many sequences, of at most fifty (KEPT), from which on those that others slow down say nothing
# more of a lone replica. ADR 0144. Not tuned.
_KNOWN: Final = 20.0
# What company costs from which on it is no noise: rounds differ by a tenth. ADR 0144. Not tuned.
FELT_COMPANY: Final = 1.1
# ADR 0027: replicas within it share a line. With a line each, noise spread eight equal requests 5 to 3 and worse.
_ALIKE = 1.25
UNKNOWN_TPOT_MS = 10.0
"""Of replicas of which nothing was measured: the same for all, so the load alone decides. ADR 0097: profiles say it
first wherever there is one."""
# Of a token's time: what a row of prefill is taken for until one was seen. ADR 0008: 0.5 to 1.5 ms beside 7 to 9.
_USUAL_PREFILL = 0.1
# Of the best that is known: what a device is taken for of which nothing is. Any below 1 lets a lone request try it.
_UNTRIED: Final = 0.9
# Rounds with a draft, of at most fifty (KEPT), from which their mean says what the draft saves. ADR 0121. Not tuned.
_TRIED: Final = 15.0
# What a draft that was hardly tried is taken to save of a token's time. ADR 0121: drafts that pay made 1.3 to 2.8 times
# the tokens. So only a pair is tried that may be the best.
_HOPED: Final = 0.6
# ADR 0091: up to so many are summed anew, so that small fleets predict to the bit what they did.
_SUMMED_ANEW: Final = 16


_NO_LEVELS: Final[Mapping[int, tuple[float, ...]]] = MappingProxyType({})


class ReplicaPace(NamedTuple):
    """Weighted sums over rounds: their number, sequences, squares of them, TPOT (ms), products of both, waiting
    for drafts (ms), tokens of a sequence, and `rise`: the share of a lone sequence's time that each one more is
    expected to add. `prefill_ms`: mean time of a row of prefill; 0 where none was seen. `levels`: of one replica the
    same sums, apart by the bits that the number of sequences has; each forgets by itself."""

    weight: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    ms: float = 0.0
    n_ms: float = 0.0
    wait_ms: float = 0.0
    made: float = 0.0
    rise: float = 0.0
    prefill_ms: float = 0.0
    levels: Mapping[int, tuple[float, ...]] = _NO_LEVELS

    def tpot_ms(self, sequences: int) -> float:
        """Return what a token takes each of so many sequences; 0 where nothing was measured. It is never less than so
        many sequences' part of what more of them took."""
        weight, n, nn, ms, n_ms, _, _, rise, _, _ = self
        if not weight:
            return 0.0
        mean_n, mean_ms = n / weight, ms / weight
        spread = nn / weight - mean_n * mean_n
        if spread >= LEAST_SPREAD:
            slope = (n_ms / weight - mean_n * mean_ms) / spread
        else:
            slope = mean_ms / (weight / rise + mean_n - 1.0) if rise > 0.0 else 0.0
        if slope <= 0.0:
            return mean_ms
        return max(mean_ms + slope * (sequences - mean_n), mean_ms * min(1.0, sequences / mean_n))


def _observe(
    pace: ReplicaPace,
    sequences: int,
    tokens: float,
    rows: float,
    drafted: float,
    round_ms: float,
    draft_ms: float = 0.0,
    rise: float = USUAL_RISE,
) -> ReplicaPace:
    prefilled = rows - 2 * sequences - drafted
    if prefilled > 0:
        own_ms = max(0.0, round_ms - pace.tpot_ms(sequences)) / prefilled
        kept = own_ms if pace.prefill_ms == 0.0 else 0.8 * pace.prefill_ms + 0.2 * own_ms
        return pace._replace(prefill_ms=kept)
    if tokens <= 0 or sequences <= 0:
        return pace
    tpot_ms = round_ms * sequences / tokens
    seen = (1.0, sequences, sequences * sequences, tpot_ms, sequences * tpot_ms, draft_ms, tokens / sequences, rise)
    level = sequences.bit_length()
    known = pace.levels.get(level)
    sums = seen if known is None else tuple(KEPT * old + new for old, new in zip(known, seen, strict=True))
    levels = {**pace.levels, level: sums}
    return ReplicaPace._make([*map(sum, zip(*levels.values(), strict=True)), pace.prefill_ms, levels])


class SeenRound(NamedTuple):
    """A round as a replica's pace is learnt from it. `draft`: what proposed tokens there then ("": nothing);
    `draft_ms`: what the round waited for it. `beside`: other replicas had requests then."""

    sequences: int
    tokens: float
    rows: float
    drafted: float
    round_ms: float
    draft_ms: float = 0.0
    draft: str = ""
    beside: bool = False


class PairPaces(NamedTuple):
    """What a replica takes for a token: `plain`, as it would be without drafts, and with each draft that it had. While
    other replicas work it takes `company` times as long.

    A round with drafts says what one without would take at most: its time less that of drafting, for one token of each
    sequence. So both are known without a round being spent on it.
    """

    plain: ReplicaPace = ReplicaPace()
    drafted: Mapping[str, ReplicaPace] = MappingProxyType({})
    company: float = 1.0

    def observe(self, seen: SeenRound, stretch: float = 1.0, rise: float = USUAL_RISE) -> PairPaces:
        """Take in a round that took `stretch` times as long as on a device of its own. `rise`: see ReplicaPace."""
        sequences, tokens, rows, drafted, round_ms, draft_ms, draft, beside = seen
        plain_ms = (round_ms - (draft_ms if drafted else 0.0)) / stretch
        work = sequences if drafted else tokens
        company, plain = self.company, self.plain
        known = plain.levels.get(sequences.bit_length())
        decodes = work > 0 and rows <= 2 * sequences + drafted
        if beside:
            if decodes and known is not None:
                times = plain_ms * sequences / work / plain.tpot_ms(sequences)
                company = max(1.0, company + _NEWEST_BESIDE * (times - company))
            plain_ms, stretch = plain_ms / company, stretch * company
        if not (beside and decodes and company > 1.0 and known is not None and known[0] >= _KNOWN):
            plain = _observe(plain, sequences, work, rows, drafted, plain_ms if plain_ms > 0.0 else 0.0, 0.0, rise)
        if not draft:
            return PairPaces(plain, self.drafted, company)
        with_it = self.drafted.get(draft, ReplicaPace())
        with_it = _observe(with_it, sequences, tokens, rows, drafted, round_ms / stretch, draft_ms / stretch, rise)
        return PairPaces(plain, {**self.drafted, draft: with_it}, company)


def reckon_saved_ms(
    own: ReplicaPace | None, drafted: ReplicaPace, plain_ms: float, shared_ms: float, drafted_ms: float
) -> float:
    """Return what a draft saves of a token's time that takes `plain_ms` without it.

    How much of a draft is right is a matter of requests, and how long a forward takes one of the device. So replicas on
    devices that are alike share what a token takes without drafts (`shared_ms`) and with them (`drafted_ms`), whoever
    had the texts that are easy to draft for. What sets one apart is how long it waits for its drafts.
    """
    if not drafted_ms or not shared_ms:
        return 0.0
    saved_ms = plain_ms * (1.0 - drafted_ms / shared_ms)
    if own is not None and own.weight and drafted.made:
        more_ms = own.wait_ms / own.weight - drafted.wait_ms / drafted.weight
        if abs(more_ms) > (_ALIKE - 1.0) * plain_ms:
            saved_ms -= more_ms * drafted.weight / drafted.made
    return saved_ms if saved_ms > 0.0 else 0.0


def expect_pace(*, places: int, alone_ms: float, full_ms: float, prefill_ms: float) -> ReplicaPace:
    """Return the pace of a replica whose rounds are expected to take so long with one sequence and with all places
    taken, and a row of a prompt `prefill_ms`."""
    if alone_ms <= 0.0:
        return ReplicaPace()
    if places <= 1:
        return ReplicaPace(1.0, 1.0, 1.0, alone_ms, alone_ms, rise=USUAL_RISE, prefill_ms=prefill_ms)
    n, nn, n_ms = 1.0 + places, 1.0 + places * places, alone_ms + places * full_ms
    rise = max(0.0, full_ms / alone_ms - 1.0) / (places - 1)
    return ReplicaPace(2.0, n, nn, alone_ms + full_ms, n_ms, rise=2.0 * rise, prefill_ms=prefill_ms)


def is_alike(own_ms: float, together_ms: float) -> bool:
    """True where a replica is not clearly of another kind than those that it is measured with (0: not measured)."""
    return not own_ms or not together_ms or 1.0 / _ALIKE <= own_ms / together_ms <= _ALIKE


def reckon_tpot_ms(own_ms: float, together_ms: float, sequences: int) -> float:
    """Return the TPOT to reckon with, of what one replica takes and what all take together; 0: not measured."""
    if not together_ms:
        return UNKNOWN_TPOT_MS * (1.0 + USUAL_RISE * (sequences - 1))
    return together_ms if is_alike(own_ms, together_ms) else own_ms


def predict_prefill_ms(all_paces: Sequence[ReplicaPace]) -> float:
    """Return what a token of a prompt takes, on the mean of the replicas that know."""
    known = [pace.prefill_ms for pace in all_paces if pace.prefill_ms > 0.0]
    return sum(known) / len(known) if known else guess_prefill_ms(add_paces(all_paces).tpot_ms(1))


def guess_prefill_ms(tpot_ms: float) -> float:
    """Return what a token of a prompt is taken for where no replica has shown it, by what one of an output takes."""
    return _USUAL_PREFILL * (tpot_ms or UNKNOWN_TPOT_MS)


def add_paces(paces: Sequence[ReplicaPace]) -> ReplicaPace:
    """Return the sums over replicas; what prefill takes is left out."""
    return _pace_of(map(sum, zip(*(pace[:_SUMS] for pace in paces), strict=True))) if paces else _NO_PACE


def _pace_of(sums: Iterable[float]) -> ReplicaPace:
    return ReplicaPace._make([*sums, 0.0, _NO_LEVELS])


_NO_PACE: Final = ReplicaPace()
_SUMS: Final = 8  # the first of its fields


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
        old, new = before or _NO_PACE, pace or _NO_PACE
        columns = zip(self._sum[:_SUMS], old[:_SUMS], new[:_SUMS], strict=True)
        self._sum = _pace_of(known - less + more for known, less, more in columns)
        self._prefills += (new.prefill_ms > 0.0) - (old.prefill_ms > 0.0)
        self._prefill_ms += new.prefill_ms - old.prefill_ms

    def find_sum(self) -> ReplicaPace:
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
    takes that has run nothing yet. Of a device whose like has run nothing its own profile says it. Where there is none
    it counts as a little faster than the fastest, so that a request tries it and its own rounds tell the rest."""

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
        return self._groups.get(alike, _NOBODY)

    def share_tpot_ms(self, group: PaceGroup, expected: ReplicaPace, sequences: int) -> float:
        """Return what a token takes replicas of a group; 0: nothing is known. `expected`: by their own profile."""
        known_ms = group.plain.tpot_ms(sequences) or expected.tpot_ms(sequences)
        return known_ms or self._guess_ms(lambda paces: paces.tpot_ms(sequences))

    def predict_prefill_ms(self, group: PaceGroup, expected: ReplicaPace) -> float:
        """Return what a token of a prompt takes (see replica_load.predict_prefill_ms)."""
        known_ms = group.plain.prefill_ms() or expected.prefill_ms or self._guess_ms(PaceSum.prefill_ms)
        return known_ms or guess_prefill_ms(self.share_tpot_ms(group, expected, 1))

    def _guess_ms(self, read: Callable[[PaceSum], float]) -> float:
        """Return what is taken for a figure of a device of which nothing is known; 0 where nothing is known of any."""
        known = [figure_ms for other in self._groups.values() if (figure_ms := read(other.plain)) > 0.0]
        return _UNTRIED * min(known, default=0.0)

    def predict_saved_ms(self, group: PaceGroup, own: PairPaces, draft: str, plain_ms: float, sequences: int) -> float:
        """Return what a draft saves of a token that takes `plain_ms` without it. Where no replica of the group has
        drafted, it is the share that it saves all. Where hardly any has, it is as much as a good draft saves, so that a
        lone request tries it, and for more than one nothing. See replica_load.reckon_saved_ms."""
        together = group.find_drafted(draft)
        if together is None or not together.find_sum().weight:
            group, together = self._every, self._every.find_drafted(draft)
        if together is None or together.find_sum().weight < _TRIED:
            return _HOPED * plain_ms if sequences == 1 else 0.0
        shared_ms, drafted_ms = group.plain.tpot_ms(sequences), together.tpot_ms(sequences)
        return reckon_saved_ms(own.drafted.get(draft), together.find_sum(), plain_ms, shared_ms, drafted_ms)
