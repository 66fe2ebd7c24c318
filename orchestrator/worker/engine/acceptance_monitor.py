"""Watches how many drafts are accepted, by drafter and class of requests, and says where that is too few.

Drafts that were not verified count as far as they could be compared with the target's choices without them. Else nobody
would hear of a drafter that is always wrong, because the guard soon leaves its drafts alone.

An episode begins where a warning is due (policies.serving.acceptance_alarm), and ends where the rate is at the
threshold again. What is old counts less: where a class has RECENT drafted tokens, all its counts are halved.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import AcceptanceWarning
from orchestrator.worker.drafting.port import Draft
from policies.serving.acceptance_alarm import Cause, DraftCounts, Sample, warning

# ADR 0035: an episode ends a few hundred good tokens after its cause.
RECENT = 2000.0
_MOST_CLASSES = 256  # bounds memory: user tags are clients' own words
_POSITIONS = 4  # the first ones tell whether acceptance falls with depth


class _Key(NamedTuple):
    drafter: str
    route: str
    user: str


@dataclass(slots=True)
class _ClassCounts:
    """Counts of a class, (drafted, accepted) tokens: `verified` ones, and all that were judged. `reached`, `held`:
    drafts whose first i tokens were accepted and that had one more judged, and where that was accepted. `promised`:
    accepted tokens that its confidences led to expect."""

    verified: list[float] = field(default_factory=lambda: [0.0, 0.0])
    greedy: list[float] = field(default_factory=lambda: [0.0, 0.0])
    sampled: list[float] = field(default_factory=lambda: [0.0, 0.0])
    reached: list[float] = field(default_factory=lambda: [0.0] * _POSITIONS)
    held: list[float] = field(default_factory=lambda: [0.0] * _POSITIONS)
    promised: float = 0.0
    episode: AcceptanceWarning | None = None

    @property
    def all(self) -> DraftCounts:
        return DraftCounts(int(self.greedy[0] + self.sampled[0]), int(self.greedy[1] + self.sampled[1]))

    def halve(self) -> None:
        for counts in (self.verified, self.greedy, self.sampled, self.reached, self.held):
            counts[:] = [0.5 * count for count in counts]
        self.promised *= 0.5


class AcceptanceMonitor:
    """Counts judged drafts. Not thread-safe: the decode loop's. `threshold` 0: no warning is ever due."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._classes: OrderedDict[_Key, _ClassCounts] = OrderedDict()
        self._changed: set[_Key] = set()

    def set_threshold(self, threshold: float) -> None:
        """Warn below this from now on; a warning that stands is looked at anew."""
        if threshold != self._threshold:
            self._threshold = threshold
            for counts in self._classes.values():
                counts.episode = None

    def add(self, submit: Submit, draft: Draft, verified: int, right: int, compared: int) -> None:
        """`verified` tokens of a request's draft were verified, its first `compared` could be compared with what the
        target chose, and `right` of them were equal. What a grammar added is no drafter's."""
        own = draft.own
        judged = min(own, max(verified, compared))
        if not judged or not self._threshold:
            return
        key = _Key(draft.drafter, submit.route, submit.user)
        seen = self._touch_class(key)
        right = min(right, judged)
        verified = min(verified, own)
        seen.verified[0] += verified
        seen.verified[1] += min(right, verified)
        counts = seen.sampled if submit.sampling.temperature else seen.greedy
        counts[0] += judged
        counts[1] += right
        for position in range(min(right + 1, judged, _POSITIONS)):
            seen.reached[position] += 1
            seen.held[position] += position < right
        reach = 1.0
        for confidence in draft.confidences[:judged]:
            reach *= confidence
            seen.promised += reach
        if seen.greedy[0] + seen.sampled[0] >= RECENT:
            seen.halve()

    def _touch_class(self, key: _Key) -> _ClassCounts:
        self._changed.add(key)
        seen = self._classes.get(key)
        if seen is None:
            seen = self._classes[key] = _ClassCounts()
            while len(self._classes) > _MOST_CLASSES:
                self._changed.discard(self._classes.popitem(last=False)[0])
        self._classes.move_to_end(key)
        return seen

    def standing(self) -> list[AcceptanceWarning]:
        changed, self._changed = self._changed, set()
        totals = self._totals() if changed else {}
        for key in changed:
            seen = self._classes[key]
            due = warning(_sample(seen, totals[key.drafter]), threshold=self._threshold)
            rate, drafted = seen.all.rate, seen.all.drafted
            if due is not None and (due.cause is not Cause.HARD_TEXT or self._costly(seen)):
                seen.episode = AcceptanceWarning(*key, rate, due.upper, due.threshold, drafted, due.cause)
            elif rate >= self._threshold:
                seen.episode = None
        return [seen.episode for seen in self._classes.values() if seen.episode is not None]

    def _costly(self, seen: _ClassCounts) -> bool:
        """Return whether verified drafts fare badly too: where they do not, a drafter that is unsure and says so is
        left alone, and costs nothing."""
        return warning(Sample(_to_drafted(seen.verified), seen.promised), threshold=self._threshold) is not None

    def _totals(self) -> dict[str, DraftCounts]:
        totals: dict[str, DraftCounts] = {}
        for key, seen in self._classes.items():
            before, own = totals.get(key.drafter, DraftCounts()), seen.all
            totals[key.drafter] = DraftCounts(before.drafted + own.drafted, before.accepted + own.accepted)
        return totals


def _sample(seen: _ClassCounts, total: DraftCounts) -> Sample:
    """Return what was seen of a class; `total`: of all of its drafter's."""
    own = seen.all
    return Sample(
        own,
        seen.promised,
        tuple(DraftCounts(int(r), int(h)) for r, h in zip(seen.reached, seen.held, strict=True) if r >= 1.0),
        _to_drafted(seen.greedy),
        _to_drafted(seen.sampled),
        DraftCounts(total.drafted - own.drafted, total.accepted - own.accepted),
    )


def _to_drafted(counts: list[float]) -> DraftCounts:
    return DraftCounts(int(counts[0]), int(counts[1]))
