"""Watches how many drafts are accepted, by drafter and class of requests, and says where that is too few.

An episode begins where a warning is due (policies.low_acceptance), and ends where the rate is at the threshold again.
What is old counts less: where a class has RECENT drafted tokens, all its counts are halved.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.cluster.port import AcceptanceWarning, Submit
from orchestrator.drafting.port import Draft
from policies.low_acceptance import Drafted, Sample, warning

RECENT = 2000.0
_MOST_CLASSES = 256
_POSITIONS = 4  # the first ones tell whether acceptance falls with depth


class _Key(NamedTuple):
    drafter: str
    route: str
    user: str


@dataclass(slots=True)
class _Seen:
    """Counts of a class; `reached`, `held`: drafts whose first i tokens were accepted, and that had one more, which was
    accepted. `confident`: the drafter says how sure it is."""

    greedy: list[float] = field(default_factory=lambda: [0.0, 0.0])
    sampled: list[float] = field(default_factory=lambda: [0.0, 0.0])
    reached: list[float] = field(default_factory=lambda: [0.0] * _POSITIONS)
    held: list[float] = field(default_factory=lambda: [0.0] * _POSITIONS)
    promised: float = 0.0
    confident: bool = False
    episode: AcceptanceWarning | None = None

    @property
    def all(self) -> Drafted:
        return Drafted(int(self.greedy[0] + self.sampled[0]), int(self.greedy[1] + self.sampled[1]))

    def halve(self) -> None:
        for counts in (self.greedy, self.sampled, self.reached, self.held):
            counts[:] = [0.5 * count for count in counts]
        self.promised *= 0.5


class AcceptanceWatch:
    """Counts verified drafts. Not thread-safe: the decode loop's. `threshold` 0: no warning is ever due."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._classes: OrderedDict[_Key, _Seen] = OrderedDict()
        self._changed: set[_Key] = set()

    def add(self, submit: Submit, draft: Draft, accepted: int) -> None:
        """A draft of a request was verified, and so many of its leading tokens were accepted. What a grammar added is
        no drafter's."""
        drafted = draft.own
        if not drafted or not self._threshold:
            return
        key = _Key(draft.drafter, submit.route, submit.user)
        seen = self._classes.get(key)
        if seen is None:
            seen = self._classes[key] = _Seen()
            while len(self._classes) > _MOST_CLASSES:
                self._changed.discard(self._classes.popitem(last=False)[0])
        self._classes.move_to_end(key)
        self._changed.add(key)
        accepted = min(accepted, drafted)
        counts = seen.sampled if submit.sampling.temperature else seen.greedy
        counts[0] += drafted
        counts[1] += accepted
        for position in range(min(accepted + 1, drafted, _POSITIONS)):
            seen.reached[position] += 1
            seen.held[position] += position < accepted
        reach = 1.0
        for confidence in draft.confidences[:drafted]:
            reach *= confidence
            seen.promised += reach
        seen.confident = seen.confident or bool(draft.confidences)
        if seen.greedy[0] + seen.sampled[0] >= RECENT:
            seen.halve()

    def standing(self) -> list[AcceptanceWarning]:
        """Return the episodes that go on."""
        changed, self._changed = self._changed, set()
        for key in changed:
            seen = self._classes[key]
            due = warning(self._sample(key, seen), threshold=self._threshold)
            rate, drafted = seen.all.rate, seen.all.drafted
            if due is not None:
                seen.episode = AcceptanceWarning(*key, rate, due.upper, due.threshold, drafted, due.cause)
            elif rate >= self._threshold:
                seen.episode = None
        return [seen.episode for seen in self._classes.values() if seen.episode is not None]

    def _sample(self, key: _Key, seen: _Seen) -> Sample:
        others = [one.all for other, one in self._classes.items() if other != key and other.drafter == key.drafter]
        return Sample(
            seen.all,
            seen.promised if seen.confident else -1.0,
            tuple(Drafted(int(r), int(h)) for r, h in zip(seen.reached, seen.held, strict=True) if r >= 1.0),
            _drafted(seen.greedy),
            _drafted(seen.sampled),
            Drafted(sum(one.drafted for one in others), sum(one.accepted for one in others)),
        )


def _drafted(counts: list[float]) -> Drafted:
    return Drafted(int(counts[0]), int(counts[1]))
